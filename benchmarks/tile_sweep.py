"""Times more tiles at shapes that PyTorch's kernels win: `python -m benchmarks.tile_sweep [--only TEXT] [--json FILE]`.

Short sequences, few rows at large head dims, head dims 192 and 256. Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for the PTX
that Turing gets. Each call is replayed from a CUDA graph, so times are the GPU's alone. Ratios are PyTorch's times over
ours. The last line of a shape has the fastest tile of each kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernel_tiles import compile_together, format_tile, replace_tile
from flash_attn_compat import flash_attn_func, use_backend
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, Hints, KernelFeatures, Kind, Sizes
from flash_attn_compat.backends.fused.choosing.tiles import Tile
from flash_attn_compat.backends.fused.launching.grids import choose_one_tile, takes_small_tiles
from verify.graphs import capture
from verify.timing import Failed, Job, attempt, fastest, free_memory

TORCH = {"memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
ENTRIES = "forward", "dkdv", "dq", "few_keys"  # few_keys: dkdv if one tile holds all keys
Choice = Mapping[str, Tile]  # tiles by kernel; kernels without one keep today's tile


class Shape(NamedTuple):
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool = False

    def __str__(self) -> str:
        return f"d{self.head_dim} {self.batch} x {self.seqlen}, {self.heads} heads" + " causal" * self.causal

    def kind(self, number: int) -> Kind:
        few_keys = choose_one_tile(self.seqlen, self.seqlen, self.head_dim, self.batch * self.heads, processors=1)
        few_rows = takes_small_tiles(self.seqlen, self.head_dim, self.causal)
        hints = Hints(few_rows, 64 * (self.seqlen <= 64), few_keys if number < 80 else 0)
        return Kind(number, FP16, Sizes(self.head_dim), KernelFeatures(local=self.causal), hints)

    def entries(self, number: int) -> dict[str, tuple[Tile, ...]]:
        """Return the tiles to time, for each kernel that calls of this shape launch."""
        few_keys, tiles = self.kind(number).hints.few_keys, TILES[self.head_dim]
        left_out = ("dkdv", "dq") if few_keys else ("few_keys",)
        rows = -(-few_keys // 64) * 64
        return {
            entry: tuple(tile for tile in tiles[entry] if entry != "few_keys" or tile.rows == rows)
            for entry in ENTRIES
            if entry in tiles and entry not in left_out
        }


SHAPES = (
    *(Shape(512, 64, 12, head_dim) for head_dim in (32, 64, 96, 128, 192, 256)),
    *(Shape(512, length, 12, 64, causal) for length in (100, 128, 192, 256) for causal in (False, True)),
    *(Shape(512, length, 12, 128, causal) for length in (96, 128, 192) for causal in (False, True)),
    *(Shape(2, 256, 8, head_dim) for head_dim in (64, 128)),
    Shape(2, 256, 8, 160),
    Shape(2, 1024, 8, 80),
    *(Shape(4, 4096, 2048 // D, D, causal) for D in (64, 96, 112, 128, 160, 192, 256) for causal in (False, True)),
)
_SHARED = {"qk_in_regs": False, "vo_in_regs": False}
# Tiles to try, by head dim and kernel. All fit sm_75, and spill no more registers than the tiles that it has today.
TILES: dict[int, dict[str, tuple[Tile, ...]]] = {
    32: {
        "forward": (Tile(64, 4, 1, 3, load_v_with_k=True), Tile(64, 4, 1, 4, load_v_with_k=True), Tile(64, 4, 1, 3)),
        "dkdv": (Tile(64, 4, 1, 3),),
        "dq": (Tile(64, 4, 1, 3),),
        "few_keys": (Tile(32, 4, 1, 3, **_SHARED), Tile(64, 4, 1, 2, **_SHARED)),
    },
    64: {
        "forward": (
            Tile(64, 8, 1, 1, stages=3), Tile(64, 4, 1, 3), Tile(64, 4, 1, 4), Tile(32, 4, 1, 4), Tile(64, 2, 2, 4),
            Tile(64, 4, 2, 2), Tile(64, 4, 1, 3, load_v_with_k=True), Tile(64, 4, 1, 4, load_v_with_k=True),
            Tile(64, 2, 2, 4, load_v_with_k=True),
        ),
        "dkdv": (
            Tile(32, 8, 1, 1, stages=3), Tile(64, 4, 1, 2), Tile(32, 4, 1, 2), Tile(32, 4, 1, 3),
            Tile(32, 4, 1, 2, **_SHARED), Tile(64, 4, 1, 1, vo_in_regs=False), Tile(32, 2, 2, 2, **_SHARED),
        ),
        "dq": (
            Tile(32, 8, 1, 1, stages=3), Tile(64, 4, 1, 2), Tile(32, 4, 1, 3), Tile(32, 4, 1, 4), Tile(64, 2, 2, 2),
            Tile(32, 2, 2, 4),
        ),
        "few_keys": (
            Tile(64, 4, 1, 2, qk_in_regs=False, ds_over_q=True), Tile(32, 4, 1, 2, qk_in_regs=False, ds_over_q=True),
            Tile(32, 4, 1, 2, qk_in_regs=False), Tile(16, 4, 1, 3, qk_in_regs=False),
            Tile(64, 8, 1, 1, qk_in_regs=False), Tile(32, 8, 1, 1, qk_in_regs=False), Tile(32, 4, 2, 1, **_SHARED),
            Tile(16, 4, 2, 1, **_SHARED),
        ),
    },
    80: {
        "forward": (Tile(64, 4, 1, 2), Tile(32, 4, 1, 3), Tile(64, 8, 1, 1)),
        "dkdv": (Tile(32, 4, 1, 2), Tile(64, 4, 1, 2), Tile(32, 4, 1, 1, **_SHARED)),
        "dq": (Tile(64, 4, 1, 2), Tile(32, 4, 1, 2), Tile(32, 4, 1, 3), Tile(64, 8, 1, 1)),
    },
    160: {
        "forward": (
            Tile(32, 8, 1, 1, stages=3), Tile(64, 8, 1, 1), Tile(32, 4, 1, 2), Tile(64, 4, 1, 1), Tile(64, 2, 1, 1),
            Tile(32, 2, 1, 3),
        ),
        "dkdv": (
            Tile(32, 8, 1, 1, roles=True, stages=2), Tile(32, 4, 1, 1, split_n=1), Tile(16, 8, 1, 1, split_k=1),
            Tile(16, 4, 1, 1, **_SHARED),
        ),
        "dq": (
            Tile(16, 8, 1, 1, stages=3), Tile(32, 8, 1, 1, split_n=1), Tile(16, 4, 1, 2), Tile(32, 4, 1, 1),
            Tile(32, 2, 1, 2), Tile(16, 2, 1, 4),
        ),
    },
    96: {
        "forward": (
            Tile(32, 4, 2, 2), Tile(32, 8, 1, 1, stages=3), Tile(64, 4, 1, 2), Tile(64, 4, 1, 2, load_v_with_k=True),
        ),
        "dkdv": (Tile(32, 8, 1, 1, stages=3), Tile(32, 8, 1, 1)),
        "dq": (Tile(32, 8, 1, 1, stages=3), Tile(64, 8, 1, 1)),
        "few_keys": (Tile(32, 4, 1, 1, **_SHARED), Tile(32, 4, 1, 2, qk_in_regs=False, ds_over_q=True)),
    },
    112: {
        "forward": (Tile(64, 8, 1, 1), Tile(32, 8, 1, 1, stages=3)),
        "dkdv": (Tile(32, 8, 1, 1, stages=3), Tile(16, 8, 1, 1, stages=3), Tile(16, 8, 1, 1)),
        "dq": (Tile(32, 8, 1, 1, stages=3), Tile(64, 8, 1, 1)),
    },
    128: {
        "forward": (
            Tile(32, 8, 1, 1, stages=3), Tile(64, 4, 1, 2), Tile(64, 8, 1, 1), Tile(64, 4, 1, 2, load_v_with_k=True),
        ),
        "dkdv": (Tile(32, 8, 1, 1, stages=3), Tile(16, 8, 1, 1, stages=3), Tile(16, 8, 1, 1)),
        "dq": (Tile(32, 8, 1, 1, stages=3), Tile(32, 4, 1, 2), Tile(32, 8, 1, 1)),
        "few_keys": (
            Tile(16, 4, 1, 1, **_SHARED), Tile(16, 4, 1, 2, qk_in_regs=False, ds_over_q=True),
            Tile(32, 8, 1, 1, qk_in_regs=False, ds_over_q=True),
        ),
    },
    192: {
        "forward": (
            Tile(32, 8, 1, 1, stages=3), Tile(32, 8, 1, 1), Tile(32, 4, 1, 2), Tile(32, 4, 1, 2, load_v_with_k=True),
        ),
        "dkdv": (
            Tile(32, 8, 1, 1, roles=True, stages=2), Tile(16, 8, 1, 1, roles=True, stages=3),
            Tile(32, 8, 1, 1, split_n=1),
        ),
        "dq": (Tile(16, 8, 1, 1, stages=3), Tile(16, 4, 1, 2)),
    },
    256: {
        "forward": (
            Tile(16, 8, 1, 1, stages=3), Tile(32, 4, 1, 1, qk_in_regs=False), Tile(16, 8, 1, 1), Tile(16, 4, 1, 2),
            Tile(16, 4, 1, 2, load_v_with_k=True),
        ),
        "dkdv": (Tile(16, 8, 1, 1, roles=True, stages=3), Tile(16, 8, 1, 1, split_k=1)),
        "dq": (Tile(32, 8, 1, 1, split_n=1), Tile(16, 8, 1, 1, split_k=1)),
    },
}  # fmt: skip


def variants_of(shape: Shape, number: int) -> set[variants.Variant]:
    """Return the variants that a sweep of one shape launches."""
    kind, found = shape.kind(number), {variants.delta(shape.kind(number))}
    for entry, tiles in shape.entries(number).items():
        make = variants.MAKERS["dkdv" if entry == "few_keys" else entry]
        found.add(make(kind))
        for tile in tiles:
            with replace_tile(entry, tile):
                found.add(make(kind))
    return found


def compile_all(shapes: list[Shape]) -> None:
    number = nvrtc.target_number(0)
    compile_together(itertools.chain.from_iterable(variants_of(shape, number) for shape in shapes))


def time_calls(call: Callable[..., Tensor], qkv: tuple[Tensor, ...], choice: Choice) -> tuple[float, float] | Failed:
    """Return the milliseconds of a forward, and of a forward with its backward."""
    leaves = [x.detach().requires_grad_() for x in qkv]

    def train() -> object:
        return torch.autograd.grad(call(*leaves), leaves, dout)

    def measure() -> tuple[float, float]:
        with ExitStack() as stack:
            stack.enter_context(use_backend("fused"))
            for entry, tile in choice.items():
                stack.enter_context(replace_tile(entry, tile))
            replays = [capture(Job(one), "cuda") for one in (partial(call, *qkv), train)]
        first, second = (fastest(replay, "cuda", readings=3, calls=10) for replay, _ in replays)
        return first, second

    dout = torch.randn_like(qkv[0][..., : qkv[2].shape[-1]])
    free_memory()
    return attempt("cuda", measure)


def sweep(shape: Shape) -> list[dict[str, object]]:
    """Time PyTorch's kernels, today's tiles, each other tile alone, and the fastest tiles together."""
    torch.manual_seed(0)
    draw = partial(torch.randn, shape.batch, shape.seqlen, shape.heads, shape.head_dim, device="cuda")
    qkv = draw(dtype=torch.float16), draw(dtype=torch.float16), draw(dtype=torch.float16)
    ours = partial(flash_attn_func, causal=shape.causal)
    rivals: dict[str, tuple[float, float]] = {}
    rows: list[dict[str, object]] = []

    def report(name: str, found: tuple[float, float] | Failed) -> None:
        if isinstance(found, Failed):
            print(f"  {name}: {found.reason}", flush=True)
            rows.append({"shape": str(shape), "name": name, "failed": found.reason})
            return
        ratios = {rival: [theirs / mine for theirs, mine in zip(times, found)] for rival, times in rivals.items()}
        shown = ", ".join(f"{rival} {a:.3f} / {b:.3f}" for rival, (a, b) in ratios.items())
        print(f"  {name}: {found[0] * 1e3:.1f} / {found[1] * 1e3:.1f} us; {shown}", flush=True)
        rows.append({"shape": str(shape), "name": name, "ms": found, "ratios": ratios})

    print(shape, "(forward / with the backward)", flush=True)
    for rival, backend in TORCH.items():

        def attend(*heads: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                found = scaled_dot_product_attention(*(x.transpose(1, 2) for x in heads), is_causal=shape.causal)
            return found.transpose(1, 2)

        found = time_calls(attend, qkv, {})
        report(rival, found)
        if not isinstance(found, Failed):
            rivals[rival] = found
    today = time_calls(ours, qkv, {})
    report("today", today)
    best: dict[str, Tile] = {}
    for entry, tiles in shape.entries(nvrtc.target_number(0)).items():
        measured = {tile: time_calls(ours, qkv, {entry: tile}) for tile in tiles}
        for tile, found in measured.items():
            report(f"{entry} {format_tile(tile)}", found)
        times = {tile: found[entry != "forward"] for tile, found in measured.items() if not isinstance(found, Failed)}
        fastest_tile = min(times, key=lambda tile: times[tile], default=None)
        if fastest_tile and not isinstance(today, Failed) and times[fastest_tile] < today[entry != "forward"]:
            best[entry] = fastest_tile
    if best:
        name = ", ".join(f"{entry} {format_tile(tile)}" for entry, tile in best.items())
        report(f"together: {name}", time_calls(ours, qkv, best))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tile_sweep", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="shapes with one of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times and ratios")
    options = parser.parse_args(argv)
    shapes = [shape for shape in SHAPES if any(text in str(shape) for text in options.only)]
    compile_all(shapes)
    rows = [row for shape in shapes for row in sweep(shape)]
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
