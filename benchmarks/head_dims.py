"""Our kernels beside PyTorch's flash kernel over head dims: `python -m benchmarks.head_dims`, on a GPU of 8.0 or newer.

Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for the PTX that Turing gets; PyTorch's kernel is the same either way.
`--dtype float16 bfloat16` also prints the ratio of our times in bf16 and fp16.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.runner import DTYPES, Contest, make_contest, make_parser, run
from verify.bench_report import MODES
from verify.bench_run import Row
from verify.call import Call
from verify.contestants import Contestant, Prepared, ours, pad_sdpa
from verify.workloads import Workload, workload

HEAD_DIMS = 40, 80, 96, 112, 160, 192, 256
TOKENS, CHANNELS = 16384, 2048  # tokens of a batch, channels of all heads


def prepare_torch_flash(workload: Workload, call: Call) -> Prepared:
    return replace(pad_sdpa(workload, call), around=partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION))


CONTESTANTS = ours("fused"), Contestant("PyTorch's flash kernel", prepare_torch_flash)


def contests(head_dims: Sequence[int], dtypes: Sequence[str], seqlens: Sequence[int], device: str) -> Iterator[Contest]:
    for head_dim, seqlen, causal in itertools.product(head_dims, seqlens, (False, True)):
        heads, batch = max(1, CHANNELS // head_dim), max(1, TOKENS // seqlen)
        for dtype in dtypes:
            name = f"d{head_dim} {dtype} {batch} x {seqlen}, {heads} heads {'causal' if causal else 'full'}"
            problem = workload(name, (seqlen,) * batch, (heads, heads), head_dim, causal=causal)
            yield make_contest(problem, CONTESTANTS, device, DTYPES[dtype])


def compare_bf16(rows: Sequence[Row]) -> Iterator[str]:
    """Yield geometric means of our time in bf16 over fp16, over the problems that were timed in both."""
    mine = {row.workload: row for row in rows if row.ours}
    for mode, label in MODES.items():
        pairs = [(row.milliseconds(mode), mine[bf16].milliseconds(mode)) for name, row in mine.items()
                 if (bf16 := name.replace(" float16 ", " bfloat16 ")) in mine and bf16 != name]  # fmt: skip
        ratios = [bf16 / fp16 for fp16, bf16 in pairs if fp16 and bf16]
        if ratios:
            yield f"{label}, bf16 / fp16: {statistics.geometric_mean(ratios):.3f}, worst {max(ratios):.3f}"


def main(argv: list[str] | None = None) -> int:
    arguments = make_parser("head_dims", __doc__)
    arguments.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    arguments.add_argument("--dtype", nargs="+", choices=("float16", "bfloat16"), default=["float16"])
    arguments.add_argument("--seqlen", type=int, nargs="+", default=[1024, 4096])
    options = arguments.parse_args(argv)
    chosen = contests(options.head_dims, options.dtype, options.seqlen, "cuda")
    return run("head_dims", chosen, options, "cuda", closing=compare_bf16)


if __name__ == "__main__":
    sys.exit(main())
