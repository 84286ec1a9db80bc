"""Every contestant checked, weighed and timed, whatever happens to one of them: verify's and those of benchmarks/."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from . import spot_check
from .call import Call
from .contestants import Contestant, Prepared
from .judge import Check
from .timing import Allocations, Failed, Job, Timing, allocations, attempt, free_memory, time_together
from .workloads import Workload

MIB = 2**20
Jobs = Mapping[str, Job]
Timings = Mapping[str, Timing | Failed]


@dataclass(frozen=True)
class Row:
    """One contestant on one workload. reason: why there are no figures, or not all."""

    workload: str
    contestant: str
    ours: bool
    served_by: str = ""
    forward: Timing | None = None
    both: Timing | None = None
    memory_mib: float | None = None
    both_memory_mib: float | None = None
    verdict: Check | None = None
    reason: str = ""
    failed: bool = False

    @property
    def wrong(self) -> bool:
        return self.failed or (self.verdict is not None and not self.verdict.ok)

    @property
    def doubtful(self) -> bool:
        """Whether the forward alone took longer than with its backward: something else uses the machine."""
        return bool(self.forward and self.both and self.forward.median_ms > self.both.median_ms)

    def milliseconds(self, mode: str) -> float | None:
        """mode: forward or both."""
        timing: Timing | None = getattr(self, mode)
        return None if timing is None else timing.median_ms

    def mebibytes(self, mode: str) -> float | None:
        return self.memory_mib if mode == "forward" else self.both_memory_mib

    def but(self, failed: Failed) -> Row:
        """With what went wrong in it."""
        return replace(self, reason=failed.reason, failed=not failed.refused)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict and self.verdict.to_json()}


@dataclass(frozen=True)
class Plan:
    """What to time. graphs: whether calls without gradients are timed in a CUDA graph as well."""

    workloads: Sequence[Workload]
    contestants: Sequence[Contestant]
    device: str
    dtype: torch.dtype
    repeats: int = 7
    budget_s: float = 2.0
    backward: bool = True
    graphs: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Entry:
    """A contestant's row as far as it is known, and what is to be timed of it: jobs by "forward" and "both".

    held_mib: what was prepared beforehand, which counts as its memory
    """

    row: Row
    jobs: Mapping[str, Job] = field(default_factory=dict)
    held_mib: float = 0.0


def measured(entries: Sequence[Entry], device: str, clock: Callable[[Jobs], Timings], weigh: bool = True) -> list[Row]:
    """The rows with times and, where asked, peak memory. The entries take turns, in one mode after the other."""
    rows = {entry.row.contestant: entry.row for entry in entries}
    for mode, memory in (("forward", "memory_mib"), ("both", "both_memory_mib")):
        jobs = {entry.row.contestant: entry.jobs[mode] for entry in entries if mode in entry.jobs}
        for entry in entries if weigh else ():
            name = entry.row.contestant
            held = attempt(device, allocations, jobs[name].run, device, jobs[name].around) if name in jobs else None
            if isinstance(held, Allocations):
                most: dict[str, Any] = {memory: held.peak / MIB + entry.held_mib}
                rows[name] = replace(rows[name], **most)
        for name, found in clock(jobs).items():
            timed: dict[str, Any] = {mode: found}
            rows[name] = rows[name].but(found) if isinstance(found, Failed) else replace(rows[name], **timed)
    return list(rows.values())


def run(plan: Plan, workload: Workload, step: Callable[[str], None] = lambda what: None) -> list[Row]:
    """The rows of one of its workloads; `step` hears what is being done. Raises DeviceLost."""
    free_memory()
    entries = [*_entries(workload, plan, step)]
    step(f"{workload.name}: timing")
    return measured(entries, plan.device, lambda jobs: time_together(jobs, plan.device, plan.repeats, plan.budget_s))


def _entries(workload: Workload, plan: Plan, step: Callable[[str], None]) -> Iterator[Entry]:
    """Every contestant, checked."""
    step(f"{workload.name}: tensors")
    given = attempt(plan.device, workload.call, plan.device, plan.dtype, plan.seed)
    pieces = given if isinstance(given, Failed) else attempt(plan.device, spot_check.pieces, given)
    if isinstance(pieces, Failed):
        yield from (Entry(Row(workload.name, each.name, each.ours).but(pieces)) for each in plan.contestants)
        return
    assert isinstance(given, Call)
    # The call with gradients is what is checked. Where it fails, of memory mostly, the forward may still be possible.
    ways = (True, False) if plan.backward and not workload.decode else (False,)
    for contestant in plan.contestants:
        row = Row(workload.name, contestant.name, contestant.ours)
        step(f"{workload.name}: checking {contestant.name}")
        pair = attempt(plan.device, _prepared, contestant, workload, given)
        if isinstance(pair, Failed):
            yield Entry(row.but(pair))
            continue
        prepared, judged = pair
        for gradients in ways:
            verdict = attempt(plan.device, spot_check.check, judged, given, pieces, gradients)
            if isinstance(verdict, Failed):
                row = row.but(verdict)
                continue
            jobs = {"forward": forward_job(prepared, given)}
            jobs |= {"both": training_job(prepared, given)} if gradients else {}
            checked = replace(row, served_by=prepared.served_by, verdict=verdict)
            yield Entry(checked, jobs, prepared.prepared_bytes / MIB)
            break
        else:
            yield Entry(row)


def _prepared(contestant: Contestant, workload: Workload, given: Call) -> tuple[Prepared, Prepared]:
    """As it is timed, and as it is checked: a call with dropout without it, for which there is one right answer."""
    timed = contestant.prepare(workload, given)
    if not workload.dropout_p:
        return timed, timed
    undropped = replace(given, args={**given.args, "dropout_p": 0.0})
    return timed, contestant.prepare(replace(workload, dropout_p=0.0), undropped)


def forward_job(prepared: Prepared, given: Call) -> Job:
    """One call without gradients."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return prepared.run(*given.qkv)

    return Job(forward, prepared.around)


def training_job(prepared: Prepared, given: Call) -> Job:
    """One call and its gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in given.qkv]
    return Job(lambda: torch.autograd.grad(prepared.run(*leaves), leaves, given.dout), prepared.around)
