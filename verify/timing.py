"""Measure time and memory of any calls: contestants take turns; medians with their spread; peak memory.

The contestants of one workload take turns, so a machine that slows down slows down all of them.
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

from .errors import NotSupported

Result = TypeVar("Result")
Clock = Callable[[], float]  # returns seconds

# A reading times so many calls that it takes at least this long: the launch of the first call then counts little.
CUDA_READING_MS, READING_MS = 8.0, 4.0
MOST_CALLS = 100
# Readings that do not count: they compile, allocate and choose algorithms. The last decides the calls of a reading.
WARM_UPS = 3


class DeviceLost(Exception):
    """A kernel has broken the CUDA context of this process, which can measure nothing more."""


@dataclass(frozen=True)
class Job:
    """A call to time, and a context in which it runs, whose entry is not timed."""

    run: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median of the readings, and their quartiles."""

    median_ms: float
    low_ms: float
    high_ms: float
    readings: int

    @classmethod
    def of(cls, readings: list[float]) -> Timing:
        low, median, high = statistics.quantiles(readings * 2, n=4, method="inclusive")
        return cls(median, low, high, len(readings))

    def __str__(self) -> str:
        """Format the median ± half the distance of the quartiles."""
        return f"{self.median_ms:.4g} ±{(self.high_ms - self.low_ms) / 2 / self.median_ms:.0%}"


@dataclass(frozen=True)
class Failed:
    """An error in one line: its traceback would keep tensors alive. refused: declined, which is no mistake"""

    reason: str
    refused: bool = False


def attempt(device: str, work: Callable[..., Result], *arguments: object) -> Result | Failed:
    """Return the result of `work(*arguments)`, or its error as Failed. Raises DeviceLost if the GPU is lost"""
    try:
        return work(*arguments)
    except NotSupported as refusal:
        return Failed(str(refusal).partition("\n")[0], refused=True)
    except torch.cuda.OutOfMemoryError:
        failed = Failed("out of memory")
    except Exception as error:  # noqa: BLE001  the caller reports it
        failed = Failed(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}")
    free_memory()
    try:
        torch.ones(1, device=device).add(1).item()
    except Exception as error:
        raise DeviceLost(failed.reason) from error
    return failed


def time_together(
    jobs: Mapping[str, Job], device: str, repeats: int, budget_s: float, clock: Clock = time.perf_counter,
    after: Callable[[], object] = lambda: None,
) -> dict[str, Timing | Failed]:  # fmt: skip
    """Return each job's timing or failure: `repeats` readings, fewer if a job takes longer than `budget_s`.

    Jobs take turns, a reading each. after: called after each reading that counts
    """
    reading_ms = CUDA_READING_MS if device.startswith("cuda") else READING_MS
    calls = dict.fromkeys(jobs, 1)
    readings: dict[str, list[float]] = {name: [] for name in jobs}
    failed: dict[str, Timing | Failed] = {}
    for turn in range(WARM_UPS + repeats):
        for name in [name for name in jobs if name not in failed]:
            if sum(readings[name][WARM_UPS:]) * calls[name] > budget_s * 1e3:
                continue
            found = attempt(device, reading, jobs[name], calls[name], device, clock)
            if isinstance(found, Failed):
                failed[name] = found
                continue
            readings[name].append(found)
            if turn >= WARM_UPS:
                after()
            if turn == WARM_UPS - 1:
                calls[name] = min(MOST_CALLS, max(1, math.ceil(reading_ms / max(found, 1e-4))))
    return {name: failed.get(name) or Timing.of(readings[name][WARM_UPS:]) for name in jobs}


def fastest(
    run: Callable[[], object], device: str = "cuda", readings: int = 5, calls: int = 4,
    clock: Clock = time.perf_counter,
) -> float:  # fmt: skip
    """Return the milliseconds of one call in the fastest of some readings, after an untimed reading."""
    run()
    return min(reading(Job(run), calls, device, clock) for _ in range(readings))


def reading(job: Job, calls: int, device: str, clock: Clock = time.perf_counter) -> float:
    """Return the milliseconds of one call, the mean over `calls` without pause; on a GPU measured by CUDA events."""
    with job.around():
        synchronize(device)
        if not device.startswith("cuda"):
            start = clock()
            for _ in range(calls):
                job.run()
            synchronize(device)
            return (clock() - start) * 1e3 / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            begin.record()
            for _ in range(calls):
                job.run()
            end.record()
            end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return elapsed_ms / calls


def synchronize(device: str) -> None:
    kind = device.partition(":")[0]
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allocations:
    """Bytes that a call allocated, results and scratch memory of kernels included. peak: the most at one time, beyond
    the memory allocated before; largest: the largest single allocation, if known.
    """

    peak: int
    largest: int


def allocations(
    run: Callable[[], object], device: str = "cpu", around: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Allocations | None:
    """Measure a call's memory; None on devices that do not count it. On a CPU, PyTorch's profiler records each
    allocation and release. The process's resident memory would also count memory that the C library keeps for later.
    """
    if device.startswith("cuda"):
        free_memory()
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with around():
            result = run()
        synchronize(device)
        del result
        peak = torch.cuda.max_memory_allocated(device) - before
        return Allocations(peak, peak)
    if device != "cpu":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile, around():
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    held = peak = 0
    for size in sizes:
        held += size
        peak = max(peak, held)
    return Allocations(peak, max(sizes, default=0)) if sizes else None
