"""What all benchmarks share: each declares contests between contestants; they are timed and shown as verify's bench is.

The contestants of a contest take turns on one clock (verify.timing). Their results must agree, lest one of them wins by
computing something else. `--json`, `--markdown` and `--html` write what verify's commands write.
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
ENOUGH_S = 3.0  # of readings of one contestant
# Of the largest number of a result: what rounding makes of it, in many layers even. Wrong attention is off by more.
ROUNDING = {"fp16": 2e-2, "bf16": 1e-1, "fp32": 1e-4}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Contest:
    """What is timed: `jobs` makes the contestants when it is their turn, by name, ours first; of each its jobs by mode,
    which is "forward" for what has no backward.

    dtype: of the results, which are compared up to its rounding; None where there are none to compare
    at_least: what a rival's time over ours must be, by the rival's name
    """

    name: str
    jobs: Callable[[], Mapping[str, Jobs]]
    dtype: torch.dtype | None = None
    at_least: Mapping[str, float] = field(default_factory=dict)


def alone(jobs: Jobs) -> Mapping[str, Jobs]:
    """Contestants of one job each."""
    return {name: {"forward": job} for name, job in jobs.items()}


def on_workload(
    workload: Workload, contestants: Sequence[Contestant], device: str, dtype: torch.dtype, **more: Any
) -> Contest:
    """verify's contestants on one of its workloads, the forward alone and with the backward."""

    def jobs() -> Mapping[str, Jobs]:
        call = workload.call(device, dtype)
        made = {each.name: each.prepare(workload, call) for each in contestants}
        return {name: {"forward": forward_job(it, call), "both": training_job(it, call)} for name, it in made.items()}

    return Contest(workload.name, jobs, dtype, **more)


def one_by_one(device: str, read: Callable[[Job], float] | None = None) -> Clock:
    """The fastest reading of each, within its context from first to last: for what must be set up anew in each.

    read: milliseconds of one call
    """

    def timing(job: Job) -> Timing:
        with job.around():
            ms = read(job) if read else fastest(job.run, device)
        return Timing(ms, ms, ms, 1)

    return lambda jobs: {name: attempt(device, timing, job) for name, job in jobs.items()}


# ---- one run ---------------------------------------------------------------------------------------------------------


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").partition("\n\n")[0])
    made.add_argument("--only", default="", metavar="TEXT", help="those with this in their name")
    made.add_argument("--repeats", type=int, default=7, metavar="N", help="readings of each figure (default 7)")
    add_output_arguments(made)
    return made


def run(
    title: str,
    contests: Iterable[Contest],
    options: argparse.Namespace,
    device: str,
    clock: Clock | None = None,
    weigh: bool = False,
    closing: Callable[[Sequence[Row]], Iterable[str]] = lambda rows: (),
) -> int:
    """Each contest as it comes, then tables and means. The exit code: 1 if something failed, differs or is too slow.

    clock: other than medians of readings that take turns; weigh: peak memory too; closing: lines beside the means
    """
    clock = clock or (lambda jobs: time_together(jobs, device, options.repeats, ENOUGH_S))
    terminal, environment = console(), describe([device])
    announce(environment, terminal)
    chosen = [(each.name, partial(rows_of, each, device, clock, weigh))
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


def rows_of(contest: Contest, device: str, clock: Clock, weigh: bool, step: Step) -> list[Row]:
    free_memory()
    made = attempt(device, contest.jobs)
    if isinstance(made, Failed):
        return [Row(contest.name, "ours", True).but(made)]
    entries: list[Entry] = []
    results: list[Any] = []
    for name, jobs in made.items():
        step(f"{contest.name}: {name}")
        flash_attn_compat.reset_backend_counts()
        results.append(attempt(device, _results, jobs) if contest.dtype else None)
        served_by = ", ".join(flash_attn_compat.backend_counts())
        entries.append(Entry(Row(contest.name, name, not entries, served_by), jobs))
    if contest.dtype and results:
        right, limit = results[-1], ROUNDING[SHORT[contest.dtype]]
        for index, (entry, result) in enumerate(zip(entries, results)):
            if isinstance(result, list) and isinstance(right, list):
                is_alike = bool(right) and len(result) == len(right)
                off = max(map(apart, result, right)) if is_alike else math.inf
                check = Check("result", entries[-1].row.contestant, off, limit, "" if off <= limit else "another")
                entries[index] = replace(entry, row=replace(entry.row, verdict=check))
    results.clear()
    rows = measured(entries, device, clock, weigh)
    slow = [f"{name} takes {ratio:.2f} of our time in {MODES[mode]}, not {least:g}"
            for found in compared(rows) for name, least in contest.at_least.items() for mode in MODES
            if (ratio := found.ratio([name], mode)) and ratio < least]  # fmt: skip
    return [replace(rows[0], failed=True, reason="; ".join(slow)), *rows[1:]] if slow else rows


def _results(jobs: Jobs) -> list[Tensor]:
    found: list[Tensor] = []
    for job in jobs.values():
        with job.around():
            result = job.run()
        parts = result if isinstance(result, (tuple, list)) else (result,)
        found += [part.detach() for part in parts if isinstance(part, Tensor)]
    return found


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, beside the largest number."""
    return float(difference(a, b).max() / b.double().abs().nan_to_num(posinf=0.0).max().clamp(min=1e-30))
