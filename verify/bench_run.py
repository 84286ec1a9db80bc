"""One workload after the other: every contestant checked, weighed and timed, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from verify import spot_check
from verify.call import Call
from verify.contestants import Contestant, Prepared, Unavailable
from verify.judge import Check
from verify.timing import Allocations, Failed, Job, Timing, allocations, attempt, free_memory, time_together
from verify.workloads import Workload

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One contestant on one workload. `reason` says why there are no figures, or not all of them.

    graph: the forward replayed from a CUDA graph; graph_reason: why there is none; graph_wrong: it was another answer
    """

    workload: str
    contestant: str
    ours: bool
    served_by: str = ""
    forward: Timing | None = None
    both: Timing | None = None
    memory_mib: float | None = None
    verdict: Check | None = None
    reason: str = ""
    failed: bool = False
    not_supported: bool = False
    graph: Timing | None = None
    graph_reason: str = ""
    graph_wrong: bool = False
    both_memory_mib: float | None = None

    @property
    def wrong(self) -> bool:
        return self.failed or (self.verdict is not None and not self.verdict.ok)

    def milliseconds(self, mode: str) -> float | None:
        """mode: forward, both or graph."""
        timing: Timing | None = getattr(self, mode)
        return None if timing is None else timing.median_ms

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
    facts: dict[str, dict[str, Any]] = {each.name: {"ours": each.ours} for each in plan.contestants}
    prepared: dict[str, Prepared] = {}
    backward = plan.backward and not workload.decode
    step(f"{workload.name}: tensors")
    given = attempt(plan.device, workload.call, plan.device, plan.dtype, plan.seed)
    right = given if isinstance(given, Failed) else attempt(plan.device, spot_check.truths, workload, given)
    if isinstance(given, Failed) or isinstance(right, Failed):
        reason = right.reason if isinstance(right, Failed) else ""
        return [Row(workload.name, name, **each, reason=reason, failed=True) for name, each in facts.items()]
    for contestant in plan.contestants:
        step(f"{workload.name}: checking {contestant.name}")
        fact = facts[contestant.name]
        found = attempt(plan.device, prepare, contestant, workload, given)
        if isinstance(found, str):
            fact |= {"reason": found, "not_supported": True}
            continue
        if isinstance(found, Failed):
            fact |= {"reason": found.reason, "failed": True}
            continue
        fact["served_by"] = found.served_by
        # Where the backward fails, of memory mostly, the forward may still be possible.
        for gradients in (True, False) if backward and not found.no_backward else (False,):
            verdict = attempt(plan.device, spot_check.check, found, workload, given, right, gradients)
            if isinstance(verdict, Check):
                fact["verdict"], prepared[contestant.name] = verdict, found
                break
            fact |= {"reason": verdict.reason, "failed": True}

    def measure(jobs: Mapping[str, Job], timing: str, memory: str) -> None:
        step(f"{workload.name}: {timing}")
        for name, job in jobs.items():
            held = attempt(plan.device, allocations, job.run, plan.device, job.around)
            if isinstance(held, Allocations):
                facts[name][memory] = (held.peak + prepared[name].prepared_bytes) / MIB
        for name, found in time_together(jobs, plan.device, plan.repeats, plan.budget_s).items():
            facts[name] |= {"reason": found.reason, "failed": True} if isinstance(found, Failed) else {timing: found}

    measure({name: forward_job(each, given) for name, each in prepared.items()}, "forward", "memory_mib")
    if backward:
        able = {name: each for name, each in prepared.items() if not each.no_backward and not facts[name].get("failed")}
        measure({name: training_job(each, given) for name, each in able.items()}, "both", "both_memory_mib")
        for name, each in prepared.items():
            if each.no_backward:
                facts[name].setdefault("reason", f"no backward: {each.no_backward}")
    return [Row(workload.name, name, **values) for name, values in facts.items()]


def prepare(contestant: Contestant, workload: Workload, given: Call) -> Prepared | str:
    """Or why this contestant does not take part."""
    try:
        return contestant.prepare(workload, given)
    except Unavailable as reason:
        return str(reason).partition("\n")[0]


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
