"""Two tables of docs/exactness.md, by the kernels in the emulator of a Turing GPU:

`python -m tests.kernels.accuracy magnitudes`, a minute: the errors of bf16 as scaled fp16, by magnitude of the inputs,
over 2 sequences of 256 tokens and 4 heads of 64 channels, causal. Every figure is the largest error against fp64, as a
multiple of the same formula's in plain bf16.
`python -m tests.kernels.accuracy truncation --keys 65536 131072`, some two minutes: the errors of truncating tensor
cores over many keys. Two warps a block, and no blocks share keys: each sum is as long as it can be. Every figure is an
error against fp64 and what it may be (verify/judge.py).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, use_backend
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import Kind
from flash_attn_compat.backends.fused.choosing.tiles import Tile
from flash_attn_compat.backends.fused.launching import grids
from tests.forms.plain import attention
from tests.kernels import fused_on_cpu
from verify.examination import Examination
from verify.judge import Check
from verify.problems import Problem

MAGNITUDES = (
    (1.0, 1.0, 1.0, 1.0),
    (1e-3, 1e-3, 1e4, 1e-6),
    (1e4, 1e-4, 1e4, 1e4),
    (1e-6, 1e4, 1.0, 1.0),
    (1e-6, 1e-6, 1e-6, 1e-6),
    (1e-12, 1e-12, 1e12, 1e-12),
)


def answers(attend: Callable[..., Tensor], tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return out, dq, dk and dv of q, k, v and dout in this dtype, as fp64."""
    *leaves, dout = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    out = attend(*leaves)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, dout.detach()))]


def error_ratios(sizes: Sequence[float], tokens: int = 256) -> list[float]:
    """Return the errors of out, dq, dk and dv as multiples of plain bf16's. sizes: the magnitudes of q, k, v, dout"""
    torch.manual_seed(0)
    tensors = [torch.randn(2, tokens, 4, 64).mul(size).to(torch.bfloat16) for size in sizes]
    with pytest.MonkeyPatch.context() as patch, use_backend("fused"):
        fused_on_cpu.emulate(patch, 75)
        ours = answers(lambda *qkv: flash_attn_func(*qkv, causal=True), tensors, torch.bfloat16)
    plain, exact = (
        answers(lambda *qkv: attention(*qkv, window=(-1, 0)), tensors, dtype)
        for dtype in (torch.bfloat16, torch.float64)
    )
    errors = [[float((x - y).abs().max()) for x, y in zip(each, exact, strict=True)] for each in (ours, plain)]
    return [mine / theirs for mine, theirs in zip(*errors, strict=True)]


def print_magnitudes() -> bool:
    """Print the table; return whether every error is at most twice plain bf16's."""
    print("| magnitudes of q, k, v, dout | out, dq, dk, dv |\n|---|---|")
    worst = 0.0
    for sizes in MAGNITUDES:
        ratios = error_ratios(sizes)
        worst = max(worst, *ratios)
        row = ", ".join(f"{size:g}" for size in sizes), ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {' | '.join(row)} |", flush=True)
    return worst <= 2


def small_tile(entry: str, kind: Kind) -> Tile:
    """The usual steps of keys, of rows no more than there are."""
    return Tile(64, 2, 1, 1)


def errors(problem: Problem, truncates: bool, decodes: bool = False) -> dict[str, Check]:
    """What the judge says of each quantity. decodes: whether by the decode kernel, which is for at most 16 rows"""
    with pytest.MonkeyPatch.context() as patch, use_backend("fused"):
        fused_on_cpu.emulate(patch, 75, truncates=truncates)
        patch.setattr(variants, "takes_decode", lambda *shapes: decodes)
        patch.setattr(grids, "count_splits", lambda *shapes: 1)
        patch.setattr(variants, "choose_tile", small_tile)
        verdict = Examination(problem).judge("fused")
    assert not verdict.refused and not verdict.errors, verdict
    return {check.quantity: check for check in verdict.checks}


def problem(keys: int, dtype: str, mean: float) -> Problem:
    return Problem(seqlens_q=(16,), seqlens_k=(keys,), head_dim=64, dtype=dtype, value_mean=mean, backward=False)


def print_truncation(lengths: Sequence[int]) -> bool:
    """Print the table; return whether every error is allowed."""
    print("| keys | dtype | values around | out: rounding, truncating, allowed | LSE: the same |")
    print("|---|---|---|---|---|")
    is_right = True
    for keys, dtype, mean in itertools.product(lengths, ("float16", "bfloat16"), (0.0, 1.0)):
        rounding, truncating = (errors(problem(keys, dtype, mean), truncates) for truncates in (False, True))
        cells = [
            f"{rounding[name].error:.1e}, {truncating[name].error:.1e}, {truncating[name].bound:.1e}"
            for name in ("out", "softmax_lse")
        ]
        print(f"| {keys} | {dtype} | {mean:.0f} | {cells[0]} | {cells[1]} |", flush=True)
        is_right &= all(check.ok for check in (*rounding.values(), *truncating.values()))
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=("magnitudes", "truncation"))
    parser.add_argument("--keys", type=int, nargs="+", default=[2**16, 2**17])
    options = parser.parse_args()
    return 0 if (print_magnitudes() if options.table == "magnitudes" else print_truncation(options.keys)) else 1


if __name__ == "__main__":
    sys.exit(main())
