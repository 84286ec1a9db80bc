"""The same calls captured in a CUDA graph: what they take once the host has no part in them. For information only.

Runs after everything else: a capture that fails leaves traces in PyTorch's generator and allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verify.bench_run import Plan, Row, forward_job, prepare
from verify.call import Call
from verify.contestants import Contestant
from verify.timing import Failed, Job, Timing, attempt, free_memory, synchronize, time_together
from verify.workloads import Workload, make_call

WARM_UP_CALLS = 3
DIFFERENT = Failed("a replay on other inputs gives another answer than the call")


@dataclass(frozen=True)
class Captured:
    """replay() repeats the call on whatever the inputs hold by then and leaves the result in `out`."""

    replay: Callable[[], None]
    out: Tensor


def add_graphs(plan: Plan, rows: list[Row], step: Callable[[str], None] = lambda what: None) -> None:
    """Replaces the rows of each workload without gradients by rows with their times in a graph. Raises DeviceLost."""
    for workload in plan.workloads if plan.graphs else ():
        if workload.decode or not plan.backward:
            free_memory()
            timed = {row.contestant: row for row in rows if row.workload == workload.name and row.forward}
            found = _measured(workload, plan, timed, step) if timed else {}
            rows[:] = [found.get(row.contestant, row) if row.workload == workload.name else row for row in rows]


def _measured(workload: Workload, plan: Plan, rows: dict[str, Row], step: Callable[[str], None]) -> dict[str, Row]:
    found: dict[str, Timing | Failed] = {}
    jobs: dict[str, Job] = {}
    given = attempt(plan.device, make_call, workload, plan.device, plan.dtype, plan.seed)
    if isinstance(given, Failed):
        return {name: replace(row, graph_reason=given.reason) for name, row in rows.items()}
    for contestant in plan.contestants:
        if contestant.name in rows:
            step(f"{workload.name}: capturing {contestant.name}")
            tried = attempt(plan.device, replay_job, contestant, workload, given)
            if isinstance(tried, Failed):
                found[contestant.name] = tried
            else:
                jobs[contestant.name] = tried
    step(f"{workload.name}: in a CUDA graph")
    found |= time_together(jobs, plan.device, plan.repeats, plan.budget_s)
    return {
        name: replace(row, graph=None if isinstance(graph := found[name], Failed) else graph,
                      graph_reason=graph.reason if isinstance(graph, Failed) else "", graph_wrong=graph is DIFFERENT)
        for name, row in rows.items()
    }  # fmt: skip


def replay_job(contestant: Contestant, workload: Workload, given: Call) -> Job | Failed:
    """The call as a replay that is right on other inputs, too."""
    prepared = prepare(contestant, workload, given)
    if isinstance(prepared, str):
        return Failed(prepared)
    call = forward_job(prepared, given)
    captured = capture(call, str(given.q.device))
    # Another dropout mask is drawn each time.
    same = workload.dropout_p > 0 or _gives_the_same(captured, call, given)
    return Job(captured.replay) if same else DIFFERENT


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


def _gives_the_same(captured: Captured, call: Job, given: Call) -> bool:
    with _changed(given):
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
def _changed(given: Call) -> Iterator[None]:
    """Other values at the same addresses, as in the next step of a generation; undone exactly."""

    args = given.args

    def change(by: int) -> None:
        for name in (given.qkv_names[0], given.qkv_names[2]):
            args[name].neg_()
        if "block_table" in args:
            args["block_table"].copy_(args["block_table"].flip(0, 1))
        # A step that appends would overwrite another slot of the cache.
        if "cache_seqlens" in args and "k" not in args:
            args["cache_seqlens"].add_(by)

    change(-1)
    try:
        yield
    finally:
        change(1)
