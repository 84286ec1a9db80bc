"""One workload after the other: every contestant checked, weighed and timed, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from verify import spot_check
from verify.call import Call
from verify.contestants import Contestant, Prepared, Unavailable
from verify.judge import Check
from verify.timing import Failed, Job, Timing, attempt, free_memory, peak_memory, time_together
from verify.workloads import Workload, make_call

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

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict and self.verdict.to_json()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Row:
        """Raises KeyError, TypeError or ValueError for what is no row."""
        values = {field.name: saved[field.name] for field in fields(cls) if field.name in saved}
        for name in ("forward", "both", "graph"):
            values[name] = Timing(**saved[name]) if saved.get(name) else None
        if verdict := saved.get("verdict"):
            # Earlier versions saved the ratio alone.
            ratio = verdict.get("ratio")
            before = {"against": "fp64", "error": "inf" if ratio is None else ratio, "bound": 1.0}
            values["verdict"] = Check.from_json({**before, **verdict})
        return cls(**values)


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

    def fails(name: str, failed: Failed) -> None:
        facts[name] |= {"reason": failed.reason, "failed": True}

    step(f"{workload.name}: tensors")
    given = attempt(plan.device, make_call, workload, plan.device, plan.dtype, plan.seed)
    right = given if isinstance(given, Failed) else attempt(plan.device, spot_check.truths, workload, given)
    if isinstance(given, Failed) or isinstance(right, Failed):
        reason = right.reason if isinstance(right, Failed) else ""
        return [Row(workload.name, name, **each, reason=reason, failed=True) for name, each in facts.items()]
    backward = plan.backward and not workload.decode
    for contestant in plan.contestants:
        name = contestant.name
        step(f"{workload.name}: checking {name}")
        found = attempt(plan.device, prepare, contestant, workload, given)
        if isinstance(found, Failed):
            fails(name, found)
            continue
        if isinstance(found, str):
            facts[name] |= {"reason": found, "not_supported": True}
            continue
        facts[name]["served_by"] = found.served_by
        asked = found, workload, given, right
        verdict = attempt(plan.device, spot_check.check, *asked, backward)
        if isinstance(verdict, Failed):
            fails(name, verdict)
            if not backward or found.no_backward:
                continue
            # The forward may still be possible: most failures are backward passes out of memory.
            verdict = attempt(plan.device, spot_check.check, *asked, False)
        if not isinstance(verdict, Failed):
            facts[name]["verdict"] = verdict
            prepared[name] = found

    def measure(jobs: Mapping[str, Job], timing: str, memory: str) -> None:
        for name, job in jobs.items():
            step(f"{workload.name}: memory of {name}, {timing}")
            peak = attempt(plan.device, peak_memory, job, plan.device)
            if isinstance(peak, int):
                facts[name][memory] = (peak + prepared[name].prepared_bytes) / MIB
        step(f"{workload.name}: {timing}")
        for name, found in time_together(jobs, plan.device, plan.repeats, plan.budget_s).items():
            if isinstance(found, Failed):
                fails(name, found)
            else:
                facts[name][timing] = found

    measure({name: forward_job(each, given) for name, each in prepared.items()}, "forward", "memory_mib")
    if backward:
        able = {name: each for name, each in prepared.items() if not each.no_backward and not facts[name].get("failed")}
        measure({name: _both_job(each, given) for name, each in able.items()}, "both", "both_memory_mib")
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


def _both_job(prepared: Prepared, given: Call) -> Job:
    leaves = [tensor.detach().requires_grad_() for tensor in given.qkv]
    return Job(lambda: torch.autograd.grad(prepared.run(*leaves), leaves, given.dout), prepared.around)
