"""Tables and ratios of timings, and the comparison with a saved run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from flash_attn_compat.gpu_state import GpuState, summarize

from . import COMMAND, output
from .bench_run import Row
from .contestants import FLASH, WORKAROUNDS
from .reading import value_of
from .tables import OURS, Table, counted
from .timing import Timing
from .workloads import DECODING, IN_GRAPH, SHAPE_NOTE

MODES = {"forward": "forward", "both": "forward + backward"}
Yardsticks = Mapping[str, Sequence[str]]  # by label, contestants: we are compared with the fastest of them
YARDSTICKS: Yardsticks = {"flash-attn": FLASH, "the fastest way without flash-attn": WORKAROUNDS}
NONE = "-"
PROCESS_ENDED = "its process ended"
MOST_NAMES = 3  # how many workloads a line names
NOISE = 0.25  # a time that spreads by more of its median was disturbed by other programs


# ---- ratios ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One workload: our row (the default choice, or the first requested backend) and the rivals' rows."""

    mine: Row
    rivals: Sequence[Row]

    def fastest(self, names: Sequence[str], mode: str) -> Row | None:
        """Return the fastest of the named rivals that were timed and answered right, or None."""
        timed = [row for row in self.rivals if row.contestant in names and not row.wrong and row.milliseconds(mode)]
        return min(timed, key=lambda row: row.milliseconds(mode) or 0.0, default=None)

    def ratio(self, names: Sequence[str], mode: str) -> float | None:
        """Return the fastest rival's time / ours: above 1 ours is faster. None if not measured."""
        rival, ours = self.fastest(names, mode), self.mine.milliseconds(mode)
        theirs = rival.milliseconds(mode) if rival else None
        return theirs / ours if theirs and ours else None


def compared(rows: Sequence[Row]) -> Iterator[Compared]:
    """Return a comparison for each workload with a row of ours."""
    for workload in dict.fromkeys(row.workload for row in rows):
        mine, rivals = (
            [row for row in rows if row.workload == workload and row.ours is ours] for ours in (True, False)
        )
        # Ours: "default" first, then contestants that were timed.
        mine.sort(key=lambda row: (row.contestant != "default", not row.forward))
        if mine:
            yield Compared(mine[0], rivals)


def mean_lines(rows: Sequence[Row], yardsticks: Yardsticks = YARDSTICKS) -> list[str]:
    """Return a line for each yardstick: the geometric mean of its fastest contestant's time / ours.

    Decoding, workloads in CUDA graphs and wrong answers of ours are left out.
    """
    found = [each for each in compared(rows) if not (each.mine.workload.startswith(DECODING) or each.mine.wrong)]
    found = [each for each in found if not each.mine.workload.endswith(IN_GRAPH)]
    lines = []
    for label, names in yardsticks.items():
        ratios = {what: [ratio for each in found if (ratio := each.ratio(names, mode))] for mode, what in MODES.items()}
        means = [f"{what} {geometric_mean(of):.3f} ({counted(of, 'workload')})" for what, of in ratios.items() if of]
        lines += [f"geometric mean speed-up over {label}: {', '.join(means)}"] if means else []
    return lines


# ---- tables ----------------------------------------------------------------------------------------------------------

DETAIL_COLUMNS = ("workload", "contestant", "forward ms", "fwd+bwd ms", "peak MiB", "error", "allowed", "answer",
                  "remarks")  # fmt: skip
DETAIL_NOTE = (
    "ms: median ± half the distance of the quartiles. peak: memory beyond the inputs, of the forward. error, allowed: "
    "the worst quantity of the answer, against fp64."
)


def detail(row: Row) -> list[str]:
    by = f" ({row.served_by})" if row.served_by and row.served_by != row.contestant else ""
    times = [NONE if timing is None else str(timing) for timing in (row.forward, row.both)]
    off = (NONE, NONE) if row.verdict is None else (f"{row.verdict.error:.1e}", f"{row.verdict.bound:.1e}")
    return [row.workload, row.contestant + by, *times, _format(row.memory_mib, ".1f"), *off, answer(row), remarks(row)]


def answer(row: Row) -> str:
    if row.declined:
        return "not supported"
    if row.verdict is None and not row.failed:
        return NONE
    return "FAIL" if row.wrong else "pass"


def remarks(row: Row) -> str:
    doubt = "DOUBTFUL: the forward takes longer than with its backward" if row.doubtful else ""
    return "; ".join(filter(None, [mistake(row), doubt]))


def mistake(row: Row) -> str:
    """Return why figures are missing and which quantity is wrong; remarks on the times are left out."""
    verdict = "" if row.verdict is None or row.verdict.ok else f"{row.verdict.quantity}: {row.verdict.note}"
    return "; ".join(filter(None, [row.reason, verdict]))


def detail_table(rows: Sequence[Row], title: str, folded: bool = False) -> Table:
    return Table(title, DETAIL_COLUMNS, [detail(row) for row in rows if not row.declined], folded, DETAIL_NOTE)


def declined_table(rows: Sequence[Row], folded: bool = False) -> Table:
    """Return a table of missing figures: for each contestant and reason, the number of workloads and their names.

    folded: hide the table behind its title unless it has one of our contestants
    """
    declined = [row for row in rows if row.declined]
    found: dict[tuple[str, str], list[str]] = {}
    for row in declined:
        found.setdefault((row.contestant, row.reason), []).append(row.workload)
    names = dict.fromkeys(row.contestant for row in declined)
    title, is_one = "Not measured", len(names) == 1
    cells = [("" if is_one else name, str(len(which)), reason, _some(which)) for (name, reason), which in found.items()]
    folded = folded and not any(row.ours for row in declined)
    title += f", of {next(iter(names))}" if is_one else ""
    return Table(title, ("contestant", "workloads", "reason", "names"), cells, folded)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES + 1 else ""
    return ", ".join(names[:MOST_NAMES] if more else names) + more


def wrong_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each mistake of each of our contestants: its first workload, and the names of the others."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.ours and row.wrong:
            found.setdefault((row.contestant, re.sub(r"\d\S*", "", mistake(row))), []).append(row)
    return [
        f"WRONG OR FAILED  {first.workload} {name}: {mistake(first)}"
        + (f"; alike in {_some([row.workload for row in others])}" if others else "")
        for (name, _), (first, *others) in found.items()
    ]


def workload_table(described: Mapping[str, str]) -> Table:
    return Table("Workloads", ("workload", "problem"), [*described.items()], True, SHAPE_NOTE)


def kernel_lines(rows: Sequence[Row], kernel: str) -> list[str]:
    """Return lines for the kernel's author: the ends of processes, and the command that judges a wrong kernel."""
    mine = [row for row in rows if row.ours]
    lines = []
    if ended := [row for row in mine if PROCESS_ENDED in row.reason]:
        first = f"first in {ended[0].workload} ({ended[0].reason})"
        lines.append(f"{kernel} ended its process in {counted(ended, 'workload')}, {first}")
    if any(row.wrong for row in mine):
        lines.append(f"judge more problems, and see which are wrong: {COMMAND} --implementation {shlex.quote(kernel)}")
    return lines


def noise_lines(rows: Sequence[Row]) -> list[str]:
    """Return a warning if the readings of many times scatter."""
    timings = [timing for row in rows for timing in (row.forward, row.both) if timing]
    noisy = sum(timing.high_ms - timing.low_ms > 2 * NOISE * timing.median_ms for timing in timings)
    if 4 * noisy < len(timings) or not timings:
        return []
    what = f"{noisy} of {len(timings)} times vary by more than ±{NOISE:.0%}"
    return [f"{what}: other programs use the machine, so measure again when it is idle"]


def state_lines(rows: Sequence[Row]) -> list[str]:
    """Return the range of the GPU's clock and power over the workloads, in one line; none if unknown."""
    states = {
        row.workload: GpuState(row.clock_mhz, row.power_w)
        for row in rows
        if row.clock_mhz is not None and row.power_w is not None
    }
    if not states:
        return []
    told = summarize(list(states.values()))
    return [f"the GPU while it was timed: {told}. Compare times of one workload; the clock differs between them"]


SUMMARY_NOTE = (
    "Each cell: forward / forward + backward. MiB: peak memory beyond the inputs. speed-up: their time / this "
    "contestant's, so 2 is twice as fast."
)


def summary_table(rows: Sequence[Row], yardsticks: Yardsticks = YARDSTICKS, subject: str = OURS) -> Table:
    """Return a table with a line for each workload: our contestant, or the judged kernel, and each yardstick."""
    columns = ["workload", "served by", "ms", "MiB"]
    for rival in yardsticks:
        columns += [f"{rival}, ms", "speed-up"]
    cells = []
    for each in compared([row for row in rows if not row.declined]):
        mine, modes = each.mine, ("forward", "both") if each.mine.both else ("forward",)
        row = [mine.workload, mine.served_by, _listed([mine.milliseconds(mode) for mode in modes], ".3g"),
               _listed([mine.memory_mib, mine.both_memory_mib], ".3g")]  # fmt: skip
        for names in yardsticks.values():
            rivals = [each.fastest(names, mode) for mode in modes]
            fastest = " / ".join(dict.fromkeys(rival.contestant for rival in rivals if rival)) if len(names) > 1 else ""
            taken = [rival.milliseconds(mode) if rival else None for rival, mode in zip(rivals, modes)]
            row += [f"{_listed(taken, '.3g')} {fastest}".strip(), _listed([each.ratio(names, m) for m in modes], ".3f")]
        cells.append([*row, answer(mine)])
    whose = "Ours" if subject == OURS else subject
    title = f"{whose}, forward / forward + backward, and its speed-up over the others"
    return Table(title, [*columns, "answer"], cells, note=SUMMARY_NOTE)


def _listed(values: Sequence[float | None], form: str) -> str:
    """Format one or two values, of forward and of forward + backward, with a slash between them."""
    return NONE if not any(values) else " / ".join(_format(value, form) for value in values)


def _format(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


# ---- against an earlier run ------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """A run read from its JSON file. timings: by (workload, contestant, is_ours, mode)"""

    timings: Mapping[tuple[str, str, bool, str], Timing]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class _SavedRow:
    """The fields of a Row that a later run is compared with."""

    workload: str
    contestant: str
    ours: bool
    forward: Timing | None
    both: Timing | None


@dataclass(frozen=True)
class _SavedRun:
    rows: Sequence[_SavedRow]
    environment: Mapping[str, str]


def load(path: Path) -> Saved:
    def read(data: dict[str, Any]) -> Saved:
        run = value_of(_SavedRun, data)
        timings = {(row.workload, row.contestant, row.ours, mode): timing
                   for row in run.rows for mode in MODES if (timing := getattr(row, mode))}  # fmt: skip
        if not all(timing.median_ms > 0 for timing in timings.values()):
            raise ValueError("a call that took no time")
        return Saved(timings, run.environment)

    return output.load(path, read, "bench")


def against(saved: Saved, rows: Sequence[Row], tolerance: float) -> tuple[Table, list[str], bool]:
    """Compare with a saved run. Returns a table of time ratios, lines below it, and whether a backend of the package
    became slower by more than ``tolerance``.
    """
    cells, slower = [], []
    found: dict[str, list[float]] = {what: [] for what in MODES.values()}
    for row in rows:
        for mode, what in MODES.items():
            now: Timing | None = getattr(row, mode)
            then = saved.timings.get((row.workload, row.contestant, row.ours, mode))
            if now is None or then is None:
                continue
            ratio = now.median_ms / then.median_ms
            cells.append([row.workload, row.contestant, what, str(then), str(now), f"{ratio:.3f}"])
            found[what] += [ratio] if row.ours else []
            # Slower, and by more than the noise of both runs.
            if row.ours and ratio > 1 + tolerance and now.low_ms > then.high_ms:
                slower.append(f"{row.workload} {row.contestant} {what} {ratio:.2f}x")
    columns = ["workload", "contestant", "", "saved ms", "now ms", "ratio"]
    table = Table(f"Against the run of {saved.environment.get('date', '?')} (now / saved)", columns, cells)
    lines = [
        f"now / saved, {what}, geometric mean of ours: {geometric_mean(ratios):.3f} over {len(ratios)}"
        for what, ratios in found.items()
        if ratios
    ]
    lines += [] if cells else ["the saved run has no row in common with this one"]
    what = f"slower by more than {tolerance:.0%}"
    return table, [*lines, f"{what}: {', '.join(slower)}" if slower else f"nothing of ours is {what}"], bool(slower)


def differing_devices(saved: Saved, environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each difference in machine or settings from the saved run."""
    labels = [name for name in {**environment, **saved.environment} if name.startswith("device") or name == "settings"]
    return [
        f"the saved run had {label}: {saved.environment.get(label, 'none')}"
        for label in labels
        if saved.environment.get(label) != environment.get(label)
    ]
