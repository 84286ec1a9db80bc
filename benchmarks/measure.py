"""How time is measured, and how a figure is held against its threshold. No attention in here."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """A ratio that must not fall below, or not exceed, a threshold. `of` says what is divided by what."""

    group: str
    case: str
    of: str
    ratio: float
    at_least: float | None = None
    at_most: float | None = None
    detail: str = ""

    @property
    def passes(self) -> bool:
        return (self.at_least is None or self.ratio >= self.at_least) and (
            self.at_most is None or self.ratio <= self.at_most
        )

    @property
    def required(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return f"<= {self.at_most:g}" if self.at_most is not None else ""


_ENOUGH_SECONDS = 20.0


def interleaved(contestants: Mapping[str, Callable[[], Any]], repeats: int, calls: int = 1) -> dict[str, float]:
    """Median seconds per call of each contestant.

    They take turns within every repeat, the first one rotating, so that a slow moment of the machine hits all alike.
    Three repeats are enough where they take long. With one thread the seconds are those of this process's CPU time,
    which other processes on the machine disturb little.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    names = list(contestants)
    for name in names:
        contestants[name]()  # allocator, thread pool and caches are warm from here on
    taken: dict[str, list[float]] = {name: [] for name in names}
    begun = clock()
    for repeat in range(repeats):
        if repeat >= 3 and clock() - begun > _ENOUGH_SECONDS:
            break
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            call = contestants[name]
            start = clock()
            for _ in range(calls):
                call()
            taken[name].append((clock() - start) / calls)
    return {name: statistics.median(times) for name, times in taken.items()}


# ---------------------------------------------------------------- reporting


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--only", default="", help="only groups and cases with this text in their name")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="1 measures CPU time: the choice for a busy machine",
    )
    return parser


def report(title: str, figures: list[Figure], options: argparse.Namespace) -> int:
    """Print the table, write the JSON; 1 if a figure misses its threshold."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table("case", "ratio", "required", "", "detail", title=f"{title}: {_machine()}")
    for group in dict.fromkeys(figure.group for figure in figures):
        table.add_section()
        rows = [figure for figure in figures if figure.group == group]
        table.add_row(f"[bold]{group}[/]", "", "", "", rows[0].of)
        for figure in rows:
            verdict = "" if not figure.required else "[green]pass[/]" if figure.passes else "[red]FAIL[/]"
            table.add_row(f"  {figure.case}", f"{figure.ratio:.2f}", figure.required, verdict, figure.detail)
    console.print(table)
    failed = [figure for figure in figures if not figure.passes]
    console.print(f"{len(figures)} figures, {len(failed)} short of what is required")
    if options.json:
        with open(options.json, "w") as file:
            rows = [asdict(figure) | {"passes": figure.passes} for figure in figures]
            json.dump({"machine": _machine(), "figures": rows}, file, indent=1)
    return 1 if failed else 0


def _machine() -> str:
    return f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads"
