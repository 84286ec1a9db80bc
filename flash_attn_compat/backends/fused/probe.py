"""On GPUs where nobody has measured: is the kernel faster than the backend that would serve without it?

A fixed problem, not the caller's, is timed once for each GPU model, size of head_dim and direction. The verdict is kept
beside the compiled kernels, so that later processes decide alike; `flash-attn-compat doctor` shows and renews it.
"""

from __future__ import annotations

import itertools
import json
from typing import NamedTuple

import torch

from flash_attn_compat import settings
from flash_attn_compat.backends.base import Backend
from flash_attn_compat.backends.fused import cache, launcher, loader, variants
from flash_attn_compat.backends.fused.loader import KernelError
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine import capture
from flash_attn_compat.engine.call import AttentionCall, Upstream
from flash_attn_compat.engine.mask import Mask

# Compute capabilities of GPUs on which the order of backends was measured.
MEASURED = frozenset({(9, 0)})
_BATCH, _SEQLEN, _HEADS, _RUNS = 2, 2048, 8, 5


class Slower(KernelError):
    """A kernel that others beat on this GPU: no defect."""


class Verdict(NamedTuple):
    """Milliseconds of the fixed problem by the kernel and by ``rival``, the next backend."""

    fused: float
    rival: str
    other: float

    @property
    def is_slower(self) -> bool:
        return self.fused > self.other


# Every backend, in order: the list of backends sets it, since this module cannot import that one.
candidates: tuple[Backend, ...] = ()
_verdicts: dict[tuple[str, int, str], Verdict | None] = {}


def check(kind: Kind, call: AttentionCall, direction: str, device: int) -> None:
    """Raises Slower where the verdict speaks against the kernel; may time both now.

    The verdict counts only for calls that the faster backend can compute too. All others are much slower.
    """
    wanted = not (kind.alibi or kind.softcap or kind.paged or (kind.local and kind.window is not None))
    if not wanted or settings.fused() or settings.forced_capability() is not None or settings.named_backend():
        return
    if loader.capability(device) in MEASURED or capture.is_capturing(device):
        return
    found = verdict(kind.D, direction, device)
    if found is None or not found.is_slower:
        return
    rival = next((backend for backend in candidates if backend.name == found.rival), None)
    if rival is None or rival.reasons((call if direction == "forward" else call.from_given_results()).traits()):
        return
    raise Slower(
        f"took {found.fused:.3g} ms for a {direction} of head_dim {kind.D} when it was timed, {found.rival} "
        f"{found.other:.3g} ms (flash-attn-compat doctor --renew times again, {settings.FUSED}=1 uses it all the same)"
    )


def verdict(head_dim: int, direction: str, device: int, renew: bool = False) -> Verdict | None:
    """The verdict of this process, the one on disk, or a new one; None where there is nothing to compare with."""
    key = loader.device_name(device), head_dim, direction
    if renew or key not in _verdicts:
        _verdicts[key] = None  # until then the kernel may be used: by what times it, and by other threads
        found = None if renew else _known(head_dim, direction, device)
        if found is None:
            found = _timed(head_dim, direction, device)
            launcher.forget_plans()
            if found is not None:
                cache.write(_file(head_dim, direction, device), json.dumps(found._asdict()).encode())
        _verdicts[key] = found
    return _verdicts[key]


def told(device: int, renew: bool) -> list[str]:
    """A line for each verdict that is known, or why there is none. renew: time all of them again"""
    if loader.capability(device) in MEASURED:
        return ["the order of backends was measured on this GPU's kind"]
    if settings.forced_capability() is not None:
        return ["not timed while the capability is forced"]
    lines = []
    for head_dim, direction in itertools.product(variants.HEAD_DIMS, ("forward", "backward")):
        found = verdict(head_dim, direction, device, renew=True) if renew else _known(head_dim, direction, device)
        if found is not None:
            serves = found.rival if found.is_slower else "fused"
            lines.append(
                f"{direction} of head_dim {head_dim}: fused {found.fused:.3g} ms, {found.rival} {found.other:.3g} ms: "
                f"{serves} serves"
            )
    return lines or ["not timed yet: that happens at the first call of each kind, or with doctor --renew"]


def _known(head_dim: int, direction: str, device: int) -> Verdict | None:
    """The verdict that is kept on disk."""
    kept = cache.read(_file(head_dim, direction, device))
    return None if kept is None else Verdict(**json.loads(kept))


def _file(head_dim: int, direction: str, device: int) -> str:
    """Other kernels and another PyTorch get a new verdict."""
    target, timed = loader.target(device), (variants.delta, variants.dkdv, variants.dq)
    kind = Kind(target.number, variants.FP16, head_dim, local=True)
    makers = (variants.forward,) if direction == "forward" else timed
    kernels = [loader.cache_name(make(kind), target.architecture) for make in makers]
    return cache.name_of(f"speed-{head_dim}-{direction}", *kernels, loader.device_name(device), torch.__version__)


def _timed(head_dim: int, direction: str, device: int) -> Verdict | None:
    place, shape = torch.device("cuda", device), (_BATCH, _SEQLEN, _HEADS, head_dim)
    with torch.cuda.device(place), torch.no_grad():
        try:
            generator = torch.Generator(place).manual_seed(0)
            q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float16, device=place) for _ in range(3))
            call = AttentionCall(
                q, k, v, head_dim**-0.5, Mask(None, 0), _SEQLEN, _SEQLEN, return_lse=True, needs_grad=True
            )
            traits = call.traits()
            able = [one for one in sorted(candidates, key=lambda one: one.rank(traits)) if not one.reasons(traits)]
            rival = next((one for one in able if one.name != "fused"), None)
            if rival is None:
                return None
            fused = next(one for one in candidates if one.name == "fused")
            times = [_milliseconds(backend, call, direction) for backend in (fused, rival)]
        except torch.cuda.OutOfMemoryError:
            return None
    return Verdict(times[0], rival.name, times[1])


def _milliseconds(backend: Backend, call: AttentionCall, direction: str) -> float:
    """The fastest of some runs. The first does not count: kernels are compiled and tried in it."""
    result = backend.forward(call)
    upstream = Upstream(call.q, result.out, result.softmax_lse, result.rng_state, result.saved)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_RUNS + 2)]
    for mark in marks:
        mark.record()
        if direction == "forward":
            backend.forward(call)
        else:
            backend.backward(call, upstream, None)
    torch.cuda.synchronize()
    spans: list[float] = [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
    return min(spans[1:])
