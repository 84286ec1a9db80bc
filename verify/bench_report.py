"""Rows of timings as tables and ratios, and against an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
MODES = {FORWARD: "forward", BOTH: "forward + backward"}
NONE = "-"


# ---- ratios ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One workload: ours, which is the default choice or the first backend asked for, and everybody's rows by name."""

    workload: str
    mine: Row
    rows: Mapping[str, Row]

    def rivals(self, names: Sequence[str], mode: str) -> list[Row]:
        """Those that were timed, in that order; a wrong answer is no yardstick."""
        there = [row for name in names if (row := self.rows.get(name)) and not row.wrong]
        return [row for row in there if row.milliseconds(mode) is not None]

    def flash(self, mode: str) -> Row | None:
        return next(iter(self.rivals(FLASH, mode)), None)

    def other(self, mode: str) -> Row | None:
        """The fastest of what people use without flash-attn."""
        return min(self.rivals(WORKAROUNDS, mode), key=lambda row: row.milliseconds(mode) or 0.0, default=None)

    def ratio(self, rival: Row | None, mode: str) -> float | None:
        """Theirs / ours: above 1 we are faster. None: not measured."""
        theirs, ours = (row and row.milliseconds(mode) for row in (rival, self.mine))
        return theirs / ours if theirs and ours else None

    def to_flash(self, mode: str) -> float | None:
        return self.ratio(self.flash(mode), mode)

    def to_other(self, mode: str) -> float | None:
        return self.ratio(self.other(mode), mode)


def compared(rows: Sequence[Row]) -> Iterator[Compared]:
    """Each workload of which there is a row of ours."""
    for workload in dict.fromkeys(row.workload for row in rows):
        ours = [row for row in rows if row.workload == workload and row.ours]
        if ours:
            mine = next((row for row in ours if row.contestant == "default"), None)
            mine = mine or next((row for row in ours if row.forward), ours[0])
            # Our backend of that name is not the rival.
            others = {row.contestant: row for row in rows if row.workload == workload and not row.ours}
            yield Compared(workload, mine, others)


RATIOS: dict[str, Callable[[Compared, str], float | None]] = {
    "flash-attn": Compared.to_flash,
    "the fastest way without it": Compared.to_other,
}


def mean_lines(rows: Sequence[Row]) -> list[str]:
    """Geometric means of our speed as a multiple of flash-attn's and of the fastest other way's, decoding aside."""
    decoding = {workload.name for workload in DECODE}
    found = [each for each in compared(rows) if each.workload not in decoding]
    lines = []
    for label, ratio in RATIOS.items():
        means = []
        for mode, name in MODES.items():
            if values := [value for each in found if (value := ratio(each, mode))]:
                means.append(f"{name} {geometric_mean(values):.3f} ({len(values)} workloads)")
        if means:
            lines.append(f"geometric mean to {label}: {', '.join(means)}")
    return lines


def in_words(rows: Sequence[Row]) -> str:
    """Our speed, for readers who have never heard of attention kernels."""
    sentences = []
    for rival, ratio in RATIOS.items():
        there = [each for each in compared(rows) if not each.mine.wrong]
        if factors := [factor for each in there if (factor := ratio(each, FORWARD))]:
            mean = geometric_mean(factors)
            how = f"{mean:.1f} times as fast as" if mean > 1.1 else "about as fast as" if mean > 0.9 else "slower than"
            sentences.append(f"It was {how} {rival} ({min(factors):.2g} to {max(factors):.2g} times its speed).")
    return " ".join(sentences)


# ---- tables ----------------------------------------------------------------------------------------------------------

DETAIL_COLUMNS = ("workload", "contestant", "forward ms", "fwd+bwd ms", "in graph ms", "peak MiB", "off fp64", "may be",
                  "answer", "remarks")  # fmt: skip


def detail(row: Row) -> list[str]:
    by = f" ({row.served_by})" if row.served_by and row.served_by != row.contestant else ""
    times = [NONE if timing is None else str(timing) for timing in (row.forward, row.both, row.graph)]
    off = (NONE, NONE) if row.verdict is None else (f"{row.verdict.error:.1e}", f"{row.verdict.bound:.1e}")
    return [row.workload, row.contestant + by, *times, _number(row.memory_mib, ".1f"), *off, answer(row), remarks(row)]


def answer(row: Row) -> str:
    if row.verdict is None:
        return "FAIL" if row.failed else "not supported" if row.not_supported else NONE
    return "pass" if row.verdict.ok else "FAIL"


def remarks(row: Row) -> str:
    verdict = "" if row.verdict is None or row.verdict.ok else f"{row.verdict.quantity}: {row.verdict.note}"
    return "; ".join(filter(None, [row.reason, verdict, row.graph_reason and f"no graph: {row.graph_reason}"]))


def detail_table(rows: Sequence[Row], every: bool = False) -> Table:
    """every: those, too, that have nothing to show but a remark."""
    shown = [detail(row) for row in rows if every or row.forward or row.failed or row.not_supported]
    return Table("Every contestant: median ± half the quartile distance", DETAIL_COLUMNS, shown, folded=True)


def summary_table(rows: Sequence[Row]) -> Table:
    """Ours in one line for each workload, beside flash-attn (or PyTorch's build) and the fastest way without it."""
    columns = ["workload", "served by", "ms", "in graph", "MiB", "flash-attn ms", "to it", "in graph", "fastest other",
               "to it", "answer"]  # fmt: skip
    cells = []
    for each in compared(rows):
        mine, modes = each.mine, (FORWARD, BOTH) if each.mine.both else (FORWARD,)
        flash = [each.flash(mode) for mode in modes]
        built = " (PyTorch's)" if any(row and row.contestant != "official" for row in flash) else ""
        others = [row.contestant for mode in modes if (row := each.other(mode))]
        cells.append([
            each.workload, mine.served_by, _listed([mine.milliseconds(mode) for mode in modes], ".3g"),
            _number(mine.milliseconds(GRAPH), ".3g"), _listed([mine.memory_mib, mine.both_memory_mib], ".3g"),
            _listed([row.milliseconds(mode) if row else None for row, mode in zip(flash, modes)], ".3g") + built,
            _listed([each.to_flash(mode) for mode in modes], ".3f"), _number(each.to_flash(GRAPH), ".3f"),
            " / ".join(dict.fromkeys(others)) or NONE, _listed([each.to_other(mode) for mode in modes], ".2f"),
            answer(mine),
        ])  # fmt: skip
    return Table("Ours, forward / forward + backward, and as a multiple of the others' speed", columns, cells)


def _listed(values: Sequence[float | None], form: str) -> str:
    """Forward / forward + backward, as far as they are there."""
    return NONE if not any(values) else " / ".join(_number(value, form) for value in values)


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


# ---- against an earlier run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """The timings of a run read from its JSON file, by workload, contestant, whether it is ours, and mode."""

    timings: Mapping[tuple[str, str, bool, str], Timing]
    environment: Mapping[str, str]


def load(path: Path) -> Saved:
    def read(data: dict[str, Any]) -> Saved:
        found = {(row["workload"], row["contestant"], row["ours"], mode): row[mode] for row in data["rows"]
                 for mode in MODES}  # fmt: skip
        return Saved({key: Timing(**timing) for key, timing in found.items() if timing}, dict(data["environment"]))

    return output.load(path, "bench", read)


def against(saved: Saved, rows: Sequence[Row], tolerance: float) -> tuple[Table, list[str], bool]:
    """A table of now / saved, lines of conclusion, and whether something became slower by more than the tolerance."""
    cells, slower = [], []
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for row in rows:
        for mode in MODES:
            now: Timing | None = getattr(row, mode)
            then = saved.timings.get((row.workload, row.contestant, row.ours, mode))
            if now is None or then is None:
                continue
            ratio = now.median_ms / then.median_ms
            cells.append([row.workload, row.contestant, MODES[mode], str(then), str(now), f"{ratio:.3f}"])
            found[mode] += [ratio] if row.ours else []
            # Apart by more than the noise of either.
            if row.ours and ratio > 1 + tolerance and now.low_ms > then.high_ms:
                slower.append(f"{row.workload} {row.contestant} {MODES[mode]} {ratio:.2f}x")
    columns = ["workload", "contestant", "", "saved ms", "now ms", "ratio"]
    table = Table(f"Against the run of {saved.environment.get('date', '?')} (now / saved)", columns, cells)
    lines = [
        f"now / saved, {MODES[mode]}, geometric mean of ours: {geometric_mean(ratios):.3f} over {len(ratios)}"
        for mode, ratios in found.items()
        if ratios
    ]
    lines += [] if cells else ["nothing in common with the saved run"]
    what = f"slower by more than {tolerance:.0%}"
    return table, [*lines, f"{what}: {', '.join(slower)}" if slower else f"nothing of ours is {what}"], bool(slower)


def differing_devices(saved: Saved, environment: Mapping[str, str]) -> list[str]:
    """A warning for everything that says the saved run is from another machine or setting."""
    return [
        f"the saved run had {label}: {saved.environment.get(label, 'none')}"
        for label, fact in environment.items()
        if (label.startswith("device") or label == "settings") and saved.environment.get(label) != fact
    ]
