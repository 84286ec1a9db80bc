"""Times each kernel's tiles on this GPU: `python -m benchmarks.kernel_tiles`.

Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for the PTX that Turing gets. The candidates are `tune`'s
(backends/fused/tuning/candidates.py), here under every mask; the first of each row is the present tile.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import flash_attn_compat
from benchmarks.runner import DTYPES, Contest, forward_only, make_parser, run, time_one_by_one
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
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

Tiles = tuple[Tile | None, ...]  # None: the present one
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
BACKWARD = "full", "causal", "ALiBi", "causal ALiBi", "softcap"  # the masks of the backward
SPLITS = None, 1, 2, 3, 4, 6, 8, 16, 32
DECODE = (*workloads.DECODE, *decoding(32, 4096, (16, 16), 64), *decoding(1, 8192, (16, 16), 64))


def format_tile(tile: Tile | None) -> str:
    if tile is None:
        return "today"
    marks = ("" if tile.qk_in_regs else "s") + ("" if tile.vo_in_regs else "p") + ("a" if tile.cp_async else "")
    marks += "r" * tile.roles + "e" * tile.load_v_with_k + "q" * tile.ds_over_q + f"-{tile.stages}" * (tile.stages > 1)
    marks += "h" * tile.split_n + f"+{tile.split_k}" * (tile.split_k > 0)  # how warps with the same rows share work
    return f"{tile.streamed_rows}x{tile.warps}x{tile.mma_m}/{tile.min_blocks}{marks}"


@contextmanager
def replace_tile(entry: str, tile: Tile) -> Iterator[None]:
    """Give a kernel ``tile`` during a block. entry: few_keys for dkdv where one tile holds all keys"""
    before = variants.choose_tile

    def choose(asked: str, kind: variants.Kind) -> Tile:
        return tile if entry == ("few_keys" if kind.few_keys else asked) else before(asked, kind)

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
    """Return a function that runs the whole backward; its other kernels have their present tiles."""
    leaves, held = [tensor.detach().requires_grad_() for tensor in qkv], list[Tensor]()

    def run_backward() -> object:
        held.extend([] if held else [attend(*leaves)])
        return torch.autograd.grad(held[0], leaves, held[0].detach(), retain_graph=True)

    return run_backward


def tile_jobs(entry: str, tiles: Tiles, problem: Workload, dtype: torch.dtype) -> Mapping[str, Jobs]:
    compile_all(entry, tiles, problem.head_dim, dtype)
    arguments = problem.call("cuda", dtype)
    attend = flash_attn_call(flash_attn_compat, arguments)
    call = partial(attend, *arguments.qkv) if entry == "forward" else backward_job(attend, arguments.qkv)
    return forward_only({format_tile(tile): Job(call, partial(replace_tile, entry, tile)) for tile in tiles})


@cache
def compile_all(entry: str, tiles: Tiles, head_dim: int, dtype: torch.dtype) -> None:
    """Compile all tiles in parallel, before any is timed."""
    target = nvrtc.target(0)
    converted = variants.BF16 if target.number >= 80 else variants.BF16_AS_FP16
    kind = variants.Kind(target.number, variants.FP16 if dtype == torch.float16 else converted, head_dim)
    masked = {"local": True}
    compiled: list[variants.Variant] = []
    for tile in tiles:
        with replace_tile(entry, tile):
            for flags in ({}, {"alibi": True}, masked, masked | {"alibi": True}, masked | {"softcap": True}):
                compiled.append(getattr(variants, entry)(kind._replace(**flags)))
    nvrtc.load_all(compiled, 0)  # a tile that does not fit fails later, when it is timed


def split_jobs(problem: Workload, dtype: torch.dtype) -> Mapping[str, Jobs]:
    """Return jobs for each number of blocks that share a tile's keys, as replays of a CUDA graph."""
    arguments, jobs = problem.call("cuda", dtype), dict[str, Job]()
    for count in SPLITS:
        with replace_result(grids, "count_splits", count):
            jobs[f"{count or 'today'}"] = Job(partial(in_graph(ours(), problem, arguments).run, *arguments.qkv))
    return forward_only(jobs)


def contests(kernels: list[str], head_dims: list[int], dtype: torch.dtype) -> Iterator[Contest]:
    for entry, head_dim in itertools.product(candidates.ENTRIES, head_dims):
        tiles: Tiles = (None, *candidates.candidate_tiles(entry, nvrtc.target(0).number, head_dim))
        batch, seqlen, heads = SHAPES[head_dim]
        for mask in () if entry not in kernels else MASKS if entry == "forward" else BACKWARD:
            problem = workload(f"{entry} d{head_dim} {mask}", (seqlen,) * batch, heads, head_dim, **MASKS[mask])
            compared = None if mask == "dropout" else dtype  # each call drops other probabilities
            yield Contest(problem.name, partial(tile_jobs, entry, tiles, problem, dtype), compared)
    for each in DECODE if "decode" in kernels else ():
        if not each.new_keys:
            yield Contest(f"{each.name} {each.nheads}/{each.nheads_k}", partial(split_jobs, each, dtype), dtype)


def main(argv: list[str] | None = None) -> int:
    arguments, kernels = make_parser("kernel_tiles", __doc__), [*candidates.ENTRIES, "decode"]
    arguments.add_argument("--head-dims", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES))
    arguments.add_argument("--kernels", nargs="+", choices=kernels, default=kernels)
    arguments.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    options = arguments.parse_args(argv)
    chosen = contests(options.kernels, options.head_dims, DTYPES[options.dtype])
    return run("kernel_tiles", chosen, options, "cuda", time_one_by_one("cuda"))


if __name__ == "__main__":
    sys.exit(main())
