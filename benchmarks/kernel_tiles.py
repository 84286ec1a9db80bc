"""Which tile each kernel should take: times candidates on this GPU, `python -m benchmarks.kernel_tiles`.

Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for the PTX that Turing gets. The candidates are those that `tune` tries
(backends/fused/candidates.py), here under every mask; the first of each row is today's.
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
from benchmarks.runner import DTYPES, Contest, alone, one_by_one, parser, run
from flash_attn_compat.backends.fused import candidates, grids, nvrtc, variants
from flash_attn_compat.backends.fused.variants import Tile
from flash_attn_compat.dispatch import call_cache
from verify import workloads
from verify.bench_run import Jobs
from verify.contestants import Attention, flash_attn_call, ours
from verify.graphs import in_graph
from verify.timing import Job
from verify.workloads import Workload, decoding, workload

Tiles = tuple[Tile | None, ...]  # None: today's
# head dim: batch, seqlen, heads of queries and of keys
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
BACKWARD = "full", "causal", "ALiBi", "causal ALiBi", "softcap"  # of these
SPLITS = None, 1, 2, 3, 4, 6, 8, 16, 32
DECODE = (*workloads.DECODE, *decoding(32, 4096, (16, 16), 64), *decoding(1, 8192, (16, 16), 64))


def label(tile: Tile | None) -> str:
    if tile is None:
        return "today"
    marks = ("" if tile.qk_in_regs else "s") + ("" if tile.vo_in_regs else "p") + ("a" if tile.cp_async else "")
    marks += "h" * tile.split_n + f"+{tile.split_k}" * (tile.split_k > 0)  # what warps with the same rows share
    return f"{tile.step}x{tile.warps}x{tile.mma_m}/{tile.min_blocks}{marks}"


@contextmanager
def chosen(module: ModuleType, function: str, result: Tile | int | None) -> Iterator[None]:
    """A function of ``module`` returns this; what it returns by itself for None."""
    before = getattr(module, function)
    if result is not None:
        setattr(module, function, lambda *given: result)
    call_cache.forget()
    try:
        with flash_attn_compat.use_backend("fused"):
            yield
    finally:
        setattr(module, function, before)
        call_cache.forget()


def backward(attend: Attention, qkv: list[Tensor]) -> Callable[[], object]:
    """The whole of it; the other kernels are today's."""
    leaves, held = [tensor.detach().requires_grad_() for tensor in qkv], list[Tensor]()

    def alone() -> object:
        held.extend([] if held else [attend(*leaves)])
        return torch.autograd.grad(held[0], leaves, held[0].detach(), retain_graph=True)

    return alone


def of_tiles(entry: str, tiles: Tiles, problem: Workload, dtype: torch.dtype) -> Mapping[str, Jobs]:
    compile_all(entry, tiles, problem.head_dim, dtype)
    given = problem.call("cuda", dtype)
    attend = flash_attn_call(flash_attn_compat, given)
    call = partial(attend, *given.qkv) if entry == "forward" else backward(attend, given.qkv)
    return alone({label(tile): Job(call, partial(chosen, variants, f"{entry}_tile", tile)) for tile in tiles})


@cache
def compile_all(entry: str, tiles: Tiles, head_dim: int, dtype: torch.dtype) -> None:
    """Side by side, before anything is timed."""
    target = nvrtc.target(0)
    converted = variants.BF16 if target.number >= 80 else variants.BF16_AS_FP16
    kind = variants.Kind(target.number, variants.FP16 if dtype == torch.float16 else converted, head_dim)
    masked = {"local": True}
    wanted: list[variants.Variant] = []
    for tile in tiles:
        with chosen(variants, f"{entry}_tile", tile):
            for flags in ({}, {"alibi": True}, masked, masked | {"alibi": True}, masked | {"softcap": True}):
                wanted.append(getattr(variants, entry)(kind._replace(**flags)))
    nvrtc.load_all(wanted, 0)  # a tile that does not fit is told when it is its turn


def of_splits(problem: Workload, dtype: torch.dtype) -> Mapping[str, Jobs]:
    """How many blocks should share the keys of a tile: replays of a CUDA graph."""
    given, jobs = problem.call("cuda", dtype), dict[str, Job]()
    for count in SPLITS:
        with chosen(grids, "count_splits", count):
            jobs[f"{count or 'today'}"] = Job(partial(in_graph(ours(), problem, given).run, *given.qkv))
    return alone(jobs)


def contests(kernels: list[str], head_dims: list[int], dtype: torch.dtype) -> Iterator[Contest]:
    for entry, head_dim in itertools.product(candidates.ENTRIES, head_dims):
        tiles: Tiles = (None, *candidates.candidate_tiles(entry, nvrtc.target(0).number, head_dim))
        batch, seqlen, heads = SHAPES[head_dim]
        for mask in () if entry not in kernels else MASKS if entry == "forward" else BACKWARD:
            problem = workload(f"{entry} d{head_dim} {mask}", (seqlen,) * batch, heads, head_dim, **MASKS[mask])
            same = None if mask == "dropout" else dtype  # each call drops others
            yield Contest(problem.name, partial(of_tiles, entry, tiles, problem, dtype), same)
    for each in DECODE if "decode" in kernels else ():
        if not each.new_keys:
            yield Contest(f"{each.name} {each.nheads}/{each.nheads_k}", partial(of_splits, each, dtype), dtype)


def main(argv: list[str] | None = None) -> int:
    arguments, kernels = parser("kernel_tiles", __doc__), [*candidates.ENTRIES, "decode"]
    arguments.add_argument("--head-dims", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES))
    arguments.add_argument("--kernels", nargs="+", choices=kernels, default=kernels)
    arguments.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    options = arguments.parse_args(argv)
    given = contests(options.kernels, options.head_dims, DTYPES[options.dtype])
    return run("kernel_tiles", given, options, "cuda", one_by_one("cuda"))


if __name__ == "__main__":
    sys.exit(main())
