"""Our kernels beside PyTorch's flash kernel over head dims: `python -m benchmarks.head_dims`, on a GPU of 8.0 or newer.

Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for the PTX that Turing gets; PyTorch's kernel is the same either way. Prints
milliseconds of both and how fast ours is beside theirs: above 1 it is faster. With `--dtype float16 bfloat16` also how
long ours takes in bf16 beside fp16.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_compat
from verify.timing import fastest

HEAD_DIMS = 40, 80, 96, 112, 160, 192, 256
_CHANNELS = 2048  # of all heads together


class Row(NamedTuple):
    """What was timed, and milliseconds of ours and theirs: without gradients, and with them."""

    name: str
    forward: tuple[float, float]
    training: tuple[float, float]

    def __str__(self) -> str:
        cells = [f"{ours:8.3f} {theirs:8.3f} {theirs / ours:5.2f}" for ours, theirs in (self.forward, self.training)]
        return f"{self.name:34}" + "  |".join(cells)


def attentions(causal: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Ours and PyTorch's, of q, k and v as (batch, seqlen, heads, head_dim)."""

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with flash_attn_compat.use_backend("fused"):
            out: Tensor = flash_attn_compat.flash_attn_func(q, k, v, causal=causal)
        return out

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return ours, theirs


def row(head_dim: int, seqlen: int, dtype: torch.dtype, causal: bool) -> Row:
    heads = max(1, _CHANNELS // head_dim)
    batch = max(1, 16384 // seqlen)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = batch, seqlen, heads, head_dim
    q, k, v, dout = (torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for _ in range(4))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]

    def train(attend: Callable[..., Tensor]) -> object:
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    ours, theirs = attentions(causal)
    right = theirs(q, k, v)
    error = float((ours(q, k, v).float() - right.float()).abs().max())
    assert error < 0.05, f"the two differ by {error}"
    forward, training = (
        (fastest(lambda: run(ours)), fastest(lambda: run(theirs))) for run in (lambda attend: attend(q, k, v), train)
    )
    mask = "causal" if causal else "full"
    name = f"d{head_dim} {str(dtype).removeprefix('torch.')} {batch} x {seqlen}, {heads} heads {mask}"
    return Row(name, forward, training)


def summary(rows: list[list[Row]]) -> Iterator[str]:
    """The geometric mean of theirs over ours; and of ours in bf16 over fp16, where each problem has a row of both."""
    for what in ("forward", "training"):
        ratios = [math.log(theirs / ours) for ours, theirs in (getattr(one, what) for row in rows for one in row)]
        yield f"{what}: {math.exp(sum(ratios) / len(ratios)):.3f}, worst {math.exp(min(ratios)):.3f}"
    for what, means in zip(("forward", "training", "backward"), zip(*(map(math.log, beside(row)) for row in rows))):
        yield f"{what}, bf16 / fp16: {math.exp(sum(means) / len(means)):.3f}, worst {math.exp(max(means)):.3f}"


def beside(row: list[Row]) -> list[float]:
    """How long ours takes in the second dtype beside the first: the forward, with the backward, the backward alone."""
    times = [(one.forward[0], one.training[0], one.training[0] - one.forward[0]) for one in row]
    return [bf16 / fp16 for fp16, bf16 in zip(*times)] if len(times) == 2 else []


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head_dims", description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--dtype", nargs="+", choices=("float16", "bfloat16"), default=["float16"])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[1024, 4096])
    arguments = parser.parse_args()
    print(f"{'':34}{'forward: ours, theirs, ratio':>24}  | with the backward")
    rows = []
    for head_dim, seqlen, causal in itertools.product(arguments.head_dims, arguments.seqlen, (False, True)):
        rows.append([row(head_dim, seqlen, getattr(torch, dtype), causal) for dtype in sorted(arguments.dtype)[::-1]])
        print(*rows[-1], sep="\n", flush=True)
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
