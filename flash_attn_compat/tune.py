"""flash-attn-compat tune: times this GPU's candidates at usual calls, and keeps what it finds for all later ones.

First the tiles of our own kernels, each by the function that users call; then, with the fastest of them, our kernels
beside the other backends. Whatever fails in between is left out and named.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import progress, settings
from flash_attn_compat.backends import BACKENDS
from flash_attn_compat.backends.fused import candidates, nvrtc, tensor_cores, tuned, variants
from flash_attn_compat.backends.fused.tuned import Card, TileChoice, Times
from flash_attn_compat.backends.fused.variants import Kind, Tile
from flash_attn_compat.card import Limits, flops, measure
from flash_attn_compat.core.features import dtype_name
from flash_attn_compat.dispatch import call_cache

_HEAD_DIMS = 64, 128
_BATCH, _CHANNELS, _GROUP, _PAGE = 4, 1024, 4, 256
_ROUNDS, _READING_MS = 3, 3.0
# What another tile must be faster by, lest it is noise that decides.
_GAIN = 0.98
_WITH_GRADIENTS = "full", "causal", "window", "softcap", "ALiBi"

Run = Callable[[], object]
# What is entered while a run is timed.
Way = Callable[[], contextlib.AbstractContextManager[None]]
_attend: Callable[..., Tensor] = flash_attn_compat.flash_attn_func


class Shape(NamedTuple):
    """Of usual problems; there are as many heads as fill 1024 channels."""

    head_dim: int
    dtype: torch.dtype
    seqlen: int
    device: torch.device
    batch: int = _BATCH

    @property
    def size(self) -> int:
        """That kernels are made for."""
        return variants.size_of(self.head_dim)

    def __str__(self) -> str:
        return f"head_dim {self.size}, {dtype_name(self.dtype)}"

    def random(self, rows: int, heads: int) -> Tensor:
        return torch.randn(self.batch, rows, heads, self.head_dim, dtype=self.dtype, device=self.device)

    @property
    def heads(self) -> int:
        return max(_GROUP, _CHANNELS // self.head_dim // _GROUP * _GROUP)


class CannotTune(RuntimeError):
    """There is nothing to time here; the message says why."""


@dataclass
class Tuning:
    """What is found on one GPU, question by question. failures: who could not be timed, and why"""

    device: torch.device
    head_dims: Sequence[int]
    dtypes: Sequence[torch.dtype]
    seqlen: int
    all_cases: bool = False  # also those in which plain PyTorch alone is the alternative
    batch: int = _BATCH
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        made_with = f"torch {torch.__version__}, flash_attn_compat {flash_attn_compat.__version__}"
        self.card = Card(str(settings.gpu(self.device)), made_with)

        self._index = self.device.index or 0

    @property
    def _number(self) -> int:
        return nvrtc.target(self._index).number

    def ask_all(self) -> None:
        """Time everything, and show how far it is."""
        for label, ask in progress.shown(list(self._questions()), lambda question: question[0]):
            try:
                ask()
            except nvrtc.ContextLost as error:
                self.failures.append(f"{label}: {error}")
                self.failures.append("what follows it. Run tune once more: the kernel that faulted is left out then")
                return
            except Exception as error:  # noqa: BLE001  whatever goes wrong, the rest is worth asking
                self._failed(label, error)

    def _questions(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is to be found out, and how."""
        for head_dim in self.head_dims:
            for dtype in self.dtypes:
                shape = Shape(head_dim, dtype, self.seqlen, self.device, self.batch)
                yield f"compiling for {shape}", partial(self._compile, shape)
                for entry in candidates.ENTRIES:
                    if len(self._tiles(entry, shape)) > 1:
                        yield f"tiles of {entry}, {shape}", partial(self._choose_tile, entry, shape)
                for case in tuned.CASES:
                    for training in (False, True) if case in _WITH_GRADIENTS else (False,):
                        label = f"{case}, {shape}{', training' * training}"
                        yield label, partial(self._compare, case, shape, training)

    def summary(self) -> list[str]:
        """A line for each verdict."""
        return [f"{self.card.gpu}, {self.card.made_with}", *tuned.format_lines(self.card)]

    def _failed(self, label: str, error: Exception) -> None:
        torch.cuda.empty_cache()
        cause: BaseException = error
        while cause.__context__ is not None:  # that others cannot serve either says nothing
            cause = cause.__context__
        self.failures.append(f"{label}: {nvrtc.first_line(cause)[:200]}")

    def _tiles(self, entry: str, shape: Shape) -> tuple[Tile | None, ...]:
        """None: the table's, which may be another one for each kind of call."""
        kind = Kind(self._number, variants.FP16, shape.head_dim)
        todays = getattr(variants, f"{entry}_tile")(kind)
        return None, *(tile for tile in candidates.candidate_tiles(entry, self._number, kind.D) if tile != todays)

    def _with(self, entry: str, shape: Shape, tile: Tile | None) -> Card:
        if tile is None:
            return self.card
        return self.card.merge(
            self.card._replace(tiles=(TileChoice(entry, shape.size, dtype_name(shape.dtype), tile),))
        )

    def _compile(self, shape: Shape) -> None:
        """Side by side: one takes a second."""
        half = variants.BF16 if self._number >= 80 else variants.BF16_AS_FP16
        kind = Kind(self._number, variants.FP16 if shape.dtype == torch.float16 else half, shape.head_dim)
        wanted = [
            getattr(variants, entry)(kind._replace(local=local, tiles=((entry, tile),) if tile else ()))
            for entry in candidates.ENTRIES
            for tile in self._tiles(entry, shape)
            for local in (False, True)
        ]
        nvrtc.load_all(dict.fromkeys(wanted), self._index)

    def _choose_tile(self, entry: str, shape: Shape) -> None:
        runs = problem if entry == "forward" else backward_alone
        ways = {tile: partial(ours, self._with(entry, shape, tile)) for tile in self._tiles(entry, shape)}
        found = [self._times(f"{entry}, {case}, {shape}", runs(case, shape), ways) for case in ("full", "causal")]
        totals = {tile: sum(times[tile] for times in found) for tile in ways if all(tile in times for times in found)}
        best = min(totals, key=lambda tile: totals[tile])
        if totals[best] < _GAIN * totals.get(None, math.inf):
            self.card = self._with(entry, shape, best)

    def _compare(self, case: str, shape: Shape, training: bool) -> None:
        run = problem(case, shape, training)
        reasons = flash_attn_compat.explain(run).reasons
        if reasons["fused"]:
            raise RuntimeError("; ".join(reasons["fused"]))
        not_wanted = {"reference"} if self.all_cases else {"reference", "chunked"}
        able = [name for name, against in reasons.items() if not against and name not in not_wanted]
        if able == ["fused"]:
            return
        ways: dict[str, Way] = {name: partial(flash_attn_compat.use_backend, name) for name in able}
        ways["fused"] = partial(ours, self.card)
        times = self._times(f"{case}, {shape}", run, ways)
        if "fused" in times and len(times) > 1:
            found = Times(case, shape.size, dtype_name(shape.dtype), training, times)
            self.card = self.card.merge(self.card._replace(times=(found,)))

    def _times(self, label: str, run: Run, ways: Mapping[Any, Way]) -> dict[Any, float]:
        """The fastest of some readings in each of the ways, taken in turns; without those that fail."""
        times: dict[Any, float] = {}
        left = dict(ways)
        for _ in range(_ROUNDS):
            for name, way in list(left.items()):
                try:
                    with way():
                        times[name] = min(reading(run), times.get(name, math.inf))
                except nvrtc.ContextLost:
                    raise
                except Exception as error:  # noqa: BLE001  it is out
                    left.pop(name), times.pop(name, None)
                    self._failed(f"{label}, {name}", error)
        return times


def problem(case: str, shape: Shape, training: bool = False) -> Run:
    """A call of the public function."""
    if case not in _WITH_GRADIENTS:
        return decoding(shape, paged=case == "pages")
    options = options_of(case, shape)
    q, k, v, dout = (shape.random(shape.seqlen, shape.heads) for _ in range(4))
    if not training:
        return lambda: _attend(q, k, v, **options)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    return lambda: torch.autograd.grad(_attend(*leaves, **options), leaves, dout)


def backward_alone(case: str, shape: Shape) -> Run:
    options = options_of(case, shape)
    *leaves, dout = (shape.random(shape.seqlen, shape.heads) for _ in range(4))
    leaves = [tensor.requires_grad_() for tensor in leaves]
    with flash_attn_compat.use_backend("fused"):
        out = _attend(*leaves, **options)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def decoding(shape: Shape, paged: bool) -> Run:
    """One row for each sequence, four query heads a key head."""
    pages = max(1, shape.seqlen // _PAGE)
    q = shape.random(1, shape.heads)
    caches = [shape.random(pages * _PAGE, shape.heads // _GROUP) for _ in "kv"]
    lengths = torch.full((shape.batch,), pages * _PAGE, dtype=torch.int32, device=shape.device)
    table = None
    if paged:
        caches = [cache.view(shape.batch * pages, _PAGE, *cache.shape[2:]) for cache in caches]
        table = torch.arange(shape.batch * pages, dtype=torch.int32, device=shape.device).view(shape.batch, pages)
    k, v = caches
    return lambda: flash_attn_compat.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, block_table=table, causal=True
    )


def options_of(case: str, shape: Shape) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": case != "full"}
    if case == "window":
        options["window_size"] = shape.seqlen // 8, 0
    if case == "softcap":
        options["softcap"] = 30.0
    if case == "ALiBi":
        options["alibi_slopes"] = torch.linspace(0.5, 0.004, shape.heads, dtype=torch.float32, device=shape.device)
    return options


@contextlib.contextmanager
def ours(card: Card) -> Iterator[None]:
    """Our kernels serve, with the tiles of ``card``."""
    with tuned.override_card(card), flash_attn_compat.use_backend("fused"):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    """What was decided with other tiles, and what failed with them."""
    call_cache.forget()
    for backend in BACKENDS:
        backend.clear_failures()


def reading(run: Run) -> float:
    """Milliseconds of one run, by the GPU's clock; the first runs compile and warm up."""
    run()
    count = max(1, min(20, int(_READING_MS / max(_elapsed(run, 1), 1e-3))))
    return _elapsed(run, count) / count


def _elapsed(run: Run, count: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    stop.record()
    stop.synchronize()
    elapsed: float = start.elapsed_time(stop)
    return elapsed


def of_this_gpu(head_dims: Sequence[int], dtypes: Sequence[str], seqlen: int) -> Tuning:
    """head_dims, dtypes: empty for usual ones. Raises CannotTune"""
    lacking = "no GPU of CUDA is here" if not torch.cuda.is_available() or torch.version.hip else nvrtc.decline_reason()
    if lacking is not None:
        raise CannotTune(lacking)
    device = torch.device("cuda", torch.cuda.current_device())
    capability = settings.capability(device)
    if capability < (7, 5):
        raise CannotTune("our kernels need compute capability 7.5")
    usual = [torch.bfloat16 if capability >= (8, 0) else torch.float16]
    wanted = [getattr(torch, dtype) for dtype in dtypes]
    all_cases = not tensor_cores.remeasure(device.index)
    batch = fitting_batch(seqlen, measure(device, (wanted or usual)[0]))
    return Tuning(device, list(head_dims) or list(_HEAD_DIMS), wanted or usual, seqlen, all_cases, batch)


def fitting_batch(seqlen: int, limits: Limits) -> int:
    """How many sequences a problem has on a GPU with these limits, ``_BATCH`` at most. Raises CannotTune"""
    for batch in (_BATCH, _BATCH // 2, 1):
        numbers = batch * seqlen * _CHANNELS
        takes = 3 * 8 * 2 * numbers, flops(1, _CHANNELS, float(numbers) / _CHANNELS * seqlen, training=True)
        if takes[0] <= limits.memory and takes[1] <= limits.flops_of_launch:
            return batch
    raise CannotTune(f"{seqlen} tokens take too much memory or time on this GPU: choose a smaller --seqlen")
