"""Into how many parts the memory-efficient backward should cut keys: `python -m benchmarks.key_splits`, on a GPU.

Prints for each shape the time of every number of parts, and that of the one efficient_launch.py would choose.
Its price of a choice was fitted to these figures on an H200.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flash_attn_compat.backends import efficient_launch
from flash_attn_compat.backends.efficient_launch import CAUSAL_BOTTOM_RIGHT, NO_MASK, Launch
from verify.timing import Job, Timing, time_together
from verify.workloads import skewed_lengths

SPLITS = {str(splits or "PyTorch's"): splits for splits in (None, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)}


def _dense(batch: int, seqlen_q: int, seqlen_k: int, heads: int, head_dim: int, **more: object) -> Launch:
    rows, *keys = (_normal(batch, seqlen, heads, head_dim) for seqlen in (seqlen_q, seqlen_k, seqlen_k))
    return Launch(rows, *keys, head_dim**-0.5, **more)


def _packed(lengths: Sequence[int], heads: int, head_dim: int, mask: int = NO_MASK) -> Launch:
    starts = torch.tensor((0, *itertools.accumulate(lengths)), device="cuda", dtype=torch.int32)
    q, k, v = (_normal(1, sum(lengths), heads, head_dim) for _ in range(3))
    return Launch(q, k, v, head_dim**-0.5, mask, None, starts, starts, max(lengths), max(lengths))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16)


SHAPES: dict[str, Callable[[], Launch]] = {
    "32 packed of 4096, 8 heads, d 64": lambda: _packed([4096] * 32, 8, 64),
    "512 packed of 1024, 4 heads, d 16": lambda: _packed([1024] * 512, 4, 16),
    "64 packed of 512, 16 heads, d 64, causal": lambda: _packed([512] * 64, 16, 64, CAUSAL_BOTTOM_RIGHT),
    "128 packed of 16 to 7000, 16 heads, d 64": lambda: _packed(skewed_lengths(128), 16, 64),
    "128 packed of 16 to 7000, 4 heads, d 128, causal": lambda: _packed(
        skewed_lengths(128), 4, 128, CAUSAL_BOTTOM_RIGHT
    ),
    "8 x 2048, 8 heads, d 128, causal": lambda: _dense(8, 2048, 2048, 8, 128, mask=CAUSAL_BOTTOM_RIGHT),
    "8 x 2048, 16 heads, d 64": lambda: _dense(8, 2048, 2048, 16, 64),
    "8 x 1024, 16 heads, d 64, causal": lambda: _dense(8, 1024, 1024, 16, 64, mask=CAUSAL_BOTTOM_RIGHT),
    "4 x 1000, 32 heads, d 128": lambda: _dense(4, 1000, 1000, 32, 128),
    "4 x 4096, 16 heads, d 72, causal": lambda: _dense(4, 4096, 4096, 16, 72, mask=CAUSAL_BOTTOM_RIGHT),
    "2 x 512, 12 heads, d 64": lambda: _dense(2, 512, 512, 12, 64),
    "1 x 16384, 8 heads, d 128, window 1024": lambda: _dense(
        1, 16384, 16384, 8, 128, mask=CAUSAL_BOTTOM_RIGHT, window_size=1025
    ),
    "1 x 8192, 8 heads, d 128, causal": lambda: _dense(1, 8192, 8192, 8, 128, mask=CAUSAL_BOTTOM_RIGHT),
    "16 x 64 queries, 4096 keys, 16 heads, d 64": lambda: _dense(16, 64, 4096, 16, 64),
}


def _forced(splits: int | None) -> AbstractContextManager[object]:
    return mock.patch.object(efficient_launch, "_key_splits", lambda launch, neighbours: splits)


def main() -> None:
    table = Table("shape", "chosen", *SPLITS, title="ms of one backward")
    for name, make in SHAPES.items():
        launch = make()
        out, native = efficient_launch.forward(launch, keep_lse=True)
        chosen = efficient_launch._key_splits(launch, 1)
        step = Job(partial(efficient_launch.backward, launch, out, out, native))
        jobs = {heading: replace(step, around=partial(_forced, splits)) for heading, splits in SPLITS.items()}
        found = time_together(jobs, "cuda", repeats=5, budget_s=10.0)
        times = [timing.median_ms if isinstance(timing, Timing) else math.inf for timing in map(found.get, SPLITS)]
        table.add_row(name, str(chosen), *(f"[bold]{ms:.3f}[/]" if ms == min(times) else f"{ms:.3f}" for ms in times))
    console = Console(width=200)
    console.print(torch.cuda.get_device_name(), torch.__version__)
    console.print(table)


if __name__ == "__main__":
    main()
