"""Pictures of timings: our bars beside the rival's mark, and curves over the sequence length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .bench_report import MODES, Compared, Yardsticks, compared
from .bench_run import Row
from .tables import Bar, Bars, Curves, Picture
from .workloads import Workload


def bars(rows: Sequence[Row], yardsticks: Yardsticks) -> list[Picture]:
    """Return bars of speed and memory relative to each rival."""
    found, made = [*compared(rows)], list[Picture]()
    for rival, names in yardsticks.items():
        for title, bar in (
            (f"Speed beside {rival}: 1 is as fast, longer is faster; ms in brackets", speed),
            (f"Memory beside {rival}: 1 is as much, longer is more; MiB in brackets", memory),
        ):
            groups = [(each.mine.workload, [bar(each, names, mode) for mode in MODES]) for each in found]
            if groups := [group for group in groups if any(group[1])]:
                made.append(Bars(title, rival, [*MODES.values()], groups))
    return made


def speed(each: Compared, names: Sequence[str], mode: str) -> Bar | None:
    ratio, ours = each.ratio(names, mode), each.mine.milliseconds(mode)
    return Bar(ratio, f"{ratio:.2f} ({ours:.3g} ms)", each.mine.wrong) if ratio and ours else None


def memory(each: Compared, names: Sequence[str], mode: str) -> Bar | None:
    """Return a bar: our peak memory relative to that of the fastest of the rivals ``names``."""
    rival, ours = each.fastest(names, mode), each.mine.mebibytes(mode)
    theirs = rival.mebibytes(mode) if rival else None
    return Bar(ours / theirs, f"{ours / theirs:.2f} ({ours:.3g} MiB)", each.mine.wrong) if ours and theirs else None


def curves(rows: Sequence[Row], workloads: Sequence[Workload]) -> list[Picture]:
    """Return curves of speed and memory over the length, for workloads that differ only in length."""
    by_name = {each.name: each for each in workloads}
    if len(by_name) < 2:
        return []

    def lines(value: Callable[[Row, Workload], float | None]) -> list[tuple[str, list[tuple[float, float]]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            workload = by_name.get(row.workload)
            y = value(row, workload) if workload and not row.wrong else None
            if workload and y:
                found.setdefault(row.contestant, []).append((workload.max_seqlen_q, y))
        return [*found.items()]

    def rate(mode: str, products: int) -> Callable[[Row, Workload], float | None]:
        """Return a function that computes TFLOP/s of a row; a causal mask leaves half of the operations."""

        def of_one(row: Row, workload: Workload) -> float | None:
            operations = (1 if workload.causal else 2) * products * workload.scores * workload.head_dim
            ms = row.milliseconds(mode)
            return operations / ms / 1e9 if ms else None

        return of_one

    x = "sequence length"
    made = [
        Curves("Speed, forward", x, "TFLOP/s", lines(rate("forward", 2))),
        Curves("Speed, forward + backward", x, "TFLOP/s", lines(rate("both", 7))),
        Curves("Peak memory, forward", x, "MiB", lines(lambda row, workload: row.memory_mib)),
        Curves("Peak memory, forward + backward", x, "MiB", lines(lambda row, workload: row.both_memory_mib)),
    ]
    return [picture for picture in made if picture.lines]
