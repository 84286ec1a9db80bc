"""What saved runs of compare, bench and locate say, as plain values. Reads JSON; knows nothing of HTML."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.errors import UsageError
from verify.timing import geometric_mean

Json = Mapping[str, Any]
PASS, FAIL = "pass", "FAIL"
NEEDED = {
    "compare": ("case", "function", "implementation", "device", "recorded", "refused", "verdict", "checks"),
    "bench": ("workload", "contestant", "ours", "forward", "both", "memory_mib", "verdict"),
}


def load(path: Path, command: str) -> Json:
    """The file that `verify COMMAND --json` wrote, or a UsageError."""
    try:
        data: Json = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON file") from error
    if not _has_form(data, command):
        raise UsageError(f"{path} is not a file that `python -m verify {command} --json` wrote")
    return data


def _has_form(data: Any, command: str) -> bool:
    if not isinstance(data, dict) or not isinstance(data.get("environment"), dict):
        return False
    if command == "locate":
        return {"heat_map", "kernels", "tolerance", "same"} <= data.keys()
    rows = data.get("rows")
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        return False
    return all(name in row for row in rows for name in NEEDED[command])


# ---- compare --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """Right answers of those given, and how near the worst of them came to its bound (1 is the bound)."""

    name: str
    right: int = 0
    given: int = 0
    refused: int = 0
    worst: float = 0.0

    @property
    def ok(self) -> bool:
        return self.right == self.given


@dataclass(frozen=True)
class Answers:
    """The verdicts of compare: of all answers, by backend and by function; and what was wrong.

    exercises: different problems; recorded: those of them that flash-attn answered beforehand
    """

    all: Score
    exercises: int
    recorded: int
    by_backend: Sequence[Score]
    by_function: Sequence[Score]
    wrong: Sequence[tuple[str, str]] = ()
    idle: Sequence[tuple[str, str]] = ()  # backends that served nothing here, and why


def answers(data: Json) -> Answers:
    several = len({row["device"] for row in data["rows"]}) > 1
    by_backend: dict[str, list[Json]] = defaultdict(list)
    for row in data["rows"]:
        by_backend[_where(row, several)].append(row)
    idle = {}
    for name, members in by_backend.items():
        if all(row["refused"] or (row.get("bypassed") and row["verdict"] == PASS) for row in members):
            idle[name] = next((row.get("note", "") for row in members if row["refused"]), "")
    rows = [row for name, members in by_backend.items() if name not in idle for row in members]
    given = [row for row in rows if not row["refused"]]
    by_function: dict[str, list[Json]] = defaultdict(list)
    for row in rows:
        by_function[row["function"]].append(row)
    return Answers(
        all=score("all", rows),
        exercises=len({_problem(row) for row in given}),
        recorded=len({_problem(row) for row in given if row["recorded"]}),
        by_backend=[score(name, members) for name, members in by_backend.items() if name not in idle],
        by_function=[score(name, members) for name, members in by_function.items()],
        wrong=[
            (f"{row['function']}: {row['case']}", f"{_where(row, several)}: {_what_is_wrong(row)}")
            for row in rows
            if row["verdict"] == FAIL
        ],
        idle=list(idle.items()),
    )


def _problem(row: Json) -> tuple[str, str]:
    return row["function"], row["case"]


def _where(row: Json, several_devices: bool) -> str:
    return f"{row['implementation']} on {row['device']}" if several_devices else row["implementation"]


def _what_is_wrong(row: Json) -> str:
    failed = [check for check in row["checks"] if check.get("counts", True) and not check["ok"]]
    if not failed:
        return row.get("note") or "no answer"
    worst = max(failed, key=ratio)
    return f"{worst['quantity']} is off by {float(worst['error']):.1e}, allowed is {float(worst['bound']):.1e}"


def score(name: str, rows: Sequence[Json]) -> Score:
    given = [row for row in rows if not row["refused"]]
    ratios = [ratio(check) for row in given for check in row["checks"] if check.get("counts", True)]
    return Score(
        name=name,
        right=sum(row["verdict"] == PASS for row in given),
        given=len(given),
        refused=len(rows) - len(given),
        worst=max(ratios, default=0.0),
    )


def ratio(check: Json) -> float:
    """The error as a multiple of its bound. Numbers that are none come as text."""
    error, bound = float(check["error"]), float(check["bound"])
    if error == 0:
        return 0.0
    return error / bound if bound > 0 and not math.isnan(error) else math.inf


# ---- bench ----------------------------------------------------------------------------------------------------------

LABELS = {
    "pad_sdpa": "padding + SDPA",
    "sdpa_loop": "loop over SDPA",
    "plain": "plain attention",
    "aten_flash": "PyTorch's own flash",
    "official": "flash-attn",
}
# Whom to be measured against: flash-attn itself, and what people use without it.
FLASH = ("official", "aten_flash")
WORKAROUNDS = ("pad_sdpa", "sdpa_loop", "plain")


@dataclass(frozen=True)
class Entry:
    """One contestant's figures for one workload, None where there are none. mine: what the package itself chooses."""

    name: str
    label: str
    mine: bool
    ours: bool
    forward_ms: float | None
    both_ms: float | None
    memory_mib: float | None
    ok: bool


@dataclass(frozen=True)
class Workload:
    name: str
    description: str
    entries: Sequence[Entry]

    @property
    def mine(self) -> Entry | None:
        return next((entry for entry in self.entries if entry.mine), None)

    def fastest(self, names: Sequence[str]) -> Entry | None:
        """Of these rivals the one with the shortest time and a right answer: the one worth being compared with."""
        there = [each for each in self.entries if each.name in names and not each.ours and each.ok and each.forward_ms]
        return min(there, key=lambda each: each.forward_ms or math.inf, default=None)


@dataclass(frozen=True)
class Pair:
    """Ours beside the fastest rival's forward of one workload: how many times as fast, what share of its memory."""

    workload: str
    rival: str
    times_as_fast: float
    memory_share: float | None


@dataclass(frozen=True)
class Speed:
    workloads: Sequence[Workload]
    dtype: str
    wrong: Sequence[str] = ()

    def against(self, rivals: Sequence[str]) -> list[Pair]:
        """The workloads for which ours and one of the rivals have a time; a wrong answer has no speed."""
        found = []
        for workload in self.workloads:
            mine, theirs = workload.mine, workload.fastest(rivals)
            if mine and theirs and mine.ok and mine.forward_ms and theirs.forward_ms:
                known = mine.memory_mib is not None and theirs.memory_mib
                share = (mine.memory_mib or 0.0) / (theirs.memory_mib or 1.0) if known else None
                found.append(Pair(workload.name, theirs.label, theirs.forward_ms / mine.forward_ms, share))
        return found


def typical(values: Iterable[float | None]) -> float:
    """The geometric mean of the positive ones, NaN for none."""
    return geometric_mean([value for value in values if value])


def speed(data: Json) -> Speed:
    described: Json = data.get("workloads") or {}
    by_workload: dict[str, list[Json]] = defaultdict(list)
    for row in data["rows"]:
        by_workload[row["workload"]].append(row)
    workloads = [
        Workload(name, str(described.get(name, "")), _entries(rows))
        for name, rows in by_workload.items()
        if any(row["forward"] for row in rows)
    ]
    wrong = [
        f"{row['workload']}: {row['contestant']}"
        for row in data["rows"]
        if row["ours"] and (row.get("failed") or (row["verdict"] or {}).get("ok") is False)
    ]
    dtype = str(data["environment"].get("dtype", ""))
    return Speed(workloads, dtype, wrong)


def _entries(rows: Sequence[Json]) -> list[Entry]:
    timed = [row for row in rows if row["forward"]]
    ours = [row for row in timed if row["ours"]]
    mine = next((row for row in ours if row["contestant"] == "default"), next(iter(ours), None))
    return [_entry(row, row is mine) for row in sorted(timed, key=lambda row: (row is not mine, not row["ours"]))]


def _entry(row: Json, mine: bool) -> Entry:
    name, served_by = str(row["contestant"]), row.get("served_by") or ""
    label = f"flash_attn_compat ({served_by or name})" if row["ours"] else LABELS.get(name, name)
    return Entry(
        name=name,
        label=label,
        mine=mine,
        ours=row["ours"],
        forward_ms=row["forward"]["median_ms"],
        both_ms=(row["both"] or {}).get("median_ms"),
        memory_mib=row["memory_mib"],
        ok=(row["verdict"] or {}).get("ok") is not False,
    )


# ---- where it was obtained ------------------------------------------------------------------------------------------


def machine(environment: Mapping[str, str]) -> str:
    """The devices in one line, accelerators first."""
    devices = [fact for label, fact in environment.items() if label.startswith("device ")]
    return "; ".join(reversed(devices)) or "an unknown device"


def forced_capability(environment: Mapping[str, str]) -> bool:
    """Whether the run pretended that the GPU was another one."""
    return "FLASH_ATTN_COMPAT_CAPABILITY=" in environment.get("settings", "") or any(
        "(forced)" in fact for fact in environment.values()
    )
