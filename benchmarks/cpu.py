"""CPU speed as ratios within one run: packed sequences against padding and against a bare loop, `chunked` against
PyTorch's fused kernel, and the host time of a tiny call. `python -m benchmarks.cpu [--json FILE] [--only TEXT]`

Exit code 1 if a ratio misses its bound.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.runner import DTYPES, Contest, forward_only, make_contest, make_parser, run
from flash_attn_compat import flash_attn_func
from verify.bench_run import Jobs
from verify.contestants import RIVALS, ours
from verify.timing import Job, time_together
from verify.workloads import workload

# Sequence lengths: log-normal around 200, the longest 2048.
SKEWED = (torch.randn(32, generator=torch.Generator().manual_seed(0)).exp() * 200).clamp(1, 2048).int().tolist()
SKEWED[7] = 2048
LENGTHS = {"skewed": SKEWED, "uniform": [256] * 16, "tiny": [1 + i % 16 for i in range(512)]}
PACKING = "pad_sdpa", "sdpa_loop"
# The least allowed ratio of each rival's time to ours; rivals in the order of PACKING.
REQUIRED = {"skewed": (3.0, 0.85), "uniform": (0.9, 0.85), "tiny": (0.9, 0.85)}
ENOUGH_S = 10.0


def tiny_call(dtype: torch.dtype, causal: bool) -> Mapping[str, Jobs]:
    q, k, v = (torch.randn(1, 4, 2, 16).to(dtype) for _ in range(3))
    by_head = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    jobs = {
        "ours": Job(lambda: flash_attn_func(q, k, v, causal=causal)),
        "SDPA": Job(lambda: F.scaled_dot_product_attention(*by_head, is_causal=causal).transpose(1, 2)),
    }
    return forward_only(jobs)


def contests() -> Iterator[Contest]:
    for (name, lengths), dtype in itertools.product(LENGTHS.items(), DTYPES):
        problem = workload(f"{name} {dtype}", tuple(lengths), (8, 8), 64, "varlen")
        contestants = [ours(), *(RIVALS[rival] for rival in PACKING)]
        yield make_contest(problem, contestants, "cpu", DTYPES[dtype], at_least=dict(zip(PACKING, REQUIRED[name])))
    for causal in (False, True):
        problem = workload(f"4096 tokens{' causal' * causal}, chunked", (4096,), (8, 8), 64, causal=causal)
        contestants = [ours("chunked"), RIVALS["pad_sdpa"]]
        yield make_contest(problem, contestants, "cpu", torch.float32, at_least={"pad_sdpa": 1 / 3})
    for causal, (name, dtype) in itertools.product((False, True), DTYPES.items()):
        label = f"host time of a tiny call {name}{' causal' * causal}"
        yield Contest(label, partial(tiny_call, dtype, causal), dtype, {"SDPA": 1 / 4})


def main(argv: list[str] | None = None) -> int:
    arguments = make_parser("cpu", __doc__)
    advice = "1 measures CPU time: the choice for a busy machine"
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads(), help=advice)
    options = arguments.parse_args(argv)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    timed = partial(time_together, device="cpu", repeats=options.repeats, budget_s=ENOUGH_S, clock=clock)
    return run("cpu", contests(), options, "cpu", timed)


if __name__ == "__main__":
    sys.exit(main())
