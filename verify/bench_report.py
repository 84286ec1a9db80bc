"""Rows of timings as tables and ratios, and against an earlier run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.bench_run import Row
from verify.errors import UsageError
from verify.tables import Table
from verify.thresholds import Ratios
from verify.timing import Timing, geometric_mean
from verify.workloads import Workload

FORWARD, BOTH, GRAPH = "forward", "both", "graph"
NONE = "-"


def rows_by_workload(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        found[row.workload][row.contestant] = row
    return found


# ---- ratios ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Yardstick:
    """Milliseconds flash-attn takes, and where the figure is from."""

    ms: float
    source: str


def official(workload: Workload, rows: Mapping[str, Row], mode: str, recorded_applies: bool) -> Yardstick | None:
    """flash-attn as measured in this run, else PyTorch's build of it, else as recorded on an H200; for decoding, where
    only flash-attn has a kernel of its own, the record comes before PyTorch. A measured time counts if the answer is
    right: a flash-attn built for some head dims only is wrong at the others.
    """
    real = rows.get("official")
    measured = _ms(real, mode)
    if measured is not None and real is not None and not real.wrong:
        return Yardstick(measured, "official")
    figures = workload.recorded if recorded_applies else None
    known = None
    if figures is not None:
        known = figures.forward_ms if mode == FORWARD else figures.both_ms
    recorded = Yardstick(known, "recorded") if known is not None else None
    aten = _ms(rows.get("aten_flash"), mode)
    bundled = Yardstick(aten, "aten_flash") if aten is not None else None
    return (recorded or bundled) if workload.decode else (bundled or recorded)


def _ms(row: Row | None, mode: str) -> float | None:
    timing = getattr(row, mode) if row is not None else None
    return timing.median_ms if timing is not None else None


def _over(theirs: float | None, ours: float | None) -> float | None:
    return theirs / ours if theirs is not None and ours else None


def our_row(rows: Mapping[str, Row]) -> Row | None:
    """The default choice, or the first backend of ours that was asked for."""
    ours = [row for row in rows.values() if row.ours]
    return rows.get("default") or next((row for row in ours if row.forward), next(iter(ours), None))


def ratios(workload: Workload, rows: Mapping[str, Row], recorded_applies: bool, of: Row | None = None) -> Ratios | None:
    """`of` against everyone else; the default choice unless given."""
    mine = of or our_row(rows)
    if mine is None or mine.forward is None:
        return None

    def to_official(mode: str) -> float | None:
        yardstick = official(workload, rows, mode, recorded_applies)
        return _over(yardstick.ms, _ms(mine, mode)) if yardstick else None

    def to(name: str, mode: str) -> float | None:
        return _over(_ms(rows.get(name), mode), _ms(mine, mode))

    theirs = rows.get("official")
    return Ratios(
        workload=workload.name,
        served_by=mine.served_by,
        official=to_official(FORWARD),
        official_both=to_official(BOTH),
        official_graph=to("official", GRAPH),
        pad=to("pad_sdpa", FORWARD),
        pad_both=to("pad_sdpa", BOTH),
        memory_mib=mine.memory_mib,
        official_memory_mib=theirs.memory_mib if theirs else None,
        both_memory_mib=mine.both_memory_mib,
        official_both_memory_mib=theirs.both_memory_mib if theirs else None,
    )


# ---- tables ----------------------------------------------------------------------------------------------------------

GRAPH_COLUMN = "in graph ms"
DETAIL_COLUMNS = (
    "workload", "contestant", "forward ms", "fwd+bwd ms", GRAPH_COLUMN, "peak MiB", "answer", "remarks",
)  # fmt: skip


def detail(row: Row) -> list[str]:
    name = (
        f"{row.contestant} ({row.served_by})" if row.served_by and row.served_by != row.contestant else row.contestant
    )
    return [
        row.workload, name, _milliseconds(row.forward), _milliseconds(row.both), _milliseconds(row.graph),
        _number(row.memory_mib, ".1f"), answer(row), remarks(row),
    ]  # fmt: skip


def _milliseconds(timing: Timing | None) -> str:
    return NONE if timing is None else f"{timing.median_ms:.4g} ±{timing.spread:.0%}"


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
    shown = [row for row in rows if row.forward or row.failed or row.not_supported]
    return _table("Every contestant: median ± half the quartile distance", DETAIL_COLUMNS,
                  [detail(row) for row in shown])  # fmt: skip


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], always: int = 0) -> Table:
    """Without the columns nobody has anything in, the first few of them aside."""
    kept = [
        index for index in range(len(columns)) if index < always or any(row[index] not in (NONE, "") for row in rows)
    ]
    return Table(title, [columns[index] for index in kept], [[row[index] for index in kept] for row in rows])


def summary_table(workloads: Sequence[Workload], rows: Sequence[Row], recorded_applies: bool) -> Table:
    """The default choice in one line for each workload."""
    by_workload = rows_by_workload(rows)
    columns = ["workload", "served by", "ms", "MiB", "official ms", "to official", "to pad", "answer"]
    cells = []
    for workload in workloads:
        present = by_workload.get(workload.name, {})
        mine = our_row(present)
        if mine is None:
            continue
        found = ratios(workload, present, recorded_applies) or Ratios(workload.name, mine.served_by)
        modes = (FORWARD, BOTH) if mine.both else (FORWARD,)
        theirs = [official(workload, present, mode, recorded_applies) for mode in modes]
        cells.append([
            workload.name, mine.served_by, _pair(_ms(mine, FORWARD), _ms(mine, BOTH), ".3g"),
            _pair(mine.memory_mib, mine.both_memory_mib, ".0f" if (mine.memory_mib or 0) >= 10 else ".2g"),
            " / ".join(f"{each.ms:.3g} {_SHORT[each.source]}" for each in theirs if each) or NONE,
            _pair(found.official, found.official_both, ".3f"), _pair(found.pad, found.pad_both, ".2f"),
            answer(mine),
        ])  # fmt: skip
    title = "Ours, forward / forward + backward, and as a multiple of the others' speed"
    if any(row[4] != NONE for row in cells):
        title += " (m measured, a aten_flash, r recorded on an H200)"
    return _table(title, columns, cells)


def graph_table(workloads: Sequence[Workload], rows: Sequence[Row]) -> Table | None:
    """Ours and the others', all replayed; None where nothing was to be captured."""
    by_workload = rows_by_workload(rows)
    rivals = list(dict.fromkeys(row.contestant for row in rows if not row.ours))
    cells = []
    for workload in workloads:
        present = by_workload.get(workload.name, {})
        mine = our_row(present)
        if mine is None or not any(row.graph or row.graph_reason for row in present.values()):
            continue
        line = [workload.name, mine.served_by, _number(_ms(mine, FORWARD), ".3g"), _number(_ms(mine, GRAPH), ".3g")]
        for name in rivals:
            row = present.get(name)
            theirs = _ms(row, GRAPH) if row and not row.wrong else None
            ratio = _over(theirs, _ms(mine, GRAPH))
            line.append(_number(theirs, ".3g") + (f" ({ratio:.3g})" if ratio else ""))
        reasons = [f"{row.contestant}: {row.graph_reason}" for row in present.values() if row.graph_reason]
        cells.append([*line, "; ".join(reasons)])
    if not cells:
        return None
    columns = ["workload", "served by", "eager ms", GRAPH_COLUMN, *(f"{name} ms" for name in rivals), "no graph"]
    title = "Ours and the others' replayed from a CUDA graph (theirs / ours)"
    return _table(title, columns, cells, always=4)


_SHORT = {"official": "m", "aten_flash": "a", "recorded": "r"}


def _pair(forward: float | None, both: float | None, form: str) -> str:
    """Forward / forward + backward, as far as they are there."""
    if both is None:
        return _number(forward, form)
    return f"{_number(forward, form)} / {_number(both, form)}"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def mean_lines(workloads: Sequence[Workload], rows: Sequence[Row], recorded_applies: bool) -> list[str]:
    """Geometric means of the default choice's speed as a multiple of flash-attn's and of the pad scheme's."""
    by_workload = rows_by_workload(rows)
    found = [ratios(each, by_workload[each.name], recorded_applies) for each in workloads
             if not each.decode and each.name in by_workload]  # fmt: skip
    lines = []
    for label, field in (("official", "official"), ("the pad scheme", "pad")):
        forward, both = (
            [value for each in found if each and (value := getattr(each, key))] for key in (field, f"{field}_both")
        )
        if forward:
            backward = f", forward + backward {geometric_mean(both):.3f} ({len(both)})" if both else ""
            lines.append(
                f"geometric mean to {label}: forward {geometric_mean(forward):.3f} ({len(forward)} workloads){backward}"
            )
    return lines


# ---- against an earlier run ------------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        for row in data["rows"]:
            row["workload"], row["contestant"], _timing(row["forward"]), _timing(row["both"])
        data["environment"].get("date")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a file that `verify bench --json` wrote") from error
    return data


def _timing(saved: Mapping[str, Any] | None) -> Timing | None:
    return Timing(**saved) if saved else None


def against(saved: Mapping[str, Any], rows: Sequence[Row], tolerance: float) -> tuple[Table, list[str], bool]:
    """A table of now / saved, lines of conclusion, and whether something became slower by more than the tolerance."""
    before = {(row["workload"], row["contestant"]): row for row in saved["rows"]}
    cells, slower = [], []
    found: dict[str, list[float]] = {FORWARD: [], BOTH: []}
    for row in rows:
        old = before.get((row.workload, row.contestant))
        line = [row.workload, row.contestant]
        for mode in (FORWARD, BOTH):
            now: Timing | None = getattr(row, mode)
            then = _timing((old or {}).get(mode))
            ratio = now.median_ms / then.median_ms if now and then else None
            line += [_number(each.median_ms if each else None, ".4g") for each in (then, now)] + [_number(ratio, ".3f")]
            if now is None or then is None or ratio is None or not row.ours:
                continue
            found[mode].append(ratio)
            # Apart by more than the noise of either.
            if ratio > 1 + tolerance and now.low_ms > then.high_ms:
                slower.append(f"{row.workload} {row.contestant} {mode} {ratio:.2f}x")
        if any(cell != NONE for cell in (line[4], line[7])):
            cells.append(line)
    columns = ["workload", "contestant", "fwd saved", "now", "ratio", "fwd+bwd saved", "now", "ratio"]
    table = Table(f"Against the run of {saved['environment'].get('date', '?')} (now / saved)", columns, cells)
    lines = []
    for mode, values in found.items():
        if values:
            lines.append(
                f"now / saved, {mode}, geometric mean of ours: {geometric_mean(values):.3f} over {len(values)}"
            )
    if not cells:
        lines.append("nothing in common with the saved run")
    lines.append(
        f"slower by more than {tolerance:.0%}: {', '.join(slower)}" if slower
        else f"nothing of ours is slower by more than {tolerance:.0%}"
    )  # fmt: skip
    return table, lines, bool(slower)


def differing_devices(saved: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """A warning, if the saved run is from another machine or setting."""
    for label, fact in environment.items():
        if (label.startswith("device") or label == "settings") and saved["environment"].get(label) != fact:
            return f"the saved run had {label}: {saved['environment'].get(label, 'none')}"
    return None
