"""Calls replayed from a CUDA graph: what they take once the host has no part in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .bench_run import Plan, forward_job
from .call import Call
from .contestants import Contestant, Prepared
from .errors import NotSupported
from .timing import Job, free_memory, synchronize
from .workloads import IN_GRAPH, Workload

WARM_UP_CALLS = 3


def graphed(plan: Plan) -> Plan:
    """The plan's contestants in graphs, on what needs neither gradients nor, with dropout, another mask each time. It
    is to be run after the plan itself: a capture that fails leaves traces in PyTorch's generator and allocator.
    """
    workloads = [
        replace(each, name=each.name + IN_GRAPH)
        for each in plan.workloads
        if plan.graphs and (each.decode or not plan.backward) and not each.dropout_p
    ]
    contestants = [replace(each, prepare=functools.partial(in_graph, each)) for each in plan.contestants]
    return replace(plan, workloads=workloads, contestants=contestants, backward=False)


def in_graph(contestant: Contestant, workload: Workload, given: Call) -> Prepared:
    """A contestant prepared by capturing its call."""
    prepared = contestant.prepare(workload, given)
    try:
        with other_inputs(given):
            replay, out = capture(forward_job(prepared, given), str(given.q.device))
    except RuntimeError as error:
        raise NotSupported(f"cannot be captured: {type(error).__name__}: {error}") from error
    return Prepared(functools.partial(_replayed, prepared, replay, out), served_by=prepared.served_by)


def _replayed(prepared: Prepared, replay: Callable[[], None], out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`prepared` is kept alive by it: the graph reads its masks and indices."""
    replay()
    return out


@contextmanager
def other_inputs(given: Call) -> Iterator[None]:
    """Other values, lengths and pages at the same addresses, as in another step of a generation: what is captured with
    these must be right on the call's own.
    """
    _, k, v = given.qkv_names
    others = {v: -given.args[v]}
    if "block_table" in given.args:
        others["block_table"] = given.args["block_table"].flip(0, 1)
    # A step that appends would overwrite another slot of the cache.
    if "cache_seqlens" in given.args and "k" not in given.args:
        others["cache_seqlens"] = given.args["cache_seqlens"] - 1
    # A step that appends writes its row into pages that are others', of k as well.
    own = {name: given.args[name].clone() for name in (k, *others)}
    try:
        for name, values in others.items():
            given.args[name].copy_(values)
        yield
    finally:
        for name, values in own.items():
            given.args[name].copy_(values)


def capture(call: Job, device: str) -> tuple[Callable[[], None], Any]:
    """What repeats the call on whatever its inputs hold by then, and what the call gave, where each repetition leaves
    its own results. Warms up on a stream of its own, as PyTorch asks.
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
    return graph.replay, out
