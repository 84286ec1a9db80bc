"""What verify's commands show and write: a Report of tables, on the terminal and as JSON, Markdown or HTML.

Knows nothing of attention. A command adds the arguments with `add_output_arguments` and hands its Report to `deliver`.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.table
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from verify.errors import UsageError

# Cells that say how something went, and how a terminal and a page show them.
COLOURS = {"pass": "green", "FAIL": "bold red", "not supported": "yellow"}


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Report:
    """A title, where it was obtained, tables, and closing lines."""

    title: str
    environment: Mapping[str, str]
    tables: Sequence[Table]
    conclusion: Sequence[str] = field(default_factory=tuple)


def console() -> Console:
    """The terminal; wide enough for a table's row where output goes to a file or a log."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=140)


def progress_bar(terminal: Console) -> Progress:
    """For everything longer than two seconds."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=terminal, transient=True)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    for kind, what in (("json", "everything measured"), ("markdown", "the tables"), ("html", "the tables as one page")):
        parser.add_argument(f"--{kind}", metavar="FILE", type=Path, help=f"write {what} to FILE")


def check_output_arguments(arguments: argparse.Namespace) -> None:
    """Before the work: a file that cannot be written must not be found out about after it."""
    for path in (arguments.json, arguments.markdown, arguments.html):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(
                f"cannot write {path}: "
                + ("it is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}")
            )


def deliver(report: Report, data: Mapping[str, Any], arguments: argparse.Namespace, terminal: Console) -> None:
    """Shows the report and writes the files asked for. JSON gets `data` beside the environment."""
    show(report, terminal)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"title": report.title, "environment": dict(report.environment), **data}, indent=1) + "\n"
        )
    if arguments.markdown:
        arguments.markdown.write_text(to_markdown(report))
    if arguments.html:
        arguments.html.write_text(to_html(report))
    for path in filter(None, (arguments.json, arguments.markdown, arguments.html)):
        terminal.print(f"wrote {path}")


def show(report: Report, terminal: Console) -> None:
    for label, fact in report.environment.items():
        terminal.print(Text(f"{label}: {fact}", style="dim"))
    for table in report.tables:
        shown = rich.table.Table(
            title=table.title,
            title_justify="left",
            title_style="bold",
            header_style="bold",
            box=box.SIMPLE_HEAD,
        )
        for column in table.columns:
            shown.add_column(column)
        for row in table.rows:
            shown.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
        terminal.print(shown)
    for line in report.conclusion:
        terminal.print(Text(line, style="bold"))


def to_markdown(report: Report) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    parts = [f"# {report.title}", "\n".join(f"- {label}: {fact}" for label, fact in report.environment.items())]
    for table in report.tables:
        parts.append(f"## {table.title}")
        parts.append("\n".join([line(table.columns), line(["---"] * len(table.columns)), *map(line, table.rows)]))
    return "\n\n".join([*parts, *report.conclusion]) + "\n"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }}
body {{ color: #1c2024; background: #fff }}
div {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }}
th, td {{ text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #8884 }}
dt {{ opacity: .6 }} dd {{ margin: 0 0 .4rem }}
.pass {{ color: #18794e }} .FAIL {{ color: #ce2c31; font-weight: 700 }} .not-supported {{ color: #976b00 }}
.conclusion {{ font-weight: 600 }}
@media (prefers-color-scheme: dark) {{
body {{ color: #e6e8ea; background: #16181a }}
.pass {{ color: #4cc38a }} .FAIL {{ color: #ff8589 }} .not-supported {{ color: #f1a10d }}
}}
</style></head><body>
{body}
</body></html>
"""


def to_html(report: Report) -> str:
    """One self-contained page."""
    body = [f"<h1>{html.escape(report.title)}</h1>"]
    body += [f'<p class="conclusion">{html.escape(line)}</p>' for line in report.conclusion]
    facts = "".join(
        f"<dt>{html.escape(label)}</dt><dd>{html.escape(fact)}</dd>" for label, fact in report.environment.items()
    )
    body.append(f"<dl>{facts}</dl>")
    for table in report.tables:
        head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
        rows = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>\n" for row in table.rows)
        body.append(
            f"<h2>{html.escape(table.title)}</h2><div><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
        )
    return _PAGE.format(title=html.escape(report.title), body="\n".join(body))


def _cell(cell: str) -> str:
    kind = f' class="{cell.replace(" ", "-")}"' if cell in COLOURS else ""
    return f"<td{kind}>{html.escape(cell)}</td>"
