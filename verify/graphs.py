"""The same calls captured in a CUDA graph: what they take once the host has no part in them. For information only.

Runs after everything else: a capture that fails leaves traces in PyTorch's generator and allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verify.bench_run import Plan, Row, forward_job
from verify.contestants import Contestant, Unavailable
from verify.timing import Failed, Job, Timing, attempt, free_memory, synchronize, time_together
from verify.workloads import Inputs, Workload, make_inputs

WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Captured:
    """replay() repeats the call on whatever the inputs hold by then and leaves the result in `out`."""

    replay: Callable[[], None]
    out: Tensor


@dataclass(frozen=True)
class DifferentAnswer(Failed):
    """A replay on other inputs does not give what the call gives on them."""

    reason: str = "a replay on other inputs gives another answer than the call"


def measured(plan: Plan, rows: Sequence[Row], step: Callable[[str], None] = lambda what: None) -> Iterator[list[Row]]:
    """The rows of each workload without gradients, with their times in a graph. Raises DeviceLost."""
    if not plan.graphs:
        return
    for workload in plan.workloads:
        found = {row.contestant: row for row in rows if row.workload == workload.name}
        if (plan.backward and not workload.decode) or not any(row.forward for row in found.values()):
            continue
        free_memory()
        yield _measured(workload, plan, found, step)


def _measured(workload: Workload, plan: Plan, rows: dict[str, Row], step: Callable[[str], None]) -> list[Row]:
    inputs = attempt(plan.device, make_inputs, workload, plan.device, plan.dtype)
    if isinstance(inputs, Failed):
        return [replace(row, graph_reason=inputs.reason) for row in rows.values()]
    jobs: dict[str, Job] = {}
    done = dict(rows)
    for contestant in plan.contestants:
        row = rows.get(contestant.name)
        if row is None or row.forward is None:
            continue
        step(f"{workload.name}: capturing {contestant.name}")
        job = attempt(plan.device, _replay_job, contestant, workload, inputs)
        if isinstance(job, Failed):
            wrong = isinstance(job, DifferentAnswer)
            done[row.contestant] = replace(row, graph_reason=job.reason, graph_wrong=wrong)
        else:
            jobs[row.contestant] = job
    step(f"{workload.name}: in a CUDA graph")
    for name, timing in time_together(jobs, plan.device, plan.repeats, plan.budget_s).items():
        if isinstance(timing, Timing):
            done[name] = replace(rows[name], graph=timing)
        else:
            done[name] = replace(rows[name], graph_reason=timing.reason)
    return list(done.values())


def _replay_job(contestant: Contestant, workload: Workload, inputs: Inputs) -> Job | Failed:
    try:
        call = forward_job(contestant.prepare(workload, inputs), inputs)
    except Unavailable as reason:
        return Failed(str(reason))
    captured = capture(call, str(inputs.device))
    # Another mask is drawn each time.
    if not workload.dropout_p and not _gives_the_same(captured, call, inputs):
        return DifferentAnswer()
    return Job(captured.replay)


def capture(call: Job, device: str) -> Captured:
    """Warms up on a stream of its own, as PyTorch asks, and captures one call there."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    free_memory()
    with torch.cuda.stream(stream), call.around():
        for _ in range(WARM_UP_CALLS):
            call.run()
        synchronize(device)
        graph.capture_begin()
        try:
            out = call.run()
        except Exception:
            with suppress(Exception):  # says again that the capture failed
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    assert isinstance(out, Tensor)
    return Captured(graph.replay, out)


def _gives_the_same(captured: Captured, call: Job, inputs: Inputs) -> bool:
    with _changed(inputs):
        captured.replay()
        got = captured.out.double()
        with call.around():
            expected = call.run()
        assert isinstance(expected, Tensor)
        largest = expected.abs().max().double()
        # Kernels that add up in any order differ in the last digits.
        bound = 4 * torch.finfo(expected.dtype).eps * largest
        return bool((got - expected.double()).abs().max() <= bound)  # False for NaN


@contextmanager
def _changed(inputs: Inputs) -> Iterator[None]:
    """Other values at the same addresses, as in the next step of a generation; undone exactly."""

    def negate() -> None:
        inputs.q.neg_()
        inputs.v.neg_()
        if inputs.block_table is not None:
            inputs.block_table.copy_(inputs.block_table.flip(0, 1))

    # A step that appends would overwrite another slot of the cache.
    shorter = inputs.cache_seqlens if inputs.k_new is None else None
    negate()
    if shorter is not None:
        shorter.sub_(1)
    try:
        yield
    finally:
        negate()
        if shorter is not None:
            shorter.add_(1)
