"""Which tile each kernel should take: times candidates on this GPU, `python -m benchmarks.kernel_tiles`.

Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for the PTX that Turing gets. The first candidate of each line is today's.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import settings
from flash_attn_compat.backends.fused import grids, loader, variants
from flash_attn_compat.backends.fused.variants import Tile
from flash_attn_compat.engine import memory
from verify import workloads
from verify.contestants import Attention, flash_attn_call, ours
from verify.graphs import in_graph
from verify.timing import fastest
from verify.workloads import decoding, workload

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
FORWARD = {
    32: [Tile(64, 4, 1, 3), Tile(128, 4, 1, 3)],
    64: [Tile(64, 4, 1, 3), Tile(64, 4, 2, 2), Tile(128, 4, 1, 2), Tile(64, 8, 1, 1), Tile(32, 4, 2, 2)],
    128: [Tile(64, 4, 1, 2), Tile(32, 4, 1, 2), Tile(64, 8, 1, 1), Tile(32, 4, 2, 2, False),
          Tile(64, 4, 2, 1, False), Tile(64, 4, 1, 2, False)],
    256: [Tile(16, 8, 1, 1), Tile(16, 4, 1, 2),
          Tile(16, 4, 1, 2, False), Tile(32, 4, 1, 1, False), Tile(32, 8, 1, 1, False), Tile(64, 8, 1, 1, False),
          Tile(64, 4, 1, 1, False)],
}  # fmt: skip
# Of each, some are tried with cp.async too where the GPU has it.
DKDV = {
    32: [Tile(64, 4, 1, 2), Tile(64, 4, 1, 3), Tile(32, 4, 2, 2)],
    64: [Tile(64, 4, 1, 2), Tile(32, 4, 1, 2), Tile(64, 8, 1, 1), Tile(64, 4, 1, 2, reg_p=False),
         Tile(32, 4, 2, 1, reg_p=False), Tile(32, 4, 1, 3, reg_s=False, reg_p=False),
         Tile(32, 4, 2, 2, reg_s=False, reg_p=False),
         Tile(64, 4, 2, 2, reg_s=False, reg_p=False)],
    128: [Tile(16, 4, 1, 2, reg_s=False), Tile(16, 4, 1, 2), Tile(32, 4, 1, 2, reg_s=False, reg_p=False),
          Tile(32, 4, 1, 1, reg_s=False), Tile(32, 8, 1, 1, reg_s=False, reg_p=False),
          Tile(64, 4, 1, 1, reg_s=False, reg_p=False)],
    256: [Tile(16, 8, 1, 1, sums=1), Tile(16, 8, 1, 1, reg_s=False, reg_p=False, sums=1), Tile(16, 8, 1, 1, sums=2)],
}  # fmt: skip
DQ = {
    32: [Tile(32, 4, 2, 2), Tile(64, 4, 2, 2), Tile(64, 4, 1, 3), Tile(32, 4, 1, 3)],
    64: [Tile(32, 4, 2, 2), Tile(64, 4, 1, 2), Tile(32, 4, 1, 3), Tile(64, 4, 2, 1), Tile(32, 4, 2, 2, reg_p=False),
         Tile(64, 4, 2, 1, reg_p=False), Tile(64, 4, 2, 1, reg_s=False, reg_p=False)],
    128: [Tile(32, 4, 1, 2), Tile(64, 4, 1, 1), Tile(32, 4, 1, 2, reg_p=False),
          Tile(32, 4, 2, 1, reg_s=False, reg_p=False),
          Tile(64, 4, 1, 2, reg_s=False, reg_p=False), Tile(32, 8, 1, 1), Tile(64, 4, 1, 1, reg_p=False)],
    256: [Tile(16, 4, 1, 1, reg_s=False, reg_p=False), Tile(16, 4, 1, 1, reg_p=False),
          Tile(32, 4, 1, 1, reg_s=False, reg_p=False),
          Tile(32, 8, 1, 1, pairs=1), Tile(16, 8, 1, 1, sums=1)],
}  # fmt: skip
TILES = {"forward": FORWARD, "dkdv": DKDV, "dq": DQ}
SPLITS = None, 1, 2, 3, 4, 6, 8, 16, 32
DECODE = (*workloads.DECODE, *decoding(32, 4096, (16, 16), 64), *decoding(1, 8192, (16, 16), 64))


def label(tile: Tile | None) -> str:
    if tile is None:
        return "today"
    marks = ("" if tile.reg_s else "s") + ("" if tile.reg_p else "p") + ("a" if tile.copies else "")
    marks += "h" * tile.pairs + f"+{tile.sums}" * (tile.sums > 0)  # what warps with the same rows share
    return f"{tile.step}x{tile.NW}x{tile.MT}/{tile.MINB}{marks}"


@contextmanager
def chosen(module: ModuleType, function: str, result: Tile | int | None) -> Iterator[None]:
    """A function of ``module`` returns this; what it returns by itself for None."""
    before = getattr(module, function)
    if result is not None:
        setattr(module, function, lambda *given: result)
    memory.forget()
    try:
        yield
    finally:
        setattr(module, function, before)
        memory.forget()


def forward(run: Attention, qkv: list[Tensor]) -> Callable[[], object]:
    return lambda: run(*qkv)


def backward(run: Attention, qkv: list[Tensor]) -> Callable[[], object]:
    """The whole of it; the other kernels are today's."""
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    out = run(*leaves)
    return lambda: torch.autograd.grad(out, leaves, out.detach(), retain_graph=True)


def scan(entry: str, head_dims: list[int], dtype: torch.dtype) -> None:
    newer = settings.capability(torch.device("cuda", 0)) >= (8, 0)
    is_forward = entry == "forward"
    made, masks, readings = (forward, (*MASKS,), 5) if is_forward else (backward, BACKWARD, 3)
    for head_dim in head_dims:
        batch, seqlen, heads = SHAPES[head_dim]
        tiles: list[Tile | None] = [None, *TILES[entry][head_dim]]
        if newer and not is_forward:
            tiles += [tile._replace(copies=True) for tile in TILES[entry][head_dim]]
        compile_all(entry, tiles, head_dim, dtype)
        for mask in masks:
            given, cells = workload(mask, (seqlen,) * batch, heads, head_dim, **MASKS[mask]).call("cuda", dtype), []
            attend = flash_attn_call(flash_attn_compat, given)
            for tile in tiles:
                with chosen(variants, f"{entry}_tile", tile):
                    try:
                        cells.append(f"{label(tile)} {fastest(made(attend, given.qkv), readings=readings):.3f}")
                    except RuntimeError as error:
                        cells.append(f"{label(tile)} {str(error)[:60]}")
            print(f"{entry} d{head_dim:<4}{mask:13}" + "  ".join(cells), flush=True)


def compile_all(entry: str, tiles: list[Tile | None], head_dim: int, dtype: torch.dtype) -> None:
    """Side by side, before anything is timed."""
    target = loader.target(0)
    converted = variants.BF16 if target.number >= 80 else variants.BF16_AS_FP16
    kind = variants.Kind(target.number, variants.FP16 if dtype == torch.float16 else converted, head_dim)
    masked = {"local": True}
    wanted: list[variants.Variant] = []
    for tile in tiles:
        with chosen(variants, f"{entry}_tile", tile):
            for flags in ({}, {"alibi": True}, masked, masked | {"alibi": True}, masked | {"softcap": True}):
                wanted.append(getattr(variants, entry)(kind._replace(**flags)))
    loader.load_together(wanted, 0)  # a tile that does not fit is told when it is its turn


def scan_decode(dtype: torch.dtype) -> None:
    """How many blocks should share the keys of a tile: replays of a CUDA graph, contiguous and in pages."""
    for each in DECODE:
        if each.new_keys:
            continue
        given, cells = each.call("cuda", dtype), []
        for count in SPLITS:
            with chosen(grids, "splits", count):
                replay = functools.partial(in_graph(ours(), each, given).run, *given.qkv)
                cells.append(f"{count or 'today'} {fastest(replay) * 1e3:.1f}")
        print(f"{each.name} {each.nheads}/{each.nheads_k} us: " + "  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_tiles", description=__doc__)
    kernels = ["forward", "decode", "dkdv", "dq"]
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(SHAPES))
    parser.add_argument("--kernels", nargs="+", choices=kernels, default=kernels)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    with flash_attn_compat.use_backend("fused"):
        for entry in (kernel for kernel in kernels if kernel in arguments.kernels):
            if entry == "decode":
                scan_decode(dtype)
            else:
                scan(entry, arguments.head_dims, dtype)


if __name__ == "__main__":
    main()
