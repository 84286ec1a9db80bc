"""Figures that cannot both be true: they are taken again, and are said to be doubtful if they stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from .bench_run import Plan, Row, run
from .workloads import Workload

# A longer problem is not so many times faster than a shorter one, nor, for each of its scores, so many times slower.
FAR = 30.0


def far_apart(rows: Sequence[Row], workloads: Sequence[Workload]) -> Iterator[tuple[Row, Row, str]]:
    """Neighbours in size, of one contestant and of workloads that differ in their lengths only, and what is odd."""
    by_name = {workload.name: workload for workload in workloads}
    series: dict[tuple[str, Workload], list[Row]] = {}
    for row in rows:
        if row.workload in by_name:
            alike = replace(by_name[row.workload], name="", seqlens_q=(), seqlens_k=(), capacity=0)
            series.setdefault((row.contestant, alike), []).append(row)
    for of_one in series.values():
        of_one.sort(key=lambda row: by_name[row.workload].scores)
        for mode in ("forward", "both"):
            timed = [row for row in of_one if row.milliseconds(mode)]
            for small, large in itertools.pairwise(timed):
                scores = by_name[large.workload].scores / by_name[small.workload].scores
                factor = (large.milliseconds(mode) or 0.0) / (small.milliseconds(mode) or 1.0)
                if not 1 / FAR <= factor <= FAR * scores:
                    times = f"{small.milliseconds(mode):.3g} and {large.milliseconds(mode):.3g} ms"
                    yield small, large, f"DOUBTFUL, timed twice: {small.workload} and {large.workload} take {times}"


def settled(rows: Sequence[Row], plan: Plan, step: Callable[[str], None] = lambda what: None) -> list[Row]:
    """The rows, those timed again that are far from their neighbours; marked if they still are."""

    def key(row: Row) -> tuple[str, str]:
        return row.workload, row.contestant

    odd = {key(row) for small, large, _ in far_apart(rows, plan.workloads) for row in (small, large)}
    if not odd:
        return list(rows)
    workloads = [each for each in plan.workloads if any(each.name == name for name, _ in odd)]
    contestants = [each for each in plan.contestants if any(each.name == name for _, name in odd)]
    again = {
        key(row): row
        for found in run(replace(plan, workloads=workloads, contestants=contestants), step)
        for row in found
        if key(row) in odd
    }
    rows = [again.get(key(row), row) for row in rows]
    doubts = {key(row): words for small, large, words in far_apart(rows, plan.workloads) for row in (small, large)}
    return [replace(row, doubt=row.doubt or doubts.get(key(row), "")) for row in rows]
