"""`python -m verify report`: writes one self-contained HTML page of runs that other commands saved."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from . import output
from .page import Verdict, to_html
from .tables import OURS, Report

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
    runs = {label: output.load(path, Report.from_json) for label, path in zip(labels, arguments.files)}
    judged = verdicts([*runs.values()])
    about = ABOUT if judged[0].subject == OURS else ""
    arguments.output.write_text(to_html(report(runs), about, judged), encoding="utf-8")
    output.console().print(f"wrote {arguments.output}")
    return 0 if all(run.ok for run in runs.values()) else 1


def verdicts(runs: Sequence[Report]) -> list[Verdict]:
    """One on each whose answers were judged, the package first: that of the runs that found something wrong, if any."""
    found = []
    for subject in sorted({run.subject for run in runs}, key=lambda name: (name != OURS, name)):
        mine = [run for run in runs if run.subject == subject]
        deciding = [run for run in mine if not run.ok] or mine
        words = "; ".join(dict.fromkeys(run.conclusion[-1].strip() for run in deciding))
        found.append(Verdict(subject, words, all(run.ok for run in mine)))
    return found


def report(runs: Mapping[str, Report]) -> Report:
    """One of all, by the names of their files, those of the package first."""
    runs = dict(sorted(runs.items(), key=lambda each: each[1].subject != OURS))
    environment: dict[str, str] = {}
    for name, run in runs.items():
        environment[f"saved run {name}"] = f"{run.title}, which judged {run.subject}"
        for label, fact in run.environment.items():
            differs = environment.get(label, fact) != fact
            environment.setdefault(f"{label}, {name}" if differs else label, fact)
    # Accelerators first, which describe() names last.
    devices = [fact for label, fact in environment.items() if label.startswith("device ") and "," not in label]
    forced = any("FLASH_ATTN_COMPAT_CAPABILITY=" in fact or "(forced)" in fact for fact in environment.values())
    lines = ["; ".join(reversed(devices)) or "an unknown device", *([FORCED] if forced else [])]
    for name, run in runs.items():
        lines += [f"{name}, of {run.subject}:", *run.conclusion[:-1]] if len(run.conclusion) > 1 else []
    tables = [replace(table, title=f"{table.title} ({name})") for name, run in runs.items() for table in run.tables]
    pictures = [replace(each, title=f"{each.title} ({name})") for name, run in runs.items() for each in run.pictures]
    first = next(iter(runs.values()))
    ok = all(run.ok for run in runs.values() if run.subject == first.subject)
    title = f"Is {first.subject} right on this machine?"
    return Report(title, environment, tables, [*lines, first.conclusion[-1]], ok, first.subject, pictures)
