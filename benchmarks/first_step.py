"""The first training step without compiled kernels: `python -m benchmarks.first_step [--cores N]`, on a GPU.

Prints seconds of the import, the forward and the backward, the least of several processes. Each has an empty cache of
kernels, and as many CPU cores as a free notebook. Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for the PTX that Turing gets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time

CASES = {"causal, head_dim 128, fp16": (128, "float16"), "causal, head_dim 64, bf16": (64, "bfloat16")}


def step(head_dim: int, dtype: str) -> dict[str, float]:
    """Import the package and run one training step of attention; return the seconds of import, forward and backward."""
    import torch

    q, k, v = torch.randn(3, 2, 512, 8, head_dim, device="cuda", dtype=getattr(torch, dtype)).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    from flash_attn_compat import flash_attn_func, use_backend

    times.append(time.perf_counter())
    with use_backend("fused"):
        out = flash_attn_func(*leaves, causal=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        out.sum().backward()
        torch.cuda.synchronize()
    times.append(time.perf_counter())
    parts = [round(after - before, 3) for before, after in itertools.pairwise(times)]
    return dict(zip(("import", "forward", "backward"), parts)) | {"sum": round(times[-1] - times[0], 3)}


def run_child(case: str, cores: int) -> dict[str, float]:
    """Return the seconds of ``step`` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | {"FLASH_ATTN_COMPAT_CACHE": folder, "CUDA_CACHE_DISABLE": "1"}
        command = [sys.executable, "-m", "benchmarks.first_step", "--child", case, "--cores", str(cores)]
        found = subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(found.splitlines()[-1])
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__)
    parser.add_argument("--cores", type=int, default=2, help="CPU cores of each process")
    parser.add_argument("--runs", type=int, default=3, help="processes for each case")
    parser.add_argument("--child", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
        print(json.dumps(step(*CASES[options.child])))
        return 0
    for case in CASES:
        best = min((run_child(case, options.cores) for _ in range(options.runs)), key=lambda found: found["sum"])
        print(f"{case}: {json.dumps(best)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
