"""The same calls captured in a CUDA graph: what they take once the host has no part in them.

Runs after everything else: a capture that fails leaves traces in PyTorch's generator and allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from verify.bench_run import Plan, Row, forward_job
from verify.call import Call
from verify.contestants import Contestant
from verify.timing import Failed, Job, Timing, attempt, free_memory, synchronize, time_together
from verify.workloads import Workload

WARM_UP_CALLS = 3
DIFFERENT = Failed("a replay on other inputs gives another answer than the call")


def add_graphs(plan: Plan, rows: list[Row], step: Callable[[str], None] = lambda what: None) -> None:
    """Replaces the rows of each workload without gradients by rows with their times in a graph. Raises DeviceLost."""
    for workload in plan.workloads if plan.graphs else ():
        timed = {
            row.contestant: index for index, row in enumerate(rows) if row.workload == workload.name and row.forward
        }
        if not timed or (plan.backward and not workload.decode):
            continue
        free_memory()
        step(f"{workload.name}: in a CUDA graph")
        given = attempt(plan.device, workload.call, plan.device, plan.dtype, plan.seed)
        jobs: dict[str, Job] = {}
        found: dict[str, Timing | Failed] = {}
        for one in plan.contestants:
            if one.name in timed:
                job = given if isinstance(given, Failed) else attempt(plan.device, replay_job, one, workload, given)
                (found if isinstance(job, Failed) else jobs)[one.name] = job  # type: ignore[assignment]  # each its own
        for name, graph in (found | time_together(jobs, plan.device, plan.repeats, plan.budget_s)).items():
            timing, reason = (None, graph.reason) if isinstance(graph, Failed) else (graph, "")
            row = rows[timed[name]]
            rows[timed[name]] = replace(row, graph=timing, graph_reason=reason, graph_wrong=graph is DIFFERENT)


def replay_job(contestant: Contestant, workload: Workload, given: Call) -> Job | Failed:
    """The call as a replay that is right on other inputs, too: other values, lengths and pages at the same addresses,
    as in the next step of a generation. They stay.
    """
    call = forward_job(contestant.prepare(workload, given), given)
    replay, out = capture(call, str(given.q.device))
    if workload.dropout_p:  # another mask is drawn each time
        return Job(replay)
    for name in (given.qkv_names[0], given.qkv_names[2]):
        given.args[name].neg_()
    if "block_table" in given.args:
        given.args["block_table"].copy_(given.args["block_table"].flip(0, 1))
    # A step that appends would overwrite another slot of the cache.
    if "cache_seqlens" in given.args and "k" not in given.args:
        given.args["cache_seqlens"].sub_(1)
    replay()
    got = out.double()
    with call.around():
        expected = call.run()
    assert isinstance(expected, Tensor)
    # Kernels that add up in any order differ in the last digits.
    bound = 4 * torch.finfo(expected.dtype).eps * expected.abs().max().double()
    return Job(replay) if bool((got - expected.double()).abs().max() <= bound) else DIFFERENT  # which NaN is


def capture(call: Job, device: str) -> tuple[Callable[[], None], Tensor]:
    """What repeats the call on whatever its inputs hold by then, and where it leaves the result. Warms up on a stream
    of its own, as PyTorch asks.
    """
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
    return graph.replay, out
