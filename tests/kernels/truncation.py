"""The errors of truncating tensor cores over many keys: `python -m tests.kernels.truncation`, some two minutes.

The forward kernel runs in the emulator of a Turing GPU, two warps a block, and no blocks share keys: each sum is as
long as it can be. Every figure is an error against fp64 and what it may be (verify/judge.py).
"""

from __future__ import annotations

import argparse
import itertools
import sys

import pytest

import flash_attn_compat
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.tiles import Tile
from flash_attn_compat.backends.fused.choosing.variants import Kind
from flash_attn_compat.backends.fused.launching import grids
from tests.kernels import fused_on_cpu
from verify.examination import Examination
from verify.judge import Check
from verify.problems import Problem


def small_tile(entry: str, kind: Kind) -> Tile:
    """The usual steps of keys, of rows no more than there are."""
    return Tile(64, 2, 1, 1)


def errors(problem: Problem, truncates: bool, decodes: bool = False) -> dict[str, Check]:
    """What the judge says of each quantity. decodes: whether by the decode kernel, which is for at most 16 rows"""
    with pytest.MonkeyPatch.context() as patch, flash_attn_compat.use_backend("fused"):
        fused_on_cpu.emulate(patch, 75, truncates=truncates)
        patch.setattr(variants, "takes_decode", lambda *shapes: decodes)
        patch.setattr(grids, "count_splits", lambda *shapes: 1)
        patch.setattr(variants, "choose_tile", small_tile)
        verdict = Examination(problem).judge("fused")
    assert not verdict.refused and not verdict.errors, verdict
    return {check.quantity: check for check in verdict.checks}


def problem(keys: int, dtype: str, mean: float) -> Problem:
    return Problem(seqlens_q=(16,), seqlens_k=(keys,), head_dim=64, dtype=dtype, value_mean=mean, backward=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[2**16, 2**17])
    options = parser.parse_args()
    print("| keys | dtype | values around | out: rounding, truncating, allowed | LSE: the same |")
    print("|---|---|---|---|---|")
    is_right = True
    for keys, dtype, mean in itertools.product(options.keys, ("float16", "bfloat16"), (0.0, 1.0)):
        rounding, truncating = (errors(problem(keys, dtype, mean), truncates) for truncates in (False, True))
        cells = [
            f"{rounding[name].error:.1e}, {truncating[name].error:.1e}, {truncating[name].bound:.1e}"
            for name in ("out", "softmax_lse")
        ]
        print(f"| {keys} | {dtype} | {mean:.0f} | {cells[0]} | {cells[1]} |", flush=True)
        is_right &= all(check.ok for check in (*rounding.values(), *truncating.values()))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
