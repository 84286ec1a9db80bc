"""Shared by all benchmarks: times contests between contestants and prints them as verify's bench does.

The contestants of a contest take turns on one clock (verify.timing). Their results must agree: a contestant must not
win by computing something else. `--json`, `--markdown` and `--html` write the files of verify's commands.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flash_attn_compat
from verify.bench import Step, conclude, gathered
from verify.bench_report import MODES, compared
from verify.bench_run import Entry, Jobs, Row, Timings, forward_job, measured, training_job
from verify.call import SHORT
from verify.contestants import Contestant
from verify.environment import describe
from verify.errors import UsageError
from verify.judge import Check, difference
from verify.output import add_output_arguments, announce, console
from verify.timing import Failed, Job, Timing, attempt, fastest, free_memory, time_together
from verify.workloads import Workload

Clock = Callable[[Jobs], Timings]
ENOUGH_S = 3.0  # seconds of readings of one contestant
# The largest difference, relative to the largest number, that rounding makes, even over many layers. Wrong attention
# differs by more.
ROUNDING = {"fp16": 2e-2, "bf16": 1e-1, "fp32": 1e-4}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Contest:
    """Contestants that do the same work.

    jobs: returns the jobs to time by contestant (ours first) and mode: "forward", and "both" if there is a backward
    dtype: of the results, which must agree up to rounding in it; None if results are not compared
    at_least: for rivals, the least allowed ratio of the rival's time to ours
    """

    name: str
    jobs: Callable[[], Mapping[str, Jobs]]
    dtype: torch.dtype | None = None
    at_least: Mapping[str, float] = field(default_factory=dict)


def forward_only(jobs: Jobs) -> Mapping[str, Jobs]:
    """Return contestants with one job each, which is timed as "forward"."""
    return {name: {"forward": job} for name, job in jobs.items()}


def make_contest(
    workload: Workload, contestants: Sequence[Contestant], device: str, dtype: torch.dtype, **more: Any
) -> Contest:
    """Return a contest of verify's contestants on one of its workloads: the forward, and both with the backward."""

    def jobs() -> Mapping[str, Jobs]:
        call = workload.call(device, dtype)
        prepared = {each.name: each.prepare(workload, call) for each in contestants}
        return {
            name: {"forward": forward_job(it, call), "both": training_job(it, call)} for name, it in prepared.items()
        }

    return Contest(workload.name, jobs, dtype, **more)


def time_one_by_one(device: str, read: Callable[[Job], float] | None = None) -> Clock:
    """Return a clock that times one contestant after another, in the job's context, and keeps the fastest reading.

    read: measures the milliseconds of one call; by default verify's ``fastest``
    """

    def timing(job: Job) -> Timing:
        with job.around():
            ms = read(job) if read else fastest(job.run, device)
        return Timing(ms, ms, ms, 1)

    return lambda jobs: {name: attempt(device, timing, job) for name, job in jobs.items()}


# ---- one run ---------------------------------------------------------------------------------------------------------


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(doc or "").partition("\n\n")[0]
    )
    arguments.add_argument("--only", default="", metavar="TEXT", help="run contests with this text in their name")
    arguments.add_argument("--repeats", type=int, default=7, metavar="N", help="readings of each figure (default 7)")
    add_output_arguments(arguments)
    return arguments


def run(
    title: str,
    contests: Iterable[Contest],
    options: argparse.Namespace,
    device: str,
    clock: Clock | None = None,
    weigh: bool = False,
    closing: Callable[[Sequence[Row]], Iterable[str]] = lambda rows: (),
) -> int:
    """Run the contests and print tables and means. Returns the exit code: 1 if one failed, differs or is too slow.

    clock: by default contestants take turns, medians count; weigh: measure peak memory; closing: lines after the means
    """
    clock = clock or (lambda jobs: time_together(jobs, device, options.repeats, ENOUGH_S))
    terminal, environment = console(), describe([device])
    announce(environment, terminal)
    chosen = [(each.name, partial(make_rows, each, device, clock, weigh))
              for each in contests if options.only in each.name]  # fmt: skip
    rows, lost = gathered(chosen, terminal)
    rivals = [*dict.fromkeys(row.contestant for row in rows if not row.ours)]
    yardsticks = {name: [name] for name in rivals} if len(rivals) < 4 else {"the fastest other": rivals}
    name = f"benchmarks {title}"
    try:
        return conclude(name, environment, rows, lost, options, None, yardsticks, [*closing(rows)])
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def make_rows(contest: Contest, device: str, clock: Clock, weigh: bool, step: Step) -> list[Row]:
    """Compare and time the contestants of one contest; return a row for each. step: prints the progress"""
    free_memory()
    contestants = attempt(device, contest.jobs)
    if isinstance(contestants, Failed):
        return [Row(contest.name, "ours", True).but(contestants)]
    entries: list[Entry] = []
    results: list[Any] = []
    for name, jobs in contestants.items():
        step(f"{contest.name}: {name}")
        flash_attn_compat.reset_backend_counts()
        results.append(attempt(device, _collect_results, jobs) if contest.dtype else None)
        served_by = ", ".join(flash_attn_compat.backend_counts())
        entries.append(Entry(Row(contest.name, name, not entries, served_by), jobs))
    if contest.dtype and results:
        right, limit = results[-1], ROUNDING[SHORT[contest.dtype]]
        for index, (entry, result) in enumerate(zip(entries, results)):
            if isinstance(result, list) and isinstance(right, list):
                is_alike = bool(right) and len(result) == len(right)
                off = max(map(relative_difference, result, right)) if is_alike else math.inf
                check = Check("result", entries[-1].row.contestant, off, limit, "" if off <= limit else "another")
                entries[index] = replace(entry, row=replace(entry.row, verdict=check))
    results.clear()
    rows = measured(entries, device, clock, weigh)
    slow = [f"{name} takes {ratio:.2f} of our time in {MODES[mode]}, not {least:g}"
            for each in compared(rows) for name, least in contest.at_least.items() for mode in MODES
            if (ratio := each.ratio([name], mode)) and ratio < least]  # fmt: skip
    return [replace(rows[0], failed=True, reason="; ".join(slow)), *rows[1:]] if slow else rows


def _collect_results(jobs: Jobs) -> list[Tensor]:
    results: list[Tensor] = []
    for job in jobs.values():
        with job.around():
            result = job.run()
        parts = result if isinstance(result, (tuple, list)) else (result,)
        results += [part.detach() for part in parts if isinstance(part, Tensor)]
    return results


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference divided by the largest number of ``b``."""
    return float(difference(a, b).max() / b.double().abs().nan_to_num(posinf=0.0).max().clamp(min=1e-30))
