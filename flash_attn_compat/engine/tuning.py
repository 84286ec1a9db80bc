"""Where the user allows compilation: is a compiled kernel faster here than the one whose turn it is?

Nobody can know for the user's GPU, so both are timed, once for each kind of call and size, and the answer is
kept for the process. Calls that may need gradients are not timed: they keep the order of backends.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from flash_attn_compat import settings
from flash_attn_compat.backends import BACKENDS, Backend
from flash_attn_compat.engine import streams
from flash_attn_compat.engine.call import AttentionCall

# (row, key, head) triples from which on a GPU has enough to do for its kernels to count.
_WORTH_TIMING = 2**26
_RUNS = 5


class Verdict(NamedTuple):
    """Milliseconds of one forward by the backend whose turn it is, and by the compiled one."""

    usual: float
    compiled: float
    rival: Backend

    @property
    def rival_wins(self) -> bool:
        return self.compiled < self.usual


_verdicts: dict[tuple[object, ...], Verdict | None] = {}


def forget() -> None:
    _verdicts.clear()


def faster(call: AttentionCall, usual: Backend) -> Backend:
    """``usual``, or a compiled backend that was found to be faster at such calls; may time both now."""
    key = _key(call)
    if key is None:
        return usual
    if key not in _verdicts:
        if call.q.is_cuda and streams.is_capturing(call.q.device):
            return usual
        _verdicts[key] = _time(call, usual)
    verdict = _verdicts[key]
    return verdict.rival if verdict is not None and verdict.rival_wins else usual


def why_not(call: AttentionCall, usual: Backend) -> str | None:
    """What speaks against ``usual`` as far as known; never times anything."""
    key = _key(call) if usual.yields_to_compiled else None
    verdict = None if key is None else _verdicts.get(key)
    if verdict is None or not verdict.rival_wins:
        return None
    return (
        f"took {verdict.usual:.3g} ms for such a call when it was timed, compiled {verdict.rival.name} "
        f"{verdict.compiled:.3g} ms"
    )


def _key(call: AttentionCall) -> tuple[object, ...] | None:
    """Equal for calls of one kind and, within a factor of 8, size; None for calls that are not timed."""
    if call.needs_grad or call.given_lse:
        return None
    rows = call.q.shape[0] if call.cu_seqlens_q is not None else call.q.shape[0] * call.q.shape[1]
    work = rows * call.max_seqlen_k * call.nheads
    if work < _WORTH_TIMING:
        return None
    return call.signature(), (work // _WORTH_TIMING).bit_length() // 3, settings.fingerprint()


def _time(call: AttentionCall, usual: Backend) -> Verdict | None:
    traits = call.traits()
    rival = next((one for one in BACKENDS if one.compiles and not one.reasons(traits)), None)
    if rival is None:
        return None
    try:
        usual_ms, compiled_ms = (_milliseconds(backend, call) for backend in (usual, rival))
    except torch.cuda.OutOfMemoryError as error:
        warnings.warn(f"{rival.name} is not compared with {usual.name}: {error}", RuntimeWarning, stacklevel=2)
        return None
    return None if usual_ms is None or compiled_ms is None else Verdict(usual_ms, compiled_ms, rival)


def _milliseconds(backend: Backend, call: AttentionCall) -> float | None:
    """The shortest of some runs after a first one that compiles; None from a backend that fails."""
    if backend.attempt(call) is None:
        return None
    spans: list[float] = []
    with torch.cuda.device(call.q.device):
        for _ in range(_RUNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            backend.attempt(call)
            end.record()
            end.synchronize()
            spans.append(begin.elapsed_time(end))
    return min(spans)
