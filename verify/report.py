"""`python -m verify report`: one self-contained HTML page from saved or quick runs of compare, bench and locate."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from verify import bench, compare, locate, output
from verify.environment import checked_devices
from verify.page import to_html
from verify.tables import Report

QUICK_WORKLOADS = "uniform_varlen,skewed_varlen,llm_gqa_causal,mistral_window,decode_32x4096"
# Each command's name, and what is run of it where no saved run is given.
QUICK: dict[ModuleType, list[str]] = {
    compare: ["compare", "--quick"],
    bench: ["bench", "--only", QUICK_WORKLOADS, "--repeats", "5"],
    locate: ["locate", locate.REFERENCE, "verify.backend:reference", "--causal"],
}
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


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="one HTML page: verdicts, speed, memory, error heat maps, machine",
        description="Writes one page that needs no network and opens from disk, on a phone too. Takes saved runs, and "
        "runs quick ones of what it was not given. Exit code 0: every answer is right; 1: one is wrong; 2: arguments "
        "that make no sense.",
    )
    add = parser.add_argument
    for command in ("compare", "bench", "locate"):
        add(f"--{command}", type=Path, action="append", default=[], metavar="FILE",
            help=f"a run saved by `verify {command} --json` (may be repeated)")  # fmt: skip
    add("--device", metavar="DEVICE", help="of the quick runs: cpu, cuda, cuda:1, mps (default: the best)")
    add("-o", "--output", type=Path, default=Path("verify-report.html"), metavar="FILE", help="verify-report.html")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    output.check_writable(arguments.output)
    device = checked_devices([arguments.device] if arguments.device else [])[-1]
    # Everything given is read before anything slow begins.
    runs = {
        command: {f"saved run {path.name}": _read(command, path) for path in getattr(arguments, words[0])}
        for command, words in QUICK.items()
    }
    for command, words in QUICK.items():
        if not runs[command]:
            made_by = [*words, "--device", device]
            runs[command] = {f"python -m verify {' '.join(made_by)}": _run(command, made_by)}
    made = report({QUICK[command][0]: found for command, found in runs.items()})
    arguments.output.write_text(to_html(made), encoding="utf-8")
    output.console().print(f"wrote {arguments.output}")
    return 0 if made.ok else 1


def _read(command: ModuleType, path: Path) -> Report:
    return output.load(path, QUICK[command][0], Report.from_json)


def _run(command: ModuleType, words: list[str]) -> Report:
    """Another command as a user would run it, its tables and progress on this terminal."""
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    threads = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder, "a.json")
            command.main(parser.parse_args([*words, "--json", str(saved)]))
            return _read(command, saved)
    finally:
        torch.set_num_threads(threads)


def report(runs: Mapping[str, Mapping[str, Report]]) -> Report:
    """The page of these runs, by command and how each was obtained."""
    environment: dict[str, str] = {}
    for command, found in runs.items():
        for how, one in found.items():
            environment[how] = one.title
            for label, fact in one.environment.items():
                differs = environment.get(label, fact) != fact
                environment.setdefault(f"{label}, {command}" if differs else label, fact)
    judging = [one for command in ("compare", "bench") for one in runs[command].values()]
    maps = [*runs["locate"].values()]
    lines = [machine(environment), *([FORCED] if forced_capability(environment) else [])]
    lines += [line for one in judging for line in one.conclusion[:-1]] + [one.words for one in maps]
    wrong = [one.conclusion[-1] for one in judging if not one.ok]
    lines.append("; ".join(wrong or [one.conclusion[-1] for one in runs["compare"].values()]))
    tables = [table for one in judging for table in one.tables]
    tables += [replace(one.tables[-1], title=f"{one.words}. {one.tables[-1].title}") for one in maps]
    words = " ".join([ABOUT, *(one.words for one in judging)])
    return Report("Is flash_attn_compat right on this machine?", environment, tables, lines, not wrong, words)


def machine(environment: Mapping[str, str]) -> str:
    """The devices in one line, accelerators first."""
    devices = [fact for label, fact in environment.items() if label.startswith("device ") and "," not in label]
    return "; ".join(reversed(devices)) or "an unknown device"


def forced_capability(environment: Mapping[str, str]) -> bool:
    """Whether a run pretended that the GPU was another one."""
    return any("FLASH_ATTN_COMPAT_CAPABILITY=" in fact or "(forced)" in fact for fact in environment.values())
