"""What all benchmarks share: a benchmark declares rows, each with its contestants; here they are run, timed and shown.

A row's contestants take turns on one clock (verify.timing). Their results must agree, lest one of them wins by
computing something else. `--json`, `--markdown` and `--html` write what verify's commands write.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import flash_attn_compat
from verify.call import SHORT
from verify.contestants import Contestant
from verify.environment import describe
from verify.judge import difference
from verify.output import add_output_arguments, announce, check_output_arguments, console, deliver
from verify.tables import Report, Table
from verify.timing import Allocations, Failed, Job, Timing, allocations, attempt, fastest, free_memory, time_together
from verify.workloads import Workload

Jobs = Mapping[str, Job]
Timings = Mapping[str, Timing | Failed]
Clock = Callable[[Jobs], Timings]
ENOUGH_S = 3.0  # of readings of one contestant
# Of the largest number of a result: what rounding makes of it, in many layers even. Wrong attention is off by more.
ROUNDING = {"fp16": 2e-2, "bf16": 1e-1, "fp32": 1e-4}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Row:
    """What is timed: `jobs` makes the contestants when it is their turn, by name, ours first.

    group: rows with the same have a mean together; at_least: what a rival's time over ours must be, by the rival's name
    dtype: of the results, which are compared up to its rounding; None where there are none to compare
    """

    name: str
    jobs: Callable[[], Jobs]
    group: str = "forward"
    dtype: torch.dtype | None = None
    at_least: Mapping[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name} {self.group}".strip()


@dataclass(frozen=True)
class Found:
    """What came of a row. wrong: why its figures count for nothing, or why it does not pass."""

    label: str
    group: str
    timings: Timings
    mib: Mapping[str, float]
    served_by: str = ""
    wrong: str = ""

    def ms(self, name: str) -> float | None:
        timing = self.timings.get(name)
        return timing.median_ms if isinstance(timing, Timing) else None

    @property
    def ratios(self) -> dict[str, float]:
        """Each rival's time over ours: above 1 ours is faster."""
        ours, *rivals = self.timings or [""]
        mine = self.ms(ours)
        return {name: theirs / mine for name in rivals if mine and (theirs := self.ms(name))}

    def cells(self) -> list[str]:
        parts = []
        for name, timing in self.timings.items():
            said = timing.reason if isinstance(timing, Failed) else milliseconds(timing.median_ms)
            notes = [f"{ratio:.2f} x ours" for who, ratio in self.ratios.items() if who == name]
            notes += [f"{self.mib[name]:.1f} MiB"] if name in self.mib else []
            parts.append(f"{name} {said}" + (f" ({', '.join(notes)})" if notes else ""))
        return [self.label, ", ".join(parts), self.served_by, f"FAIL: {self.wrong}" if self.wrong else ""]

    def to_json(self) -> dict[str, Any]:
        figures = {name: {**asdict(timing), "mib": self.mib.get(name)} for name, timing in self.timings.items()}
        return {"name": self.label, "served_by": self.served_by, "wrong": self.wrong, "contestants": figures,
                "ratios": self.ratios}  # fmt: skip


def milliseconds(ms: float) -> str:
    return f"{ms * 1e3:.1f} us" if ms < 0.1 else f"{ms:.4g} ms"


# ---- clocks ----------------------------------------------------------------------------------------------------------


def one_by_one(device: str, read: Callable[[Job], float] | None = None) -> Clock:
    """The fastest reading of each, within its context from first to last: for what must be set up anew in each.

    read: milliseconds of one call
    """

    def timing(job: Job) -> Timing:
        with job.around():
            ms = read(job) if read else fastest(job.run, device)
        return Timing(ms, ms, ms, 1)

    return lambda jobs: {name: attempt(device, timing, job) for name, job in jobs.items()}


# ---- contestants on verify's workloads -------------------------------------------------------------------------------


def on_workload(
    workload: Workload, contestants: Sequence[Contestant], device: str, dtype: torch.dtype, backward: bool
) -> Row:
    """A row of verify's contestants on one of its workloads, the forward alone or with the backward."""
    from verify.bench_run import forward_job, training_job

    def jobs() -> Jobs:
        call = workload.call(device, dtype)
        make = training_job if backward else forward_job
        return {each.name: make(each.prepare(workload, call), call) for each in contestants}

    return Row(workload.name, jobs, "forward + backward" if backward else "forward", dtype)


# ---- one run ---------------------------------------------------------------------------------------------------------


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").partition("\n\n")[0])
    made.add_argument("--only", default="", metavar="TEXT", help="rows with this in their name")
    made.add_argument("--repeats", type=int, default=7, metavar="N", help="readings of each figure (default 7)")
    add_output_arguments(made)
    return made


def run(
    title: str,
    rows: Iterable[Row],
    options: argparse.Namespace,
    device: str,
    clock: Clock | None = None,
    weigh: bool = False,
    closing: Callable[[Sequence[Found]], Iterable[str]] | None = None,
) -> int:
    """Each row as it comes, then means. The exit code: 1 if a row is wrong or misses what it must reach.

    clock: other than medians of readings that take turns; weigh: peak memory too; closing: lines beside the means
    """
    check_output_arguments(options)
    clock = clock or (lambda jobs: time_together(jobs, device, options.repeats, ENOUGH_S))
    terminal, environment, found = console(), describe([device]), []
    announce(environment, terminal)
    for row in rows:
        if options.only in row.label:
            found.append(measured(row, device, clock, weigh))
            terminal.print("  ".join(filter(None, found[-1].cells())), soft_wrap=True, markup=False)
            free_memory()
    wrong = [each.label for each in found if each.wrong]
    lines = [*means(found), *(closing(found) if closing else ())]
    lines.append(f"FAIL: {', '.join(wrong)}" if wrong else f"PASS: {len(found)} rows")
    table = Table("Every row", ("", "times", "served by", "verdict"), [each.cells() for each in found], folded=True)
    report = Report(f"benchmarks {title}", environment, [table], lines, not wrong)
    deliver(report, {"rows": [each.to_json() for each in found]}, options, terminal)
    return 1 if wrong else 0


def measured(row: Row, device: str, clock: Clock, weigh: bool) -> Found:
    jobs = attempt(device, row.jobs)
    if isinstance(jobs, Failed):
        return Found(row.label, row.group, {}, {}, wrong="" if jobs.refused else jobs.reason)
    results, mib, served_by = {}, {}, ""
    for name, job in jobs.items():
        flash_attn_compat.reset_backend_counts()
        results[name] = attempt(device, _result, job) if row.dtype else None
        served_by = served_by or ", ".join(flash_attn_compat.backend_counts())
        held = attempt(device, allocations, job.run, device, job.around) if weigh else None
        mib |= {name: held.peak / 2**20} if isinstance(held, Allocations) else {}
    wrong = disagreement(results, row.dtype) if row.dtype else ""
    results.clear()
    found = Found(row.label, row.group, clock(jobs), mib, served_by, wrong)
    failed = [f"{name}: {at.reason}" for name, at in found.timings.items() if isinstance(at, Failed) and not at.refused]
    slow = [f"{name} below {least:g}" for name, least in row.at_least.items() if found.ratios.get(name, 0.0) < least]
    return Found(row.label, row.group, found.timings, mib, served_by, "; ".join(filter(None, [wrong, *failed, *slow])))


def _result(job: Job) -> list[Tensor]:
    with job.around():
        result = job.run()
    return [part.detach() for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, Tensor)]


def disagreement(results: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Whose result is further from the last contestant's than rounding."""
    there = {name: result for name, result in results.items() if isinstance(result, list)}
    *others, last = there or [""]
    wrong = []
    for name in others:
        off = max(apart(*pair) for pair in zip(there[name], there[last]))
        wrong += [f"{name} is {off:.1e} off {last}"] if off > ROUNDING[SHORT[dtype]] else []
    return "; ".join(wrong)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, beside the largest number."""
    return float(difference(a, b).max() / b.double().abs().nan_to_num(posinf=0.0).max().clamp(min=1e-30))


def means(found: Sequence[Found]) -> Iterator[str]:
    """Geometric means of each rival's time over ours, by group."""
    for group in dict.fromkeys(each.group for each in found):
        ratios: dict[str, list[float]] = {}
        for each in found:
            for name, ratio in each.ratios.items() if each.group == group and not each.wrong else ():
                ratios.setdefault(name, []).append(ratio)
        for name, of in ratios.items():
            mean = statistics.geometric_mean(of)
            words = f"{name} takes {mean:.3f} of our time (geometric mean of {len(of)}), worst {min(of):.3f}"
            yield f"{group}: {words}" if group else words
