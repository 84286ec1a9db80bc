"""Rows of timings as tables and ratios, and against an earlier run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify import output
from verify.bench_run import Row
from verify.contestants import FLASH, WORKAROUNDS
from verify.tables import Table
from verify.timing import Timing, geometric_mean
from verify.workloads import DECODE

FORWARD, BOTH, GRAPH = "forward", "both", "graph"
NONE = "-"


# ---- ratios ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One workload: ours, which is the default choice or the first backend asked for, and everybody's rows by name."""

    workload: str
    mine: Row
    rows: Mapping[str, Row]

    def rival(self, names: Sequence[str], mode: str, fastest: bool = False) -> Row | None:
        """The first of these others, or the fastest, that was timed; a wrong answer is no yardstick."""
        there = [row for name in names if (row := self.rows.get(name)) and not row.ours and not row.wrong]
        timed = [row for row in there if milliseconds(row, mode) is not None]
        return (
            min(timed, key=lambda row: milliseconds(row, mode) or 0.0) if timed and fastest else next(iter(timed), None)
        )

    def ratio(self, rival: Row | None, mode: str) -> float | None:
        """Theirs / ours: above 1 we are faster. None: not measured."""
        theirs, ours = (milliseconds(row, mode) for row in (rival, self.mine))
        return theirs / ours if theirs and ours else None

    def to_flash(self, mode: str) -> float | None:
        return self.ratio(self.rival(FLASH, mode), mode)

    def to_other(self, mode: str) -> float | None:
        """To the fastest of what people use without flash-attn."""
        return self.ratio(self.rival(WORKAROUNDS, mode, fastest=True), mode)


def milliseconds(row: Row | None, mode: str) -> float | None:
    timing: Timing | None = getattr(row, mode) if row is not None else None
    return None if timing is None else timing.median_ms


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Each workload of which there is a row of ours."""
    found = []
    for workload in dict.fromkeys(row.workload for row in rows):
        ours = [row for row in rows if row.workload == workload and row.ours]
        if ours:
            mine = next((row for row in ours if row.contestant == "default"), None)
            mine = mine or next((row for row in ours if row.forward), ours[0])
            # Our backend of that name is not the rival.
            others = {row.contestant: row for row in rows if row.workload == workload and not row.ours}
            found.append(Compared(workload, mine, others))
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------

DETAIL_COLUMNS = (
    "workload", "contestant", "forward ms", "fwd+bwd ms", "in graph ms", "peak MiB", "answer", "remarks",
)  # fmt: skip


def detail(row: Row) -> list[str]:
    def figure(timing: Timing | None) -> str:
        return NONE if timing is None else f"{timing.median_ms:.4g} ±{timing.spread:.0%}"

    by = f" ({row.served_by})" if row.served_by and row.served_by != row.contestant else ""
    times = figure(row.forward), figure(row.both), figure(row.graph)
    return [row.workload, row.contestant + by, *times, _number(row.memory_mib, ".1f"), answer(row), remarks(row)]


def answer(row: Row) -> str:
    if row.verdict is None:
        return "FAIL" if row.failed else "not supported" if row.not_supported else NONE
    return "pass" if row.verdict.ok else "FAIL"


def remarks(row: Row) -> str:
    parts = [row.reason] if row.reason else []
    if row.verdict is not None and not row.verdict.ok:
        parts.append(f"{row.verdict.quantity} off by {row.verdict.ratio:.3g} of its bound")
    if row.verdict is not None and row.verdict.note:
        parts.append(row.verdict.note)
    if row.graph_reason:
        parts.append(f"no graph: {row.graph_reason}")
    return "; ".join(parts)


def detail_table(rows: Sequence[Row]) -> Table:
    shown = [detail(row) for row in rows if row.forward or row.failed or row.not_supported]
    return Table("Every contestant: median ± half the quartile distance", DETAIL_COLUMNS, shown, folded=True)


def summary_table(rows: Sequence[Row]) -> Table:
    """Ours in one line for each workload, beside flash-attn (or PyTorch's build) and the fastest way without it."""
    columns = ["workload", "served by", "ms", "in graph", "MiB", "flash-attn ms", "to it", "in graph", "fastest other",
               "to it", "answer"]  # fmt: skip
    cells = []
    for each in compared(rows):
        mine, modes = each.mine, (FORWARD, BOTH) if each.mine.both else (FORWARD,)
        flash = [each.rival(FLASH, mode) for mode in modes]
        built = " (PyTorch's)" if any(row and row.contestant != "official" for row in flash) else ""
        others = [row for mode in modes if (row := each.rival(WORKAROUNDS, mode, fastest=True))]
        cells.append([
            each.workload, mine.served_by, _listed([milliseconds(mine, mode) for mode in modes], ".3g"),
            _number(milliseconds(mine, GRAPH), ".3g"),
            _listed([mine.memory_mib, mine.both_memory_mib][: len(modes)], ".3g"),
            _listed([milliseconds(row, mode) for row, mode in zip(flash, modes)], ".3g") + built,
            _listed([each.to_flash(mode) for mode in modes], ".3f"), _number(each.to_flash(GRAPH), ".3f"),
            " / ".join(dict.fromkeys(row.contestant for row in others)) or NONE,
            _listed([each.to_other(mode) for mode in modes], ".2f"), answer(mine),
        ])  # fmt: skip
    return Table("Ours, forward / forward + backward, and as a multiple of the others' speed", columns, cells)


def _listed(values: Sequence[float | None], form: str) -> str:
    """Forward / forward + backward, as far as they are there."""
    return NONE if not any(values) else " / ".join(_number(value, form) for value in values)


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def mean_lines(rows: Sequence[Row]) -> list[str]:
    """Geometric means of our speed as a multiple of flash-attn's and of the fastest other way's, decoding aside."""
    decoding = {workload.name for workload in DECODE}
    found = [each for each in compared(rows) if each.workload not in decoding]
    lines = []
    for label, ratio in (("flash-attn", Compared.to_flash), ("the fastest way without it", Compared.to_other)):
        means = []
        for mode, name in ((FORWARD, "forward"), (BOTH, "forward + backward")):
            if values := [value for each in found if (value := ratio(each, mode))]:
                means.append(f"{name} {geometric_mean(values):.3f} ({len(values)} workloads)")
        if means:
            lines.append(f"geometric mean to {label}: {', '.join(means)}")
    return lines


# ---- against an earlier run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A run read from its JSON file."""

    rows: Sequence[Row]
    environment: Mapping[str, str]


def load(path: Path) -> Saved:
    def read(data: dict[str, Any]) -> Saved:
        return Saved([Row.from_json(row) for row in data["rows"]], dict(data["environment"]))

    return output.load(path, "bench", read)


def against(saved: Saved, rows: Sequence[Row], tolerance: float) -> tuple[Table, list[str], bool]:
    """A table of now / saved, lines of conclusion, and whether something became slower by more than the tolerance."""
    before = {(row.workload, row.contestant, row.ours): row for row in saved.rows}
    cells, slower = [], []
    found: dict[str, list[float]] = {FORWARD: [], BOTH: []}
    for row in rows:
        old = before.get((row.workload, row.contestant, row.ours))
        line = [row.workload, row.contestant]
        for mode, ratios in found.items():
            now, then = (milliseconds(each, mode) for each in (row, old))
            ratio = now / then if now and then else None
            line += [_number(then, ".4g"), _number(now, ".4g"), _number(ratio, ".3f")]
            if ratio is not None and row.ours:
                ratios.append(ratio)
                # Apart by more than the noise of either.
                if ratio > 1 + tolerance and getattr(row, mode).low_ms > getattr(old, mode).high_ms:
                    slower.append(f"{row.workload} {row.contestant} {mode} {ratio:.2f}x")
        if line[4] != NONE or line[7] != NONE:
            cells.append(line)
    columns = ["workload", "contestant", "fwd saved", "now", "ratio", "fwd+bwd saved", "now", "ratio"]
    table = Table(f"Against the run of {saved.environment.get('date', '?')} (now / saved)", columns, cells)
    lines = [
        f"now / saved, {mode}, geometric mean of ours: {geometric_mean(ratios):.3f} over {len(ratios)}"
        for mode, ratios in found.items()
        if ratios
    ]
    lines += [] if cells else ["nothing in common with the saved run"]
    lines.append(
        f"slower by more than {tolerance:.0%}: {', '.join(slower)}" if slower
        else f"nothing of ours is slower by more than {tolerance:.0%}"
    )  # fmt: skip
    return table, lines, bool(slower)


def differing_devices(saved: Saved, environment: Mapping[str, str]) -> list[str]:
    """A warning for everything that says the saved run is from another machine or setting."""
    return [
        f"the saved run had {label}: {saved.environment.get(label, 'none')}"
        for label, fact in environment.items()
        if (label.startswith("device") or label == "settings") and saved.environment.get(label) != fact
    ]
