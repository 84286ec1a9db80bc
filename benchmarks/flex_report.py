"""Registers, spills and instructions of kernels with flex_attention's functions, for sm_75 and without a GPU.

`python -m benchmarks.flex_report [--head-dims 64 128] [--only TEXT]` prints a row for each pair of functions, kernel
and head dim: also the cycles that benchmarks.turing_sm simulates for 64 rows times 64 keys, and those of the kernel
without functions. It fails if a kernel does not fit. Needs NVRTC and cuobjdump, of the test extra.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.turing_sm import simulate_variant
from flash_attn_compat.backends.fused import flex
from flash_attn_compat.backends.fused.building.nvrtc import Compiler
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, Kind, Sizes
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.flex import BlockLists, Blocks, Mods
from flash_attn_compat.core.flex import capture, printer
from flash_attn_compat.torch_flex import functions
from tests.kernels import offline

ENTRIES = ("forward", "dkdv", "dq")
_HOST = torch.device("cpu")


def _same(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score


def _everywhere(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return b.new_ones((), dtype=torch.bool)


class Pair(NamedTuple):
    """A score_mod and a mask_mod, and the tensors that each captures, which it takes as its last arguments."""

    score_mod: Callable[..., Tensor] = _same
    mask_mod: Callable[..., Tensor] = _everywhere
    of_score: tuple[Tensor, ...] = ()
    of_mask: tuple[Tensor, ...] = ()


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def _alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, slopes: Tensor) -> Tensor:
    return score - slopes[h] * (q - kv).abs()


_SLOPES, _NUMBERS, _TABLE = torch.ones(16), torch.ones(2, 4096, dtype=torch.int64), torch.ones(16, 8192)
PAIRS = {
    "causal": Pair(mask_mod=_causal),
    "window": Pair(mask_mod=lambda b, h, q, kv: (q >= kv) & (q - kv <= 512)),
    "softcap": Pair(lambda score, b, h, q, kv: 20 * torch.tanh(score / 20)),
    "ALiBi": Pair(_alibi, of_score=(_SLOPES,)),
    "ALiBi, causal": Pair(_alibi, _causal, (_SLOPES,)),
    "documents": Pair(mask_mod=lambda b, h, q, kv, n: (q >= kv) & (n[b, q] == n[b, kv]), of_mask=(_NUMBERS,)),
    "relative positions": Pair(lambda score, b, h, q, kv, t: score + t[h, q - kv + 4096], _causal, (_TABLE,)),
    "natten": Pair(mask_mod=lambda b, h, q, kv: ((q % 64 - kv % 64).abs() <= 6) & ((q // 64 - kv // 64).abs() <= 6)),
}


def print_pair(pair: Pair) -> Mods:
    """Return a pair of functions as C++, with the derivative of score_mod."""
    score = capture.capture_score(pair.score_mod, pair.of_score, _HOST)
    mask = capture.capture_mask(pair.mask_mod, pair.of_mask, _HOST, len(pair.of_score))
    slope = capture.capture_joint(pair.score_mod, pair.of_score, _HOST)
    return functions.of_printed(printer.print_functions(score, mask, slope)).mods


def make_rows(names: list[str], head_dims: list[int], compiler: Compiler) -> Iterator[tuple[str, bool]]:
    """Yield rows of Markdown, each with whether its kernel fits."""
    nothing = torch.empty(0)
    lists = BlockLists(nothing, nothing)
    for name, head_dim, entry in itertools.product(names, head_dims, ENTRIES):
        mods, kind = print_pair(PAIRS[name]), Kind(75, FP16, Sizes(head_dim))
        blocks = Blocks(128, 128, lists, lists) if mods.has_mask else None
        variant = flex.make_variant(entry, kind, mods, blocks)
        found = offline.compiled(compiler, variant, "sm_75")
        loop = sum(offline.main_loop(offline.instructions(found.cubin)).values())
        fits = not list(offline.complaints(variant, found, 75))
        cycles = simulate_variant(variant, head_dim, found).cycles
        plain = _cycles_of(variants.MAKERS[entry](kind), head_dim, compiler)
        numbers = head_dim, entry, found.registers, found.spilled, loop, round(cycles), round(plain)
        yield f"| {name} | {' | '.join(map(str, numbers))} |{'' if fits else ' does not fit'}", fits


def _cycles_of(variant: Variant, head_dim: int, compiler: Compiler) -> float:
    return simulate_variant(variant, head_dim, offline.compiled(compiler, variant, "sm_75")).cycles


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flex_report", description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="functions whose names have this text")
    parser.add_argument("--compiler", default=next(reversed(offline.compilers()), None), help="NVRTC's version")
    options = parser.parse_args(argv)
    if options.compiler is None or offline.cuobjdump() is None:
        print("needs NVRTC and cuobjdump: pip install -e '.[test]' on x86-64 Linux")
        return 1
    print("| functions | head_dim | kernel | registers | spilled bytes | main loop | cycles | without functions |")
    print("|---|---|---|---|---|---|---|---|")
    names, all_fit = [name for name in PAIRS if options.only in name], True
    for row, fits in make_rows(names, options.head_dims, offline.compilers()[options.compiler]):
        print(row, flush=True)
        all_fit = all_fit and fits
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main())
