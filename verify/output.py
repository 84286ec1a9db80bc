"""How verify's commands show and write a Report: on the terminal and as JSON, Markdown or HTML; and read JSON again.

No attention here. A command adds the arguments with `add_output_arguments` and passes its Report to `deliver`.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import rich.table
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from flash_attn_compat.output_path import output_path

from . import COMMAND
from .errors import UsageError
from .page import to_html
from .reading import printable
from .tables import COLOURS, Report, Table

Read = TypeVar("Read")


def console() -> Console:
    """Return the terminal. If output goes to a file or a log, lines are wide enough for a row of a table."""
    make = functools.partial(Console, highlight=False, markup=False, emoji=False)  # show names as text, without markup
    terminal = make()
    return terminal if terminal.is_terminal else make(width=140)


def shown(text: str, style: str = "") -> Text:
    """Return text without control characters, which a terminal would obey."""
    return Text(printable(text), style)


def announce(environment: Mapping[str, str], terminal: Console) -> None:
    """Show the facts of ``environment``, such as machine and versions, before the work."""
    for label, fact in environment.items():
        terminal.print(shown(f"{label}: {fact}", "dim"), soft_wrap=True)


def progress_bar(terminal: Console, in_a_thread: bool = True) -> Progress:
    """Return a progress bar, for work longer than two seconds.

    in_a_thread: redraw in a thread of its own; if False, the caller redraws, so that no second thread disturbs timings
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=terminal, transient=True, auto_refresh=in_a_thread)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    for kind, what in (("json", "everything measured"), ("markdown", "the tables"), ("html", "the tables as one page")):
        parser.add_argument(f"--{kind}", metavar="FILE", type=output_path, help=f"write {what} to FILE")


def deliver(report: Report, data: Mapping[str, Any], arguments: argparse.Namespace, terminal: Console) -> None:
    """Show the report and write the requested files. data: further fields of the JSON

    Raises UsageError at the end if it cannot write a file.
    """
    _show(report, terminal)
    whole = {**asdict(report), **data}
    ways: dict[str, Callable[[], str]] = {
        "json": lambda: json.dumps(whole, indent=1) + "\n",
        "markdown": lambda: to_markdown(report),
        "html": lambda: to_html(report.title, {"": report}),
    }
    errors = []
    for kind, content in ways.items():
        if path := getattr(arguments, kind):
            try:
                write(path, content(), terminal)
            except UsageError as error:
                errors.append(str(error))
    if errors:
        raise UsageError("; ".join(errors))


def write(path: Path, content: str, terminal: Console) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    terminal.print(shown(f"wrote {path}"))


def load(path: Path, read: Callable[[dict[str, Any]], Read], command: str = "COMMAND") -> Read:
    """Apply `read` to a file that --json of ``command`` wrote (by default of any command). Raises UsageError"""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not data["title"].startswith("verify ") or command not in ("COMMAND", data["title"][7:]):
            raise ValueError("the title of another file")
        return read(data)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    # No JSON, other fields or types, numbers too large for a float, or nested too deeply for the parser.
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path} is not a file that `{COMMAND} {command} --json` wrote") from error


def _show(report: Report, terminal: Console) -> None:
    _show_tables(report.tables, terminal)
    for line in report.conclusion:
        terminal.print(shown(line, "bold"))
    _show_tables(report.under, terminal)


def _show_tables(tables: Iterable[Table], terminal: Console) -> None:
    for table in (table.used for table in tables if table.rows and not table.folded):
        drawn = rich.table.Table(*map(printable, table.columns), title=printable(table.title), title_justify="left",
                                 box=box.SIMPLE_HEAD)  # fmt: skip
        drawn.caption, drawn.caption_justify = shown(table.note, "dim") if table.note else None, "left"
        for row in table.rows:
            drawn.add_row(*(shown(cell, COLOURS.get(cell, "")) for cell in row))
        terminal.print(drawn)


def to_markdown(report: Report) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(map(_unmarked, cells)) + " |"

    facts = (f"- {_unmarked(label)}: {_unmarked(fact)}" for label, fact in report.environment.items())
    parts = [f"# {_unmarked(report.title)}", "\n".join(facts)]

    def add(tables: Iterable[Table]) -> None:
        for table in (table.used for table in tables):
            parts.append(f"## {_unmarked(table.title)}")
            parts.extend([_unmarked(table.note)] if table.note else [])
            parts.append("\n".join([line(table.columns), line(["---"] * len(table.columns)), *map(line, table.rows)]))

    add(report.tables)
    parts += map(_unmarked, report.conclusion)
    add(report.under)
    return "\n\n".join(parts) + "\n"


def _unmarked(text: str) -> str:
    """Return one line of Markdown that shows the text literally."""
    line = printable(text).replace("\n", " ")
    return re.sub(r"[\\|<>`*#&~\[\]]|\b_\B|\B_\b", r"\\\g<0>", line)
