"""How verify's commands show and write a Report: on the terminal and as JSON, Markdown or HTML; and read JSON again.

Knows nothing of attention. A command adds the arguments with `add_output_arguments` and hands its Report to `deliver`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import rich.table
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from . import COMMAND
from .errors import UsageError
from .page import to_html
from .tables import COLOURS, Report

Read = TypeVar("Read")


def console() -> Console:
    """The terminal; wide enough for a table's row where output goes to a file or a log."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=140)


def announce(environment: Mapping[str, str], terminal: Console) -> None:
    """Where and with what, before the work."""
    for label, fact in environment.items():
        terminal.print(Text(f"{label}: {fact}", style="dim"), soft_wrap=True)


def progress_bar(terminal: Console, in_a_thread: bool = True) -> Progress:
    """For everything longer than two seconds.

    in_a_thread: or drawn when told to, lest a process with one thread is timed as one with two
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=terminal, transient=True, auto_refresh=in_a_thread)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    for kind, what in (("json", "everything measured"), ("markdown", "the tables"), ("html", "the tables as one page")):
        parser.add_argument(f"--{kind}", metavar="FILE", type=Path, help=f"write {what} to FILE")


def check_output_arguments(arguments: argparse.Namespace) -> None:
    """Before the work: a file that cannot be written must not be found out about after it."""
    for kind in ("json", "markdown", "html"):
        if path := getattr(arguments, kind, None):
            check_writable(path)


def check_writable(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.absolute().parent}")


def deliver(report: Report, data: Mapping[str, Any], arguments: argparse.Namespace, terminal: Console) -> None:
    """Shows the report and writes the files asked for. JSON gets `data` beside the report."""
    _show(report, terminal)
    whole = {**asdict(report), **data}
    ways: dict[str, Callable[[], str]] = {
        "json": lambda: json.dumps(whole, indent=1) + "\n",
        "markdown": lambda: to_markdown(report),
        "html": lambda: to_html(report.title, {"": report}),
    }
    for kind, content in ways.items():
        if path := getattr(arguments, kind):
            path.write_text(content(), encoding="utf-8")
            terminal.print(f"wrote {path}")


def load(path: Path, read: Callable[[dict[str, Any]], Read], command: str = "COMMAND") -> Read:
    """What `read` makes of a file that --json wrote, by this command or by any, or a UsageError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not data["title"].startswith("verify ") or command not in ("COMMAND", data["title"][7:]):
            raise ValueError(data["title"])
        return read(data)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a file that `{COMMAND} {command} --json` wrote") from error


def _show(report: Report, terminal: Console) -> None:
    for table in (table.used for table in report.tables if not table.folded):
        shown = rich.table.Table(*table.columns, title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
        for row in table.rows:
            shown.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
        terminal.print(shown)
    for line in report.conclusion:
        terminal.print(Text(line, style="bold"))


def to_markdown(report: Report) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    parts = [f"# {report.title}", "\n".join(f"- {label}: {fact}" for label, fact in report.environment.items())]
    for table in (table.used for table in report.tables):
        parts.append(f"## {table.title}")
        parts.append("\n".join([line(table.columns), line(["---"] * len(table.columns)), *map(line, table.rows)]))
    return "\n\n".join([*parts, *report.conclusion]) + "\n"
