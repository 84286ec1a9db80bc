"""`python -m verify report`: writes one self-contained HTML page of runs that other commands saved."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from . import output
from .page import to_html
from .tables import Report

ABOUT = (
    "Programs that understand and write text or draw pictures spend much of their time on one calculation, called "
    "attention. The best-known fast program for it, flash-attn, runs on certain graphics cards only; "
    "flash_attn_compat is meant to give the same answers everywhere. For this page it was given exercises whose "
    "right answers are known."
)
FORCED = (
    "The GPU was treated as another one (its capability was forced): the choice of backend is the other GPU's, every "
    "time is this one's."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="what a command of verify wrote with --json")
    add("-o", "--output", type=Path, default=Path("verify-report.html"), metavar="FILE", help="verify-report.html")


def main(arguments: argparse.Namespace) -> int:
    output.check_writable(arguments.output)
    names = [path.name for path in arguments.files]
    # Paths say more of the user's machine than a page needs, unless names alone would hide a run behind another.
    labels = [str(path) if names.count(path.name) > 1 else path.name for path in arguments.files]
    made = report({label: output.load(path, Report.from_json) for label, path in zip(labels, arguments.files)})
    arguments.output.write_text(to_html(made, ABOUT), encoding="utf-8")
    output.console().print(f"wrote {arguments.output}")
    return 0 if made.ok else 1


def report(runs: Mapping[str, Report]) -> Report:
    """One of all, by the names of their files. The verdict is that of the runs that found something wrong, if any."""
    environment: dict[str, str] = {}
    for name, run in runs.items():
        environment[f"saved run {name}"] = run.title
        for label, fact in run.environment.items():
            differs = environment.get(label, fact) != fact
            environment.setdefault(f"{label}, {name}" if differs else label, fact)
    # Accelerators first, which describe() names last.
    devices = [fact for label, fact in environment.items() if label.startswith("device ") and "," not in label]
    forced = any("FLASH_ATTN_COMPAT_CAPABILITY=" in fact or "(forced)" in fact for fact in environment.values())
    lines = ["; ".join(reversed(devices)) or "an unknown device", *([FORCED] if forced else [])]
    lines += [line for run in runs.values() for line in run.conclusion[:-1]]
    deciding = [run for run in runs.values() if not run.ok] or [*runs.values()]
    lines.append("; ".join(dict.fromkeys(run.conclusion[-1].strip() for run in deciding)))
    tables = [replace(table, title=f"{table.title} ({name})") for name, run in runs.items() for table in run.tables]
    ok = all(run.ok for run in runs.values())
    return Report("Is flash_attn_compat right on this machine?", environment, tables, lines, ok)
