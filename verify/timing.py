"""How long and how much: interleaved rounds, medians and spread, peak memory. Knows nothing of attention.

The contestants of one workload take turns, so that a machine that slows down slows all of them down.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")

# One reading spans at least this long, so that launching the first call does not count much.
CUDA_READING_MS, READING_MS = 8.0, 4.0
MOST_CALLS = 100
# Where a call takes longer than this, its second reading is the whole measurement.
LONGEST_CALL_S = 3.0


class DeviceLost(Exception):
    """A kernel has broken the CUDA context of this process; nothing can be measured any more."""


@dataclass(frozen=True)
class Job:
    """Something to be timed, within a context that is entered outside of the clock."""

    run: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median of the readings, and their quartiles."""

    median_ms: float
    low_ms: float
    high_ms: float
    readings: int

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles over the median."""
        return (self.high_ms - self.low_ms) / 2 / self.median_ms


@dataclass(frozen=True)
class Failed:
    """What went wrong, in one line; no traceback, which would keep tensors alive."""

    reason: str


def attempt(device: str, work: Callable[..., Result], *arguments: object) -> Result | Failed:
    """What `work(*arguments)` returns, or how it failed. Raises DeviceLost if the device can do no more."""
    try:
        return work(*arguments)
    except torch.cuda.OutOfMemoryError:
        failed = Failed("out of memory")
    except Exception as error:  # noqa: BLE001  that is what is reported
        failed = Failed(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}")
    free_memory()
    try:
        torch.ones(1, device=device).add(1).item()
    except Exception as error:
        raise DeviceLost(failed.reason) from error
    return failed


def time_together(jobs: Mapping[str, Job], device: str, repeats: int, budget_s: float) -> dict[str, Timing | Failed]:
    """Every job's timing, or how it failed. A job gets `repeats` readings, fewer (at least two) if they would take
    longer than `budget_s`, and one if a single call is slow.
    """
    readings: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    left: dict[str, int] = {}
    failed: dict[str, Failed] = {}
    for name, job in jobs.items():
        warm = attempt(device, _warm_up, job, device)
        if isinstance(warm, Failed):
            failed[name] = warm
            continue
        slow = warm > LONGEST_CALL_S * 1e3
        reading_ms = CUDA_READING_MS if device.startswith("cuda") else READING_MS
        calls[name] = min(MOST_CALLS, max(1, math.ceil(reading_ms / warm)))
        affordable = max(2, int(budget_s * 1e3 / (warm * calls[name])))
        readings[name], left[name] = ([warm], 0) if slow else ([], min(repeats, affordable))
    for turn in range(repeats):
        for name in [name for name in readings if turn < left[name] and name not in failed]:
            reading = attempt(device, _read, jobs[name], calls[name], device)
            if isinstance(reading, Failed):
                failed[name] = reading
            else:
                readings[name].append(reading)
    return {name: failed.get(name) or _summary(readings[name]) for name in jobs}


def peak_memory(job: Job, device: str) -> int | None:
    """Bytes allocated at the peak of one call beyond what was there before it; None where nobody counts them."""
    kind = device.partition(":")[0]
    if kind == "cuda":
        free_memory()
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with job.around():
            result = job.run()
        synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    return _cpu_peak(job) if kind == "cpu" else None


def geometric_mean(values: list[float]) -> float:
    """NaN for none."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan


def synchronize(device: str) -> None:
    kind = device.partition(":")[0]
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _warm_up(job: Job, device: str) -> float:
    """Milliseconds of one call. The first compiles, allocates and looks for algorithms: its time is nobody's."""
    _read(job, 1, device)
    second_ms = _read(job, 1, device)
    return second_ms if second_ms > LONGEST_CALL_S * 1e3 else max(_read(job, 1, device), 1e-4)


def _read(job: Job, calls: int, device: str) -> float:
    """Milliseconds of one call, the mean over `calls` issued back to back."""
    with job.around():
        synchronize(device)
        if not device.startswith("cuda"):
            start = time.perf_counter()
            for _ in range(calls):
                job.run()
            synchronize(device)
            return (time.perf_counter() - start) * 1e3 / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            begin.record()
            for _ in range(calls):
                job.run()
            end.record()
            end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return elapsed_ms / calls


def _summary(values: list[float]) -> Timing:
    median = statistics.median(values)
    if len(values) < 3:
        return Timing(median, min(values), max(values), len(values))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, low, high, len(values))


def _cpu_peak(job: Job) -> int | None:
    """From the profiler's record of every allocation and release on the CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile, job.around():
        job.run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest if events else None
