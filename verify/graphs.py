"""Replay calls from CUDA graphs, to time the GPU without the host."""

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
    """Return a plan that times the contestants of ``plan`` in CUDA graphs.

    It has the workloads of ``plan`` with neither a backward nor dropout. Run it after
    ``plan``: a failed capture leaves traces in PyTorch's generator and allocator.
    """
    workloads = [
        replace(each, name=each.name + IN_GRAPH)
        for each in plan.workloads
        if plan.graphs and (each.decode or not plan.backward) and not each.dropout_p
    ]
    contestants = [replace(each, prepare=functools.partial(in_graph, each)) for each in plan.contestants]
    return replace(plan, workloads=workloads, contestants=contestants, backward=False)


def in_graph(contestant: Contestant, workload: Workload, given: Call) -> Prepared:
    """Prepare a contestant: capture its call in a CUDA graph, which it then replays."""
    prepared = contestant.prepare(workload, given)
    try:
        with other_inputs(given):
            replay, out = capture(forward_job(prepared, given), str(given.q.device))
    except RuntimeError as error:
        raise NotSupported(f"cannot be captured: {type(error).__name__}: {error}") from error
    return Prepared(functools.partial(_replayed, prepared, replay, out), served_by=prepared.served_by)


def _replayed(prepared: Prepared, replay: Callable[[], None], out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Replay a captured call. The unused `prepared` keeps the masks and indices alive that the graph reads."""
    replay()
    return out


@contextmanager
def other_inputs(given: Call) -> Iterator[None]:
    """Put other values, lengths and pages into the call's tensors during a block, as another step of a generation has.
    A graph captured in the block must then be right for the call's own values.
    """
    _, k, v = given.qkv_names
    others = {v: -given.args[v]}
    if "block_table" in given.args:
        others["block_table"] = given.args["block_table"].flip(0, 1)
    # Not with an append, which would overwrite another slot of the cache.
    if "cache_seqlens" in given.args and "k" not in given.args:
        others["cache_seqlens"] = given.args["cache_seqlens"] - 1
    # Saved and put back, k too: with other pages, an append writes to the pages of other sequences.
    own = {name: given.args[name].clone() for name in (k, *others)}
    try:
        for name, values in others.items():
            given.args[name].copy_(values)
        yield
    finally:
        for name, values in own.items():
            given.args[name].copy_(values)


def capture(call: Job, device: str) -> tuple[Callable[[], None], Any]:
    """Capture the call in a CUDA graph. Returns a function that repeats it on the current values of its inputs, and its
    results, which each repetition overwrites. Warms up on a separate stream, as PyTorch requires.
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
            with suppress(Exception):  # reports the failed capture again
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay, out
