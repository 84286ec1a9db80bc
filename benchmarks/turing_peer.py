"""Our kernels beside flash-attention-turing's: `FLASH_ATTN_COMPAT_CAPABILITY=7.5 python -m benchmarks.turing_peer`.

Needs that package (`import flash_attn_turing`) and a GPU that runs its PTX. Times the forward, and the backward alone.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from benchmarks.runner import Contest, forward_only, make_parser, run
from flash_attn_compat import use_backend
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from verify.bench_report import compared
from verify.bench_run import Jobs, Row
from verify.timing import Job

# (batch, seqlen, heads) by head dim.
SHAPES = {
    64: [(16, 1024, 32), (8, 2048, 32), (4, 4096, 32), (2, 8192, 32), (1, 16384, 32)],
    128: [(4, 1024, 32), (8, 2048, 16), (4, 4096, 16), (2, 8192, 16), (1, 16384, 16)],
}


def make_jobs(head_dim: int, shape: tuple[int, int, int], causal: bool, backward: bool) -> Mapping[str, Jobs]:
    theirs = importlib.import_module("flash_attn_turing")
    generator = torch.Generator("cuda").manual_seed(0)
    size = (*shape, head_dim)
    q, k, v, dout = (torch.randn(size, generator=generator, device="cuda", dtype=torch.half) for _ in range(4))
    mask = (0.0, head_dim**-0.5, causal, -1, -1, 0.0, None, False)
    fused = partial(use_backend, "fused")
    if not backward:
        return forward_only({"ours": Job(lambda: _flash_attn_forward(q, k, v, *mask)[0], fused),
                      "peer": Job(lambda: theirs.fwd(q, k, v, causal)[0])})  # fmt: skip
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    with fused():
        out, lse = _flash_attn_forward(q, k, v, *mask)[:2]
    right, right_lse = theirs.fwd(q, k, v, causal)

    def ours() -> tuple[torch.Tensor, ...]:
        _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, *mask)
        return dq, dk, dv

    peer = Job(lambda: theirs.bwd(q, k, v, right, right_lse, dout, causal)[:3])
    return forward_only({"ours": Job(ours, fused), "peer": peer})


def contests() -> Iterator[Contest]:
    for head_dim, shapes in SHAPES.items():
        for shape, causal, backward in itertools.product(shapes, (False, True), (False, True)):
            name = f"d{head_dim} {' x '.join(map(str, shape))} {'causal' if causal else 'full'}"
            name += " backward" if backward else " forward"
            yield Contest(name, partial(make_jobs, head_dim, shape, causal, backward), torch.half)


def geometric_means(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the geometric means of flash-attention-turing's time over ours: for forwards, and for backwards alone."""
    for way in ("forward", "backward"):
        ratios = [ratio for each in compared(rows) if each.mine.workload.endswith(way)
                  and (ratio := each.ratio(["peer"], "forward"))]  # fmt: skip
        if ratios:
            yield f"{way}: {statistics.geometric_mean(ratios):.3f}, worst {min(ratios):.3f}"


def main(argv: list[str] | None = None) -> int:
    return run(
        "turing_peer", contests(), make_parser("turing_peer", __doc__).parse_args(argv), "cuda", closing=geometric_means
    )


if __name__ == "__main__":
    sys.exit(main())
