"""The errors of bf16 as scaled fp16, by magnitude of the inputs: `python -m tests.kernels.magnitudes`, a minute.

The kernels for Turing run in the emulator, over 2 sequences of 256 tokens and 4 heads of 64 channels, causal. Every
figure is the largest error against fp64, as a multiple of the same formula's in plain bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, use_backend
from tests.forms.plain import attention
from tests.kernels import fused_on_cpu

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


def main() -> int:
    print("| magnitudes of q, k, v, dout | out, dq, dk, dv |\n|---|---|")
    worst = 0.0
    for sizes in MAGNITUDES:
        ratios = error_ratios(sizes)
        worst = max(worst, *ratios)
        row = ", ".join(f"{size:g}" for size in sizes), ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {' | '.join(row)} |", flush=True)
    return 0 if worst <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
