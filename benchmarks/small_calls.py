"""Small calls with gradients, split into the host's time and the GPU's: `python -m benchmarks.small_calls`, on a GPU.

A small call waits for the host, so its eager time says little about the kernels. Beside it stand the GPU's time alone,
of the same call replayed from a CUDA graph, and the host's time until all launches are queued. Contestants take turns.
FLASH_ATTN_COMPAT_CAPABILITY=7.5 runs what Turing gets. PyTorch's kernels are reached by scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.sdpa import capture_job
from flash_attn_compat import flash_attn_func, use_backend
from verify.timing import Failed, Job, Timing, attempt, time_together

HOST_CALLS, HOST_READINGS = 20, 9  # few enough calls for the driver's queue of launches


class Shape(NamedTuple):
    name: str
    batch: int
    seqlen: int
    heads: tuple[int, int]  # of queries; of keys
    head_dim: int
    causal: bool = False


SHAPES = (
    Shape("SD 1.5, 2 x 256, d160", 2, 256, (8, 8), 160),
    Shape("SD 1.5, 2 x 1024, d80", 2, 1024, (8, 8), 80),
    Shape("Qwen, 1024, d128 causal", 1, 1024, (16, 8), 128, causal=True),
    Shape("Qwen, 4096, d128 causal", 1, 4096, (16, 8), 128, causal=True),
    Shape("ViT, 64 x 197, d64", 64, 197, (12, 12), 64),
    Shape("BERT, 2 x 128, d64", 2, 128, (12, 12), 64),
)


def attend_by_torch(backend: SDPBackend, shape: Shape, *qkv: Tensor) -> Tensor:
    """Call one of PyTorch's kernels. Key heads are repeated before, since these kernels take no grouped heads."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    if shape.heads[0] != shape.heads[1]:
        k, v = (x.repeat_interleave(shape.heads[0] // shape.heads[1], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=shape.causal).transpose(1, 2)


def make_jobs(shape: Shape, dtype: torch.dtype) -> dict[str, dict[str, Job]]:
    """Return jobs by contestant and mode."""
    draw = partial(torch.randn, dtype=dtype, device="cuda")
    q, dout = (draw(shape.batch, shape.seqlen, shape.heads[0], shape.head_dim) for _ in range(2))
    k, v = (draw(shape.batch, shape.seqlen, shape.heads[1], shape.head_dim) for _ in range(2))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def jobs(attend: Callable[..., Tensor], around: Callable[[], AbstractContextManager[object]]) -> dict[str, Job]:
        def train() -> object:
            return torch.autograd.grad(attend(*leaves), leaves, dout)

        return {"forward": Job(partial(attend, q, k, v), around), "both": Job(train, around)}

    found = {"ours": jobs(partial(flash_attn_func, causal=shape.causal), partial(use_backend, "fused"))}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("efficient", SDPBackend.EFFICIENT_ATTENTION)):
        found[name] = jobs(partial(attend_by_torch, backend, shape), partial(sdpa_kernel, backend))
    return found


def host_time(job: Job) -> float:
    """Return the milliseconds until the launches of one call are queued: the median over readings."""
    readings = []
    with job.around():
        for _ in range(HOST_READINGS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                job.run()
            readings.append((time.perf_counter() - start) * 1e3 / HOST_CALLS)
    return statistics.median(readings)


def medians(jobs: Mapping[str, Job]) -> dict[str, float | str]:
    found = time_together(jobs, "cuda", repeats=9, budget_s=0.3)
    return {name: one.median_ms if isinstance(one, Timing) else one.reason for name, one in found.items()}


def measure(shape: Shape, dtype: torch.dtype) -> Iterator[dict[str, object]]:
    """Yield a row for each mode and contestant: milliseconds eager, of the GPU alone, and of the host."""
    by_contestant = make_jobs(shape, dtype)
    for mode in ("forward", "both"):
        jobs = {name: modes[mode] for name, modes in by_contestant.items()}
        eager = medians(jobs)
        host = {name: attempt("cuda", host_time, job) for name, job in jobs.items()}
        replays = {name: attempt("cuda", capture_job, job, "cuda") for name, job in jobs.items()}
        alone = medians({name: job for name, job in replays.items() if not isinstance(job, Failed)})
        for name in jobs:
            of_host, of_gpu = host[name], alone.get(name, "not captured")
            row = {"shape": shape.name, "dtype": str(dtype), "mode": mode, "contestant": name, "eager": eager[name]}
            yield {**row, "gpu": of_gpu, "host": of_host.reason if isinstance(of_host, Failed) else of_host}


def format_row(row: Mapping[str, object]) -> str:
    figures = [f"{x * 1e3:.1f}" if isinstance(x, float) else str(x) for x in (row["eager"], row["gpu"], row["host"])]
    return f"| {row['shape']} | {row['mode']} | {row['contestant']} | {' | '.join(figures)} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_calls", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes with this text in their name")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times")
    options = parser.parse_args(argv)
    rows: list[Mapping[str, object]] = []
    print("| call | mode | contestant | eager, us | GPU alone, us | host, us |\n|---|---|---|---|---|---|", flush=True)
    for shape in SHAPES:
        for row in measure(shape, getattr(torch, options.dtype)) if options.only in shape.name else ():
            rows.append(row)
            print(format_row(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
