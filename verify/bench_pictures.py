"""Rows of timings as pictures: ours beside the rival's mark, and curves over the sequence length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .bench_report import MODES, Compared, compared
from .bench_run import Row
from .contestants import FLASH, WORKAROUNDS
from .tables import Bar, Bars, Curves, Picture
from .workloads import Workload

Lines = list[tuple[str, list[tuple[float, float]]]]


def pictures(rows: Sequence[Row], workloads: Sequence[Workload]) -> list[Picture]:
    """Bars of speed and memory beside each rival, and for a run over lengths its curves."""
    found = [*compared(rows)]
    made: list[Picture] = [*curves(rows, workloads)]
    for rival, names in (("flash-attn", FLASH), ("the fastest other way", WORKAROUNDS)):
        if groups := [(each.mine.workload, bars) for each in found if any(bars := speed_bars(each, names))]:
            made.append(Bars(f"Speed beside {rival}: longer is faster", rival, [*MODES.values()], groups))
        if groups := [(each.mine.workload, bars) for each in found if any(bars := memory_bars(each, names))]:
            made.append(Bars(f"Memory beside {rival}: longer is more", rival, [*MODES.values()], groups))
    return made


def speed_bars(each: Compared, names: Sequence[str]) -> list[Bar | None]:
    bars: list[Bar | None] = []
    for mode in MODES:
        ratio, ours = each.ratio(names, mode), each.mine.milliseconds(mode)
        bars.append(Bar(ratio, f"{ratio:.2f} ({ours:.3g} ms)") if ratio and ours else None)
    return bars


def memory_bars(each: Compared, names: Sequence[str]) -> list[Bar | None]:
    """Beside the rival that is the fastest."""
    bars: list[Bar | None] = []
    for mode, held in zip(MODES, (_forward_memory, _both_memory)):
        rival = each.fastest(names, mode)
        ours, theirs = held(each.mine), held(rival) if rival else None
        bars.append(Bar(ours / theirs, f"{ours / theirs:.2f} ({ours:.3g} MiB)") if ours and theirs else None)
    return bars


def _forward_memory(row: Row) -> float | None:
    return row.memory_mib


def _both_memory(row: Row) -> float | None:
    return row.both_memory_mib


def curves(rows: Sequence[Row], workloads: Sequence[Workload]) -> list[Curves]:
    """Speed and memory over the sequence length, of workloads that are alike but for it."""
    by_name = {each.name: each for each in workloads if each.name == f"causal_{each.max_seqlen_q}"}
    if len(by_name) < 2:
        return []

    def lines(value: Callable[[Row, Workload], float | None]) -> Lines:
        found: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            workload = by_name.get(row.workload)
            y = value(row, workload) if workload and not row.wrong else None
            if workload and y:
                found.setdefault(row.contestant, []).append((workload.max_seqlen_q, y))
        return [*found.items()]

    def speed(mode: str, products: float) -> Callable[[Row, Workload], float | None]:
        """Two operations for each number of a product over the half of the scores that the mask leaves."""

        def of_one(row: Row, workload: Workload) -> float | None:
            ms = row.milliseconds(mode)
            return products * workload.scores * workload.head_dim / ms / 1e9 if ms else None

        return of_one

    x = "sequence length"
    made = [
        Curves("Speed, forward", x, "TFLOP/s", lines(speed("forward", 2))),
        Curves("Speed, forward + backward", x, "TFLOP/s", lines(speed("both", 7))),
        Curves("Peak memory, forward", x, "MiB", lines(lambda row, workload: row.memory_mib)),
        Curves("Peak memory, forward + backward", x, "MiB", lines(lambda row, workload: row.both_memory_mib)),
    ]
    return [picture for picture in made if picture.lines]
