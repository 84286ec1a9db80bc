"""Check and time every contestant of verify or benchmarks/, and measure its memory. A failure does not stop others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from flash_attn_compat.gpu_state import Monitor

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
    """The result of one contestant on one workload. reason: why figures are missing

    clock_mhz, power_w: medians of the GPU's clock and power while the workload was timed, None if unknown. Contestants
    take turns, so these are the same for all contestants of the workload.
    """

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
    clock_mhz: float | None = None
    power_w: float | None = None

    @property
    def wrong(self) -> bool:
        return self.failed or (self.verdict is not None and not self.verdict.ok)

    @property
    def declined(self) -> bool:
        """Whether there is no answer, no time and no failure."""
        return self.verdict is None and self.forward is None and not self.failed

    @property
    def doubtful(self) -> bool:
        """Whether the forward took longer than forward + backward: another program uses the machine."""
        return bool(self.forward and self.both and self.forward.median_ms > self.both.median_ms)

    def milliseconds(self, mode: str) -> float | None:
        """Return the median time. mode: "forward", or "both" for forward and backward"""
        timing: Timing | None = getattr(self, mode)
        return None if timing is None else timing.median_ms

    def mebibytes(self, mode: str) -> float | None:
        return self.memory_mib if mode == "forward" else self.both_memory_mib

    def but(self, failed: Failed) -> Row:
        """Return the row with a failure instead of figures."""
        return replace(self, reason=failed.reason, failed=not failed.refused)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict and self.verdict.to_json()}


@dataclass(frozen=True)
class Plan:
    """The contestants, workloads and settings of a run.

    graphs: also time calls without gradients in a CUDA graph
    only_served: leave out a workload that our first contestant declines
    """

    workloads: Sequence[Workload]
    contestants: Sequence[Contestant]
    device: str
    dtype: torch.dtype
    repeats: int = 7
    budget_s: float = 2.0
    backward: bool = True
    graphs: bool = False
    seed: int = 0
    only_served: bool = False


@dataclass(frozen=True)
class Entry:
    """A contestant's unfinished row, and its jobs to time, by "forward" and "both".

    held_mib: MiB of masks and indices that the contestant prepared before; they count in its peak memory
    """

    row: Row
    jobs: Mapping[str, Job] = field(default_factory=dict)
    held_mib: float = 0.0


def measured(entries: Sequence[Entry], device: str, clock: Callable[[Jobs], Timings], weigh: bool = True) -> list[Row]:
    """Return the rows with times and, if ``weigh``, peak memory. Entries take turns, one mode after the other."""
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
    """Return the rows of one workload of the plan; `step` gets the name of each step. Raises DeviceLost"""
    free_memory()
    entries = [*_entries(workload, plan, step)]
    step(f"{workload.name}: timing")
    monitor = Monitor(torch.device(plan.device))

    def clock(jobs: Jobs) -> Timings:
        return time_together(jobs, plan.device, plan.repeats, plan.budget_s, after=monitor.read)

    rows = measured(entries, plan.device, clock)
    state = monitor.median()
    return [replace(row, clock_mhz=state.clock_mhz, power_w=state.power_w) for row in rows] if state else rows


def _entries(workload: Workload, plan: Plan, step: Callable[[str], None]) -> Iterator[Entry]:
    """Yield an entry for each contestant, after a check of its answer."""
    step(f"{workload.name}: tensors")
    given = attempt(plan.device, workload.call, plan.device, plan.dtype, plan.seed)
    pieces = given if isinstance(given, Failed) else attempt(plan.device, spot_check.pieces, given)
    if isinstance(pieces, Failed):
        yield from (Entry(Row(workload.name, each.name, each.ours).but(pieces)) for each in plan.contestants)
        return
    assert isinstance(given, Call)
    # Check with gradients first. If that fails, mostly for lack of memory, the forward alone may still work.
    ways = (True, False) if plan.backward and not workload.decode else (False,)
    for contestant in plan.contestants:
        step(f"{workload.name}: checking {contestant.name}")
        entry = _checked(contestant, workload, plan, given, pieces, ways)
        yield entry
        if plan.only_served and contestant.ours and entry.row.declined:
            return


def _checked(
    contestant: Contestant,
    workload: Workload,
    plan: Plan,
    given: Call,
    pieces: Sequence[spot_check.Piece],
    ways: Sequence[bool],
) -> Entry:
    """Return the contestant's checked row and its jobs. ways: with gradients or without; the first that works counts"""
    row = Row(workload.name, contestant.name, contestant.ours)
    pair = attempt(plan.device, _prepared, contestant, workload, given)
    if isinstance(pair, Failed):
        return Entry(row.but(pair))
    prepared, judged = pair
    for gradients in ways:
        verdict = attempt(plan.device, spot_check.check, judged, given, pieces, gradients)
        if isinstance(verdict, Failed):
            row = row.but(verdict)
            continue
        jobs = {"forward": forward_job(prepared, given)}
        jobs |= {"both": training_job(prepared, given)} if gradients else {}
        checked = replace(row, served_by=prepared.served_by, verdict=verdict)
        return Entry(checked, jobs, prepared.prepared_bytes / MIB)
    return Entry(row)


def _prepared(contestant: Contestant, workload: Workload, given: Call) -> tuple[Prepared, Prepared]:
    """Return the call to time and the call to check. The checked call has no dropout, whose answer is random."""
    timed = contestant.prepare(workload, given)
    if not workload.dropout_p:
        return timed, timed
    undropped = replace(given, args={**given.args, "dropout_p": 0.0})
    return timed, contestant.prepare(replace(workload, dropout_p=0.0), undropped)


def forward_job(prepared: Prepared, given: Call) -> Job:
    """Return a job of one call without gradients."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return prepared.run(*given.qkv)

    return Job(forward, prepared.around)


def training_job(prepared: Prepared, given: Call) -> Job:
    """Return a job of one call and its backward."""
    leaves = [tensor.detach().requires_grad_() for tensor in given.qkv]
    return Job(lambda: torch.autograd.grad(prepared.run(*leaves), leaves, given.dout), prepared.around)
