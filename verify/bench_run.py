"""One workload after the other: every contestant checked, weighed and timed, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from . import spot_check
from .call import Call
from .contestants import Contestant, Prepared
from .judge import Check
from .timing import Allocations, Failed, Job, Timing, allocations, attempt, free_memory, time_together
from .workloads import Workload

MIB = 2**20


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


def run(plan: Plan, step: Callable[[str], None] = lambda what: None) -> Iterator[list[Row]]:
    """The rows of each workload as soon as they are there; `step` hears what is being done. Raises DeviceLost."""
    for workload in plan.workloads:
        free_memory()
        yield _rows(workload, plan, step)


def _rows(workload: Workload, plan: Plan, step: Callable[[str], None]) -> list[Row]:
    rows = {each.name: Row(workload.name, each.name, each.ours) for each in plan.contestants}
    able: dict[bool, dict[str, Prepared]] = {False: {}, True: {}}  # with gradients or without: who can do it
    step(f"{workload.name}: tensors")
    given = attempt(plan.device, workload.call, plan.device, plan.dtype, plan.seed)
    pieces = given if isinstance(given, Failed) else attempt(plan.device, spot_check.pieces, given)
    if isinstance(pieces, Failed):
        return [row.but(pieces) for row in rows.values()]
    assert isinstance(given, Call)
    # The call with gradients is what is checked. Where it fails, of memory mostly, the forward may still be possible.
    ways = (True, False) if plan.backward and not workload.decode else (False,)
    for contestant in plan.contestants:
        name = contestant.name
        step(f"{workload.name}: checking {name}")
        pair = attempt(plan.device, _prepared, contestant, workload, given)
        if isinstance(pair, Failed):
            rows[name] = rows[name].but(pair)
            continue
        prepared, judged = pair
        for gradients in ways:
            verdict = attempt(plan.device, spot_check.check, judged, given, pieces, gradients)
            if isinstance(verdict, Failed):
                rows[name] = rows[name].but(verdict)
                continue
            rows[name] = replace(rows[name], served_by=prepared.served_by, verdict=verdict)
            able[False][name] = prepared
            able[True] |= {name: prepared} if gradients else {}
            break

    for gradients, timing, memory in ((False, "forward", "memory_mib"), (True, "both", "both_memory_mib")):
        step(f"{workload.name}: {timing}")
        make = training_job if gradients else forward_job
        jobs = {name: make(prepared, given) for name, prepared in able[gradients].items()}
        for name, job in jobs.items():
            held = attempt(plan.device, allocations, job.run, plan.device, job.around)
            if isinstance(held, Allocations):
                most: dict[str, Any] = {memory: (held.peak + able[gradients][name].prepared_bytes) / MIB}
                rows[name] = replace(rows[name], **most)
        for name, found in time_together(jobs, plan.device, plan.repeats, plan.budget_s).items():
            timed: dict[str, Any] = {timing: found}
            rows[name] = rows[name].but(found) if isinstance(found, Failed) else replace(rows[name], **timed)
    return list(rows.values())


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
