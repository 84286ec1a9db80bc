"""Times each kernel's tiles on this GPU: `python -m benchmarks.kernel_tiles`.

Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for the PTX that Turing gets. The candidates are `tune`'s
(backends/fused/tuning/candidates.py), here under every mask; the first of each row is the present tile. `--lengths`
times full and causal calls of these lengths, replayed from CUDA graphs in turns: the GPU's time alone.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flash_attn_compat
from benchmarks.runner import DTYPES, Contest, forward_only, make_parser, run, time_one_by_one
from benchmarks.sdpa import capture_job
from flash_attn_compat.backends.fused.building import aot, nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import BF16, BF16_AS_FP16, FP16, HEAD_DIMS, Kind, Sizes
from flash_attn_compat.backends.fused.choosing.tiles import Tile
from flash_attn_compat.backends.fused.launching import grids
from flash_attn_compat.backends.fused.tuning import candidates
from flash_attn_compat.dispatch import call_cache
from verify import workloads
from verify.bench_run import Jobs
from verify.contestants import Attention, flash_attn_call, ours
from verify.graphs import in_graph
from verify.timing import Job
from verify.workloads import Workload, decoding, workload

Tiles = tuple[Tile | None, ...]  # None: the tile that the package chooses today
Flags = Sequence[Mapping[str, Any]]  # fields of a Kind, one mapping for each sort of call
# head dim: batch, seqlen, (query heads, key heads)
SHAPES = {32: (16, 2048, (8, 8)), 64: (8, 4096, (8, 8)), 128: (4, 2048, (32, 8)), 256: (4, 2048, (16, 16))}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "ALiBi": {"alibi": "powers"},
    "causal ALiBi": {"alibi": "powers", "causal": True},
    "window": {"window": (64, 64)},
    "softcap": {"causal": True, "softcap": 30.0},
    "dropout": {"causal": True, "dropout_p": 0.1},
}
BACKWARD = "full", "causal", "ALiBi", "causal ALiBi", "softcap"  # the masks with which a backward is timed
TOKENS, CHANNELS = 16384, 2048  # with --lengths: tokens of a batch, channels of all heads
SPLITS = None, 1, 2, 3, 4, 6, 8, 16, 32
DECODE = (*workloads.DECODE, *decoding(32, 4096, (16, 16), 64), *decoding(1, 8192, (16, 16), 64))


def format_tile(tile: Tile | None) -> str:
    if tile is None:
        return "today"
    marks = ("" if tile.qk_in_regs else "s") + ("" if tile.vo_in_regs else "p") + ("a" if tile.cp_async else "")
    marks += "r" * tile.roles + "e" * tile.load_v_with_k + "q" * tile.ds_over_q + f"-{tile.stages}" * (tile.stages > 1)
    marks += "g" * (tile.groups > 1)
    marks += "h" * tile.split_n + f"+{tile.split_k}" * (tile.split_k > 0)  # how warps with the same rows share work
    return f"{tile.streamed_rows}x{tile.warps}x{tile.mma_m}/{tile.min_blocks}{marks}"


@contextmanager
def replace_tile(entry: str, tile: Tile | None) -> Iterator[None]:
    """Make the kernel ``entry`` use ``tile`` during a block; None changes nothing.

    entry: "few_keys" means dkdv of calls so short that one tile holds all keys
    """
    before = variants.choose_tile

    def choose(asked: str, kind: Kind) -> Tile:
        mine = tile if entry == ("few_keys" if kind.hints.few_keys else asked) else None
        return mine or before(asked, kind)

    with _replace_function(variants, "choose_tile", choose):
        yield


@contextmanager
def replace_result(module: ModuleType, function: str, result: int | None) -> Iterator[None]:
    """Make a function of ``module`` return ``result`` during a block, unless that is None."""
    with _replace_function(module, function, None if result is None else lambda *arguments: result):
        yield


@contextmanager
def _replace_function(module: ModuleType, function: str, instead: Callable[..., object] | None) -> Iterator[None]:
    before = getattr(module, function)
    if instead is not None:
        setattr(module, function, instead)
    call_cache.forget()
    try:
        with flash_attn_compat.use_backend("fused"):
            yield
    finally:
        setattr(module, function, before)
        call_cache.forget()


def backward_job(attend: Attention, qkv: list[Tensor]) -> Callable[[], object]:
    """Return a function that runs the whole backward: all kernels but the timed one keep today's tiles."""
    leaves, held = [tensor.detach().requires_grad_() for tensor in qkv], list[Tensor]()

    def run_backward() -> object:
        held.extend([] if held else [attend(*leaves)])
        return torch.autograd.grad(held[0], leaves, held[0].detach(), retain_graph=True)

    return run_backward


def tile_jobs(entry: str, tiles: Tiles, problem: Workload, dtype: torch.dtype) -> Mapping[str, Jobs]:
    arguments = problem.call("cuda", dtype)
    attend = flash_attn_call(flash_attn_compat, arguments)
    call = partial(attend, *arguments.qkv) if entry == "forward" else backward_job(attend, arguments.qkv)
    return forward_only({format_tile(tile): Job(call, partial(replace_tile, entry, tile)) for tile in tiles})


def replayed_jobs(entry: str, tiles: Tiles, problem: Workload, dtype: torch.dtype) -> Mapping[str, Jobs]:
    """Return the jobs of ``tile_jobs`` as replays of CUDA graphs."""
    jobs = tile_jobs(entry, tiles, problem, dtype)
    return forward_only({name: capture_job(by_mode["forward"], "cuda") for name, by_mode in jobs.items()})


@cache
def compile_all(entry: str, tiles: Tiles, head_dim: int, dtype: torch.dtype) -> None:
    """Compile all tiles in parallel, before any is timed."""
    masked = {"local": True}
    flags: Flags = ({}, {"alibi": True}, masked, masked | {"alibi": True}, masked | {"softcap": True})
    compile_together(tile_variants(entry, tiles, head_dim, dtype, flags))


def tile_variants(entry: str, tiles: Tiles, head_dim: int, dtype: torch.dtype, flags: Flags) -> list[variants.Variant]:
    """Return the kernels of ``tiles``, for calls with each set of ``flags`` of a Kind."""
    number = nvrtc.target_number(0)
    converted = BF16 if number >= 80 else BF16_AS_FP16
    kind = Kind(number, FP16 if dtype == torch.float16 else converted, Sizes(head_dim))
    compiled: list[variants.Variant] = []
    for tile in tiles:
        with replace_tile(entry, tile):
            compiled += [variants.MAKERS[entry](kind.replace(**each)) for each in flags]
    return compiled


def compile_together(wanted: Iterable[variants.Variant]) -> None:
    """Compile variants in several processes, then load them. A tile that does not fit fails later, when it is timed."""
    chosen, architecture = sorted(set(wanted)), nvrtc.target(0)
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    _, errors = aot.compile_all([(variant, architecture) for variant in chosen], pool=pool)
    print(*errors, sep="\n", end="\n" * bool(errors))
    nvrtc.load_all(chosen, 0)


def split_jobs(problem: Workload, dtype: torch.dtype) -> Mapping[str, Jobs]:
    """Return a job for each count of splits: how many blocks share the keys of a tile. Jobs replay CUDA graphs."""
    arguments, jobs = problem.call("cuda", dtype), dict[str, Job]()
    for count in SPLITS:
        with replace_result(grids, "count_splits", count):
            jobs[f"{count or 'today'}"] = Job(partial(in_graph(ours(), problem, arguments).run, *arguments.qkv))
    return forward_only(jobs)


def contests(kernels: list[str], head_dims: list[int], dtype: torch.dtype) -> Iterator[Contest]:
    for entry, head_dim in itertools.product(candidates.ENTRIES, head_dims):
        tiles: Tiles = (None, *candidates.candidate_tiles(entry, nvrtc.target_number(0), head_dim))
        batch, seqlen, heads = SHAPES[head_dim]
        for mask in () if entry not in kernels else MASKS if entry == "forward" else BACKWARD:
            problem = workload(f"{entry} d{head_dim} {mask}", (seqlen,) * batch, heads, head_dim, **MASKS[mask])
            compared = None if mask == "dropout" else dtype  # results differ: each call drops other probabilities
            compile_all(entry, tiles, head_dim, dtype)
            yield Contest(problem.name, partial(tile_jobs, entry, tiles, problem, dtype), compared)
    for each in DECODE if "decode" in kernels else ():
        if not each.new_keys:
            yield Contest(f"{each.name} {each.nheads}/{each.nheads_k}", partial(split_jobs, each, dtype), dtype)


class Trial(NamedTuple):
    """A kernel at a head dim in a dtype, with the tiles to time; None: the tile that the package chooses today."""

    entry: str
    head_dim: int
    dtype: str
    tiles: Tiles

    def variants(self) -> list[variants.Variant]:
        """Return every kernel that full and causal calls of any length launch."""
        copied = {"copied": True} if self.dtype == "bfloat16" and nvrtc.target_number(0) < 80 else {}
        flags = [*(local | more for local in ({}, {"local": True}) for more in ({}, copied)), copied | {"long": True}]
        others = "forward", "delta", "dkdv", "dq", "absmax", "to_half"
        made = tile_variants(self.entry, self.tiles, self.head_dim, DTYPES[self.dtype], flags)
        for entry in others[: 1 if self.entry == "forward" else None] + others[4:] * bool(copied):
            made += tile_variants(entry, (None,), self.head_dim, DTYPES[self.dtype], flags)
        return made


def make_trials(kernels: list[str], head_dims: list[int], dtypes: list[str], text: str) -> Iterator[Trial]:
    """Yield a Trial for each kernel: today's tile, and the candidates of `tune` whose name contains ``text``."""
    number = nvrtc.target_number(0)
    for entry, head_dim, dtype in itertools.product(candidates.ENTRIES, head_dims, dtypes):
        present = variants.choose_tile(entry, Kind(number, FP16, Sizes(head_dim)))
        others = [tile for tile in candidates.candidate_tiles(entry, number, head_dim) if text in format_tile(tile)]
        others = [tile for tile in others if tile != present]
        if entry in kernels and others:
            yield Trial(entry, head_dim, dtype, (None, *others))


def length_contests(trials: list[Trial], lengths: list[int]) -> Iterator[Contest]:
    """Yield contests of each trial's tiles in full and causal calls of TOKENS tokens in all."""
    for trial, length, mask in itertools.product(trials, lengths, ("full", "causal")):
        batch, heads = max(1, TOKENS // length), max(1, CHANNELS // trial.head_dim)
        name = f"{trial.entry} d{trial.head_dim} {trial.dtype} {mask} {batch} x {length}"
        problem = workload(name, (length,) * batch, (heads, heads), trial.head_dim, **MASKS[mask])
        dtype = DTYPES[trial.dtype]
        yield Contest(name, partial(replayed_jobs, trial.entry, trial.tiles, problem, dtype), dtype)


def main(argv: list[str] | None = None) -> int:
    arguments, kernels = make_parser("kernel_tiles", __doc__), [*candidates.ENTRIES, "decode"]
    arguments.add_argument("--head-dims", type=int, nargs="+", default=list(SHAPES), choices=HEAD_DIMS)
    arguments.add_argument("--kernels", nargs="+", choices=kernels, default=kernels)
    arguments.add_argument("--dtype", nargs="+", choices=("float16", "bfloat16"), default=["float16"])
    arguments.add_argument("--lengths", type=int, nargs="+", help="time full and causal calls of these lengths instead")
    arguments.add_argument("--tiles", default="", metavar="TEXT", help="with --lengths: tiles with this in their name")
    options = arguments.parse_args(argv)
    if options.lengths:
        trials = list(make_trials(options.kernels, options.head_dims, options.dtype, options.tiles))
        compile_together(itertools.chain.from_iterable(trial.variants() for trial in trials))
        return run("kernel_tiles", length_contests(trials, options.lengths), options, "cuda")
    dtypes = [DTYPES[name] for name in options.dtype]
    head_dims = [size for size in options.head_dims if size in SHAPES]
    chosen = itertools.chain.from_iterable(contests(options.kernels, head_dims, dtype) for dtype in dtypes)
    return run("kernel_tiles", chosen, options, "cuda", time_one_by_one("cuda"))


if __name__ == "__main__":
    sys.exit(main())
