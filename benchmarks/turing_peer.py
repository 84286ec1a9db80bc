"""Our kernels beside flash-attention-turing's: `FLASH_ATTN_COMPAT_CAPABILITY=7.5 python -m benchmarks.turing_peer`.

Needs that package (`import flash_attn_turing`) and a GPU that runs its PTX. Prints milliseconds of the forward and of
the backward alone, ours and theirs, and how fast ours is beside theirs: above 1 it is faster.
"""

from __future__ import annotations

import argparse
import importlib
import math
from typing import NamedTuple

import torch

from flash_attn_compat import use_backend
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from verify.timing import fastest

# batch, seqlen, heads
SHAPES = {
    64: [(16, 1024, 32), (8, 2048, 32), (4, 4096, 32), (2, 8192, 32), (1, 16384, 32)],
    128: [(4, 1024, 32), (8, 2048, 16), (4, 4096, 16), (2, 8192, 16), (1, 16384, 16)],
}


class Times(NamedTuple):
    """Milliseconds."""

    forward: float
    backward: float


def times(head_dim: int, batch: int, seqlen: int, heads: int, causal: bool) -> tuple[Times, Times]:
    """Ours and theirs."""
    theirs = importlib.import_module("flash_attn_turing")
    generator = torch.Generator("cuda").manual_seed(0)
    shape = batch, seqlen, heads, head_dim
    q, k, v, dout = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.half) for _ in range(4))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    scale = head_dim**-0.5
    right, right_lse = theirs.fwd(q, k, v, causal)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return _flash_attn_forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)[:2]

    def backward() -> object:
        return _flash_attn_backward(
            dout, q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None, False
        )  # fmt: skip

    with use_backend("fused"):
        out, lse = forward()
        assert float((out.float() - right.float()).abs().max()) < 0.05, "the two differ"
        ours = Times(fastest(forward), fastest(backward))
    return ours, Times(
        fastest(lambda: theirs.fwd(q, k, v, causal)),
        fastest(lambda: theirs.bwd(q, k, v, right, right_lse, dout, causal)),
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    ratios: list[Times] = []
    print(f"{'batch x seqlen x heads':36} forward: ours, theirs, ratio | backward")
    for head_dim, shapes in SHAPES.items():
        for shape in shapes:
            for causal in (False, True):
                ours, theirs = times(head_dim, *shape, causal)
                ratios.append(Times(theirs.forward / ours.forward, theirs.backward / ours.backward))
                cells = [f"{a:8.3f} {b:8.3f} {b / a:5.2f}" for a, b in zip(ours, theirs)]
                name = f"d{head_dim} {'x'.join(map(str, shape))} {'causal' if causal else 'full'}"
                print(f"{name:36}" + " | ".join(cells), flush=True)
    for what, found in zip(Times._fields, zip(*ratios)):
        mean = math.exp(sum(map(math.log, found)) / len(found))
        print(f"{what}: {mean:.3f}, worst {min(found):.3f}")


if __name__ == "__main__":
    main()
