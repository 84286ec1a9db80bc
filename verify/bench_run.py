"""One workload after the other: every contestant checked, weighed and timed, whatever happens to one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from verify import spot_check
from verify.contestants import RIVALS, Contestant, Ours, Prepared, Unavailable
from verify.spot_check import Verdict
from verify.timing import Failed, Job, Timing, attempt, free_memory, host_microseconds, peak_memory, time_together
from verify.workloads import Inputs, Workload, make_inputs

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
    verdict: Verdict | None = None
    reason: str = ""
    failed: bool = False
    not_supported: bool = False
    graph: Timing | None = None
    graph_reason: str = ""
    graph_wrong: bool = False
    both_memory_mib: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.workload, self.contestant

    @property
    def wrong(self) -> bool:
        return self.failed or (self.verdict is not None and not self.verdict.ok)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        if self.verdict is not None:
            finite = math.isfinite(self.verdict.ratio)
            values["verdict"] |= {"ok": self.verdict.ok, "ratio": self.verdict.ratio if finite else None}
        return values


@dataclass(frozen=True)
class Plan:
    workloads: Sequence[Workload]
    contestants: Sequence[Contestant]
    device: str
    dtype: torch.dtype
    repeats: int = 7
    budget_s: float = 2.0
    backward: bool = True
    # Whether calls without gradients are timed in a CUDA graph as well.
    graphs: bool = False


def run(plan: Plan, step: Callable[[str], None] = lambda what: None) -> Iterator[list[Row]]:
    """The rows of each workload as soon as they are there; `step` hears what is being done. Raises DeviceLost."""
    for workload in plan.workloads:
        free_memory()
        yield _rows(workload, plan, step)


def _rows(workload: Workload, plan: Plan, step: Callable[[str], None]) -> list[Row]:
    step(f"{workload.name}: tensors")
    inputs = attempt(plan.device, make_inputs, workload, plan.device, plan.dtype)
    if isinstance(inputs, Failed):
        return [
            Row(workload.name, each.name, each.ours, reason=inputs.reason, failed=True) for each in plan.contestants
        ]

    backward = plan.backward and not workload.decode
    facts: dict[str, dict[str, Any]] = {each.name: {"ours": each.ours} for each in plan.contestants}
    prepared: dict[str, Prepared] = {}
    truth = spot_check.Truth(workload, inputs)
    for contestant in plan.contestants:
        name = contestant.name
        step(f"{workload.name}: checking {name}")
        found = attempt(plan.device, _prepared, contestant, workload, inputs)
        if isinstance(found, Failed):
            facts[name] |= {"reason": found.reason, "failed": True}
            continue
        if isinstance(found, str):
            facts[name] |= {"reason": found, "not_supported": True}
            continue
        facts[name]["served_by"] = found.served_by
        verdict = attempt(plan.device, spot_check.check, contestant, found, truth, backward)
        if isinstance(verdict, Failed):
            facts[name] |= {"reason": verdict.reason, "failed": True}
            if backward and not found.no_backward:
                # The forward may still be possible: most failures are backward passes out of memory.
                verdict = attempt(plan.device, spot_check.check, contestant, found, truth, False)
            if isinstance(verdict, Failed):
                continue
        facts[name]["verdict"] = verdict
        prepared[name] = found

    forward_jobs = {name: forward_job(each, inputs) for name, each in prepared.items()}
    for name, job in forward_jobs.items():
        step(f"{workload.name}: memory of {name}")
        peak = attempt(plan.device, peak_memory, job, plan.device)
        if isinstance(peak, int):
            facts[name]["memory_mib"] = (peak + prepared[name].prepared_bytes) / MIB
    step(f"{workload.name}: forward")
    for name, timing in time_together(forward_jobs, plan.device, plan.repeats, plan.budget_s).items():
        facts[name] |= _timed("forward", timing)
    if backward:
        both_jobs = {
            name: _both_job(each, inputs)
            for name, each in prepared.items()
            if not each.no_backward and not facts[name].get("failed")
        }
        for name, job in both_jobs.items():
            step(f"{workload.name}: memory of {name} with gradients")
            peak = attempt(plan.device, peak_memory, job, plan.device)
            if isinstance(peak, int):
                facts[name]["both_memory_mib"] = (peak + prepared[name].prepared_bytes) / MIB
        step(f"{workload.name}: forward + backward")
        for name, timing in time_together(both_jobs, plan.device, plan.repeats, plan.budget_s).items():
            facts[name] |= _timed("both", timing)
        for name, each in prepared.items():
            if each.no_backward:
                facts[name].setdefault("reason", f"no backward: {each.no_backward}")
    return [Row(workload.name, name, **values) for name, values in facts.items()]


def _prepared(contestant: Contestant, workload: Workload, inputs: Inputs) -> Prepared | str:
    """Or why this contestant does not take part."""
    try:
        return contestant.prepare(workload, inputs)
    except Unavailable as reason:
        return str(reason).partition("\n")[0]


def _timed(field_name: str, timing: Timing | Failed) -> dict[str, Any]:
    if isinstance(timing, Failed):
        return {"reason": timing.reason, "failed": True}
    return {field_name: timing}


def forward_job(prepared: Prepared, inputs: Inputs) -> Job:
    """One call without gradients."""
    q, k, v = inputs.qkv

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return prepared.run(q, k, v)

    return Job(forward, prepared.around)


def _both_job(prepared: Prepared, inputs: Inputs) -> Job:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs.qkv]

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(prepared.run(*leaves), leaves, inputs.dout)

    return Job(both, prepared.around)


def tiny_host_times(plan: Plan) -> dict[str, float]:
    """Microseconds a tiny varlen call keeps the host busy, for the default and for flash-attn."""
    workload = Workload("tiny", (16, 16), (16, 16), 4, 4, 64, packed=True)
    inputs = make_inputs(workload, plan.device, plan.dtype)
    found = {}
    wanted = [Ours(), *(RIVALS[name]() for name in ("official", "aten_flash"))]
    for contestant in wanted:
        microseconds = attempt(plan.device, _host_time, contestant, workload, inputs)
        if isinstance(microseconds, float):
            found[contestant.name] = microseconds
    return found


def _host_time(contestant: Contestant, workload: Workload, inputs: Inputs) -> float | None:
    prepared = _prepared(contestant, workload, inputs)
    if isinstance(prepared, str):
        return None
    return host_microseconds(Job(lambda: prepared.run(*inputs.qkv), prepared.around), str(inputs.device))
