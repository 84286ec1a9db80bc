"""What P V in fp16 accumulators, promoted to fp32 every 64 keys, would cost: `python -m tests.kernels.half_sums`.

It takes a minute.

The forward's arithmetic on a CPU, step by step: P rounded to fp16, 8 keys a tensor-core instruction. Errors are against
fp64, as multiples of what rounding the right result to fp16 costs: of the largest one, then of the root mean square.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

ROWS, HEAD_DIM, TILE, STEP = 64, 64, 64, 8
Round = Callable[[Tensor], Tensor]


def to_fp32(x: Tensor) -> Tensor:
    return x.float().double()


def rounded(x: Tensor) -> Tensor:
    return x.half().double()


def truncated(x: Tensor) -> Tensor:
    """Towards 0, as Turing's tensor cores cut off what they add."""
    near = x.half()
    below = (near.view(torch.int16) - 1).view(torch.float16)
    return torch.where(near.double().abs() > x.abs(), below, near).double()


def attention(scores: Tensor, v: Tensor, accumulated: Round) -> Tensor:
    """One tile after the other; the sum of a tile is ``accumulated`` behind each instruction."""
    largest, total = scores.new_full((ROWS, 1), -math.inf), scores.new_zeros(ROWS, 1)
    out = scores.new_zeros(ROWS, HEAD_DIM)
    for S, V in zip(scores.split(TILE, 1), v.split(TILE)):
        highest = torch.maximum(largest, S.amax(1, keepdim=True))
        P, shrink = (S - highest).exp(), (largest - highest).exp()
        total, largest = total * shrink + P.sum(1, keepdim=True), highest
        product = torch.zeros_like(out)
        for step, values in zip(rounded(P).split(STEP, 1), V.split(STEP)):
            product = accumulated(product + step @ values)
        out = to_fp32(out * shrink + product)
    return out / total


def main() -> None:
    print(
        "| keys | scores' deviation | values around | fp32 | fp16, rounded | fp16, cut off |\n|---|---|---|---|---|---|"
    )
    for keys, spread, mean in itertools.product((64, 1024, 16384), (1.0, 4.0), (0.0, 1.0)):
        generator = torch.Generator().manual_seed(keys)
        scores = torch.randn(ROWS, keys, generator=generator).double() * spread
        v = rounded(torch.randn(keys, HEAD_DIM, generator=generator) + mean)
        right = scores.softmax(1) @ v
        rounding = rounded(right) - right
        cells = []
        for accumulated in (to_fp32, rounded, truncated):
            error = rounded(attention(scores, v, accumulated)) - right
            cells.append(f"{error.abs().max() / rounding.abs().max():.1f}, {error.norm() / rounding.norm():.1f} |")
        print(f"| {keys:,} | {spread:.0f} | {mean:.0f} |", *cells, flush=True)


if __name__ == "__main__":
    main()
