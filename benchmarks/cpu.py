"""CPU speed as ratios within one run: packed sequences against padding and against a bare loop, `chunked` against
PyTorch's fused kernel, and the host time of a tiny call. `python -m benchmarks.cpu [--json FILE] [--only TEXT]`

Exit code 1 if a ratio misses its bound.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.runner import DTYPES, Jobs, Row, on_workload, parser, run
from flash_attn_compat import flash_attn_func
from verify.contestants import RIVALS, ours
from verify.timing import Job, time_together
from verify.workloads import workload

# Log-normal around 200, the longest 2048.
SKEWED = (torch.randn(32, generator=torch.Generator().manual_seed(0)).exp() * 200).clamp(1, 2048).int().tolist()
SKEWED[7] = 2048
LENGTHS = {"skewed": SKEWED, "uniform": [256] * 16, "tiny": [1 + i % 16 for i in range(512)]}
# At least this share of padding's speed, and of the bare loop's.
REQUIRED = {"skewed": (3.0, 0.85), "uniform": (0.9, 0.85), "tiny": (0.9, 0.85)}
ENOUGH_S = 10.0


def tiny_call(dtype: torch.dtype, causal: bool) -> Jobs:
    q, k, v = (torch.randn(1, 4, 2, 16).to(dtype) for _ in range(3))
    by_head = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    return {
        "ours": Job(lambda: flash_attn_func(q, k, v, causal=causal)),
        "SDPA": Job(lambda: F.scaled_dot_product_attention(*by_head, is_causal=causal).transpose(1, 2)),
    }


def rows() -> Iterator[Row]:
    for (name, lengths), dtype, backward in itertools.product(LENGTHS.items(), DTYPES, (False, True)):
        problem = workload(f"{name} {dtype}", tuple(lengths), (8, 8), 64, "varlen")
        contestants = [ours(), *(RIVALS[rival] for rival in ("pad_sdpa", "sdpa_loop"))]
        row = on_workload(problem, contestants, "cpu", DTYPES[dtype], backward)
        yield replace(row, at_least=dict(zip(("pad_sdpa", "sdpa_loop"), REQUIRED[name])))
    for causal, backward in itertools.product((False, True), (False, True)):
        problem = workload(f"4096 tokens{' causal' * causal}, chunked", (4096,), (8, 8), 64, causal=causal)
        row = on_workload(problem, [ours("chunked"), RIVALS["pad_sdpa"]], "cpu", torch.float32, backward)
        yield replace(row, at_least={"pad_sdpa": 1 / 3})
    for causal, (name, dtype) in itertools.product((False, True), DTYPES.items()):
        label = f"host time of a tiny call {name}{' causal' * causal}"
        yield Row(label, partial(tiny_call, dtype, causal), "", dtype, {"SDPA": 1 / 4})


def main(argv: list[str] | None = None) -> int:
    arguments = parser("cpu", __doc__)
    what = "1 measures CPU time: the choice for a busy machine"
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads(), help=what)
    options = arguments.parse_args(argv)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    return run("cpu", rows(), options, "cpu", lambda jobs: time_together(jobs, "cpu", options.repeats, ENOUGH_S, clock))


if __name__ == "__main__":
    sys.exit(main())
