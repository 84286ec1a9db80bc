"""`python -m verify report`: writes one self-contained HTML page of saved runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from flash_attn_compat.output_path import output_path

from . import output
from .page import to_html, verdicts
from .tables import OURS, Report

ABOUT = (
    "Programs that understand and write text or draw pictures spend much of their time on one calculation, called "
    "attention. The best-known fast program for it, flash-attn, runs on certain graphics cards only; "
    "flash_attn_compat is meant to give the same answers everywhere. For this page it was given exercises whose "
    "right answers are known."
)
FORCED = (
    "The GPU was treated as another GPU (its capability was forced): the choice of backend is the other GPU's, every "
    "time is this GPU's."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a file that a command of verify wrote with --json")
    add("-o", "--output", type=output_path, default="verify-report.html", metavar="FILE", help="verify-report.html")


def main(arguments: argparse.Namespace) -> int:
    names = [path.name for path in arguments.files]
    # Show file names instead of paths, which say much about the user's machine; paths only where names are equal.
    labels = [str(path) if names.count(path.name) > 1 else path.name for path in arguments.files]
    runs = {label: output.load(path, Report.from_json) for label, path in zip(labels, arguments.files)}
    subject = verdicts(runs.values())[0].subject
    about = ["; ".join(devices(runs.values())) or "an unknown device", *[ABOUT] * (subject == OURS)]
    facts = " ".join(fact for run in runs.values() for fact in run.environment.values())
    about += [FORCED] if "FLASH_ATTN_COMPAT_CAPABILITY=" in facts or "(forced)" in facts else []
    page = to_html(f"Is {subject} right on this machine?", runs, about)
    output.write(arguments.output, page, output.console())
    return 0 if all(run.ok for run in runs.values()) else 1


def devices(runs: Iterable[Report]) -> list[str]:
    """Return each device of the runs once, accelerators first. Each environment names them last; hence the reversal."""
    facts = [fact for run in runs for label, fact in run.environment.items() if label.startswith("device ")]
    return [*reversed(dict.fromkeys(facts))]
