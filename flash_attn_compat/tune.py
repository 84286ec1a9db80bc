"""flash-attn-compat tune: times tiles and backends on this GPU at usual calls, and stores the results for later calls.

It first times every candidate tile of our kernels, through the public functions. Then it times our kernels, with the
fastest tiles, and the other backends. A tile or backend that fails is left out and reported.
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
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import BF16, BF16_AS_FP16, FP16, Kind, Sizes, choose_tile, size_of
from flash_attn_compat.backends.fused.choosing.tiles import Tile
from flash_attn_compat.backends.fused.tuning import candidates, tuned
from flash_attn_compat.backends.fused.tuning.tuned import Card
from flash_attn_compat.card import Limits, count_flops, measure_limits
from flash_attn_compat.core.features import dtype_name, lacks_tensor_cores
from flash_attn_compat.dispatch import call_cache
from flash_attn_compat.gpu_state import Monitor

_HEAD_DIMS = 64, 128
_BATCH, _CHANNELS, _GROUP, _PAGE = 4, 1024, 4, 256
_ROUNDS, _READING_MS = 3, 3.0
# Another tile replaces the default one if its time is below this share of the default's: more than noise.
_GAIN = 0.98
_WITH_GRADIENTS = "full", "causal", "window", "softcap", "ALiBi"

Run = Callable[[], object]
# Makes a context manager in which a call is timed, such as one that forces a backend.
Context = Callable[[], contextlib.AbstractContextManager[None]]
_attend: Callable[..., Tensor] = flash_attn_compat.flash_attn_func


class Shape(NamedTuple):
    """The shape of a usual problem: as many heads as fill 1024 channels."""

    head_dim: int
    dtype: torch.dtype
    seqlen: int
    device: torch.device
    batch: int = _BATCH

    @property
    def size(self) -> int:
        """The head_dim that the kernels are compiled for: the next that they have from ``head_dim`` on."""
        return size_of(self.head_dim)

    def __str__(self) -> str:
        return f"head_dim {self.size}, {dtype_name(self.dtype)}"

    def random(self, rows: int, heads: int) -> Tensor:
        return torch.randn(self.batch, rows, heads, self.head_dim, dtype=self.dtype, device=self.device)

    @property
    def heads(self) -> int:
        return max(_GROUP, _CHANNELS // self.head_dim // _GROUP * _GROUP)


class CannotTune(RuntimeError):
    """Nothing can be timed here; the message says why."""


@dataclass
class Tuning:
    """The tuning of one GPU. failures: a line for each candidate that could not be timed, with its error"""

    device: torch.device
    head_dims: Sequence[int]
    dtypes: Sequence[torch.dtype]
    seqlen: int
    all_cases: bool = False  # also time `chunked`, which matters if our kernels are slow, as without tensor cores
    batch: int = _BATCH
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        made_with = f"torch {torch.__version__}, flash_attn_compat {flash_attn_compat.__version__}"
        self.card = Card(str(settings.gpu(self.device)), made_with)
        self.monitor = Monitor(self.device)
        self._index = self.device.index or 0

    @property
    def _architecture(self) -> int:
        return nvrtc.target_number(self._index)

    def run_all(self) -> None:
        """Run every step with a progress bar, then add the GPU's clock and power during the steps to the results."""
        self._run_steps()
        self.card = self.card._replace(state=self.monitor.summarize())

    def _run_steps(self) -> None:
        for label, step in progress.show_progress(list(self._list_steps()), lambda question: question[0]):
            try:
                step()
            except nvrtc.ContextLost as error:
                self.failures.append(f"{label}: {error}")
                self.failures.append("the remaining steps. Run tune once more: it then leaves out the faulty kernel")
                return
            except Exception as error:  # noqa: BLE001  the remaining steps are independent of this one
                self._failed(label, error)

    def _list_steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield each step with its label."""
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
        """Return the GPU, the versions, and a line for each result."""
        return [f"{self.card.gpu}, {self.card.made_with}", self.card.state, *tuned.format_lines(self.card)]

    def _failed(self, label: str, error: Exception) -> None:
        torch.cuda.empty_cache()
        cause: BaseException = error
        while cause.__context__ is not None:  # the first error tells more than the refusals of the fallbacks
            cause = cause.__context__
        self.failures.append(f"{label}: {nvrtc.first_line(cause)[:200]}")

    def _tiles(self, entry: str, shape: Shape) -> tuple[Tile | None, ...]:
        """Return the tiles to time; None stands for the default ones, which may differ between kinds of calls."""
        kind = Kind(self._architecture, FP16, Sizes(shape.head_dim))
        default = choose_tile(entry, kind)
        return None, *(
            tile for tile in candidates.candidate_tiles(entry, self._architecture, kind.D) if tile != default
        )

    def _card_with(self, entry: str, shape: Shape, tile: Tile | None) -> Card:
        if tile is None:
            return self.card
        return self.card.merge(self.card._replace(tiles={(entry, shape.size, dtype_name(shape.dtype)): tile}))

    def _compile(self, shape: Shape) -> None:
        """Compile the kernels of all candidate tiles in parallel, since each takes a second."""
        half = BF16 if self._architecture >= 80 else BF16_AS_FP16
        kind = Kind(self._architecture, FP16 if shape.dtype == torch.float16 else half, Sizes(shape.head_dim))
        kernels = [
            getattr(variants, entry)(kind.replace(local=local, tiles=((entry, tile),) if tile else ()))
            for entry in candidates.ENTRIES
            for tile in self._tiles(entry, shape)
            for local in (False, True)
        ]
        nvrtc.load_all(dict.fromkeys(kernels), self._index)

    def _choose_tile(self, entry: str, shape: Shape) -> None:
        make = make_run if entry == "forward" else make_backward_run
        contexts = {tile: partial(use_tiles, self._card_with(entry, shape, tile)) for tile in self._tiles(entry, shape)}
        times = [self._time(f"{entry}, {case}, {shape}", make(case, shape), contexts) for case in ("full", "causal")]
        totals = {tile: sum(each[tile] for each in times) for tile in contexts if all(tile in each for each in times)}
        best = min(totals, key=lambda tile: totals[tile])
        if totals[best] < _GAIN * totals.get(None, math.inf):
            self.card = self._card_with(entry, shape, best)

    def _compare(self, case: str, shape: Shape, training: bool) -> None:
        run = make_run(case, shape, training)
        reasons = flash_attn_compat.explain(run).reasons
        if reasons["fused"]:
            raise RuntimeError("; ".join(reasons["fused"]))
        excluded = {"reference"} if self.all_cases else {"reference", "chunked"}
        eligible = [name for name, own in reasons.items() if not own and name not in excluded]
        if eligible == ["fused"]:
            return
        contexts: dict[str, Context] = {name: partial(flash_attn_compat.use_backend, name) for name in eligible}
        contexts["fused"] = partial(use_tiles, self.card)
        before = len(self.monitor.readings)
        times = self._time(f"{case}, {shape}", run, contexts)
        if "fused" in times and len(times) > 1:
            key, clock = (case, shape.size, dtype_name(shape.dtype), training), self.monitor.median(before)
            clocks = {} if clock is None else {key: (clock.clock_mhz, clock.power_w)}
            self.card = self.card.merge(self.card._replace(times={key: times}, clocks=clocks))

    def _time(self, label: str, run: Run, contexts: Mapping[Any, Context]) -> dict[Any, float]:
        """Time ``run`` in each context, in turns; return the least milliseconds of each context that did not fail."""
        times: dict[Any, float] = {}
        usable = dict(contexts)
        for _ in range(_ROUNDS):
            for name, context in list(usable.items()):
                try:
                    with context():
                        times[name] = min(time_run(run), times.get(name, math.inf))
                    self.monitor.read()
                except nvrtc.ContextLost:
                    raise
                except Exception as error:  # noqa: BLE001  any failure excludes the context
                    usable.pop(name), times.pop(name, None)
                    self._failed(f"{label}, {name}", error)
        return times


def make_run(case: str, shape: Shape, training: bool = False) -> Run:
    """Return a function that makes one call of ``case``, with its backward if training."""
    if case not in _WITH_GRADIENTS:
        return make_decoding_run(shape, paged=case == "pages")
    options = case_options(case, shape)
    q, k, v, dout = (shape.random(shape.seqlen, shape.heads) for _ in range(4))
    if not training:
        return lambda: _attend(q, k, v, **options)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    return lambda: torch.autograd.grad(_attend(*leaves, **options), leaves, dout)


def make_backward_run(case: str, shape: Shape) -> Run:
    """Return a function that runs our backward of one call of ``case``."""
    options = case_options(case, shape)
    *leaves, dout = (shape.random(shape.seqlen, shape.heads) for _ in range(4))
    leaves = [tensor.requires_grad_() for tensor in leaves]
    with flash_attn_compat.use_backend("fused"):
        out = _attend(*leaves, **options)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def make_decoding_run(shape: Shape, paged: bool) -> Run:
    """Return a function that decodes one row for each sequence, with four query heads per key head."""
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


def case_options(case: str, shape: Shape) -> dict[str, Any]:
    """Return the options of flash_attn_func for ``case``."""
    options: dict[str, Any] = {"causal": case != "full"}
    if case == "window":
        options["window_size"] = shape.seqlen // 8, 0
    if case == "softcap":
        options["softcap"] = 30.0
    if case == "ALiBi":
        options["alibi_slopes"] = torch.linspace(0.5, 0.004, shape.heads, dtype=torch.float32, device=shape.device)
    return options


@contextlib.contextmanager
def use_tiles(card: Card) -> Iterator[None]:
    """Let only our kernels serve during a block, with the tiles of ``card``."""
    with tuned.override_card(card), flash_attn_compat.use_backend("fused"):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    """Discard prepared calls, which keep the tiles of before, and the recorded failures of kernels with those tiles."""
    call_cache.forget()
    for backend in BACKENDS:
        backend.clear_failures()


def time_run(run: Run) -> float:
    """Return the milliseconds of one run by the GPU's clock. The first runs compile and warm up."""
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


def plan_tuning(head_dims: Sequence[int], dtypes: Sequence[str], seqlen: int) -> Tuning:
    """Return the tuning of the current GPU, not yet run. Raises CannotTune if our kernels cannot run here.

    head_dims, dtypes: empty for the usual ones
    """
    reason = "no CUDA GPU found" if not torch.cuda.is_available() or torch.version.hip else nvrtc.decline_reason()
    if reason is not None:
        raise CannotTune(reason)
    device = torch.device("cuda", torch.cuda.current_device())
    capability = settings.capability(device)
    if capability < (7, 5):
        raise CannotTune("our kernels need compute capability 7.5")
    usual = torch.bfloat16 if capability >= (8, 0) else torch.float16
    timed = [getattr(torch, dtype) for dtype in dtypes] or [usual]
    all_cases = lacks_tensor_cores(settings.gpu(device))
    batch = find_batch(seqlen, measure_limits(device, timed[0]))
    return Tuning(device, list(head_dims) or list(_HEAD_DIMS), timed, seqlen, all_cases, batch)


def find_batch(seqlen: int, limits: Limits) -> int:
    """Return how many sequences fit the limits, at most ``_BATCH``. Raises CannotTune if none does."""
    for batch in (_BATCH, _BATCH // 2, 1):
        numbers = batch * seqlen * _CHANNELS
        memory = 3 * 8 * 2 * numbers
        operations = count_flops(1, _CHANNELS, float(numbers) / _CHANNELS * seqlen, training=True)
        if memory <= limits.memory and operations <= limits.flops_of_launch:
            return batch
    raise CannotTune(f"{seqlen} tokens take too much memory or time on this GPU: choose a smaller --seqlen")
