"""Reports as one HTML page: the verdicts first, then pictures and tables of each, to filter and unfold.

The page loads nothing from the network. Without its few lines of script it lacks only the filter.
"""

from __future__ import annotations

import html
import importlib.util
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from . import EXTRA
from .reading import printable
from .tables import COLOURS, OURS, SCOPE, TOO_LITTLE, Picture, Report, Table, counted

MANY = 12  # a table with more rows is folded
NARROW = 60  # a phone has room for rows of so many characters
LONG = 44  # the text of a cell with more characters goes under its row

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark }}
body {{ margin: 0 auto; padding: 1rem; max-width: 74rem; font: 1rem/1.5 system-ui, sans-serif }}
h1 {{ font-size: 1.5rem; line-height: 1.2 }} h2 {{ font-size: 1.1rem }}
p {{ margin: .5rem 0 }} .whole {{ white-space: nowrap }}
summary {{ font-weight: bold; padding: .5rem 0; cursor: pointer }}
details {{ border-top: 1px solid #8888; overflow-x: auto }}
.verdict {{ border: 2px solid; border-radius: .6rem; padding: .7rem 1rem; margin: .5rem 0; font-weight: bold }}
.beside {{ display: block; font-weight: normal; color: CanvasText; margin-top: .3rem }}
.pass, .right-to-fp32 {{ color: #187a4b }} .FAIL {{ color: #c9252d }}
.declined, .not-supported, .not-asked {{ color: #9a5b00 }}
.pictures {{ display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start }}
figure {{ flex: 1 1 26rem; max-width: 34rem; min-width: 0; margin: 0 }}
figcaption {{ font-weight: bold }}
svg {{ width: 100%; height: auto; font-family: system-ui, sans-serif }}
input {{ font: inherit; width: 100%; box-sizing: border-box; padding: .4rem; margin: .5rem 0 }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }}
th, td {{ text-align: left; padding: .2rem .9rem .2rem .3rem; vertical-align: top }}
tbody {{ border-bottom: 1px solid #8884 }}
.under {{ padding-left: 1.5rem; opacity: .85 }}
@media (prefers-color-scheme: dark) {{
  .pass, .right-to-fp32 {{ color: #3fbf85 }} .FAIL {{ color: #ff7a7d }}
  .declined, .not-supported, .not-asked {{ color: #e5a13d }}
}}
@media (max-width: 40rem) {{
  .wide thead, .wide td:empty {{ display: none }}
  .wide, .wide tbody, .wide tr, .wide td {{ display: block }}
  .wide tbody {{ padding: .3rem 0 }} .wide td {{ padding-right: 0 }}
  .narrow {{ font-size: .8rem }} .narrow th, .narrow td {{ padding-right: .4rem; padding-left: 0 }}
  .wide td[data-label]::before {{ content: attr(data-label) ": "; color: CanvasText; opacity: .7 }}
}}
</style></head><body>
{body}
<script>
const box = document.getElementById("filter");
const folded = new Map([...document.querySelectorAll("details")].map(d => [d, d.open]));
box.hidden = false;
box.oninput = () => {{
  const words = box.value.toLowerCase().split(" ").filter(Boolean);
  for (const row of document.querySelectorAll("tbody"))
    row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  for (const [d, open] of folded) d.open = words.length ? !!d.querySelector("tbody:not([hidden])") : open;
}};
</script>
</body></html>
"""


class Verdict(NamedTuple):
    """The verdict on ``subject``, in ``words``. ok: whether nothing is wrong; beside: lines to show next to it"""

    subject: str
    words: str
    ok: bool
    beside: Sequence[str]


def verdicts(runs: Iterable[Report]) -> list[Verdict]:
    """Return a verdict on each judged subject, the package first. Runs with mistakes decide, if there are any."""
    found = []
    for subject, same in groupby(sorted(runs, key=_ours_first), key=lambda run: run.subject):
        mine = [*same]
        deciding = [run for run in mine if not run.ok] or mine
        words = "; ".join(dict.fromkeys(run.conclusion[-1].strip() for run in deciding))
        beside = [*dict.fromkeys(line for run in mine for line in run.headline)]
        found.append(Verdict(subject, words, all(run.ok for run in mine), beside))
    return found


def _ours_first(run: Report) -> tuple[bool, str]:
    return run.subject != OURS, run.subject


def to_html(title: str, runs: Mapping[str, Report], about: Sequence[str] = ()) -> str:
    """Return one self-contained page of the runs. about: general paragraphs after the verdicts"""
    body = [f"<h1>{_breakable(title)}</h1>"]
    for subject, words, ok, beside in verdicts(runs.values()):
        kind = "pass" if ok else "declined" if words.startswith(TOO_LITTLE) else "FAIL"
        words, scoped, scope = words.partition(SCOPE)  # the scope is a long list: it goes last
        below = [*beside, *([scoped.removeprefix("; ") + scope] if scope else [])]
        lines = "".join(f'<span class="beside">{_breakable(line)}</span>' for line in below)
        body.append(f'<p class="verdict {kind}">{_breakable(subject)}: {_breakable(words)}{lines}</p>')
        under = (table for run in runs.values() if run.subject == subject for table in run.under)
        body += (_table(used, not _is_folded(used)) for table in under if (used := table.used).columns)
    body += [f"<p>{_breakable(line)}</p>" for line in about]
    if any(run.tables for run in runs.values()):
        body.append('<input id="filter" type="search" hidden aria-label="filter" placeholder="Only rows with: FAIL">')
    for name, run in sorted(runs.items(), key=lambda each: _ours_first(each[1])):
        body += _run(name if len(runs) > 1 else "", run)
    return _PAGE.format(title=_text(title), body="\n".join(body))


def _run(name: str, run: Report) -> Iterator[str]:
    """Yield the HTML of a run: remarks, pictures, tables, then machine and settings."""
    if name:
        yield f"<h2>{_breakable(f'{name}: {run.title}, of {run.subject}')}</h2>"
    yield from (f"<p>{_breakable(line)}</p>" for line in run.conclusion[:-1] if line not in run.headline)
    if run.pictures:
        yield _pictures(run.pictures)
    tables = (used for table in run.tables if (used := table.used).columns)
    yield from (_table(table, not _is_folded(table)) for table in sorted(tables, key=_is_folded))  # open tables first
    facts = [f"<dt>{_breakable(label)}</dt><dd>{_breakable(fact)}</dd>" for label, fact in run.environment.items()]
    yield f"<details><summary>Where and how this was obtained</summary><dl>{''.join(facts)}</dl></details>"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _pictures(pictures: Sequence[Picture]) -> str:
    if not can_draw():
        return f"<p>There would be pictures here: {_text(EXTRA)}</p>"
    from .pictures import svg

    figures = (f"<figure><figcaption>{_breakable(each.title)}</figcaption>{svg(each)}</figure>" for each in pictures)
    return f'<div class="pictures">{"".join(figures)}</div>'


# ---- tables ----------------------------------------------------------------------------------------------------------


def _is_folded(table: Table) -> bool:
    return table.folded or len(table.rows) > MANY


def _is_narrow(table: Table) -> bool:
    return (
        sum(max(len(row[index]) for row in (table.columns, *table.rows)) for index in range(len(table.columns)))
        <= NARROW
    )


def _table(table: Table, is_open: bool) -> str:
    below = {
        index for index in range(1, len(table.columns)) if any(len(row[index]) > LONG for row in table.rows)
    }  # a column with a long cell goes below the rows as a whole, or its other cells would look like all
    head = "".join(f"<th>{_text(column)}</th>" for index, column in enumerate(table.columns) if index not in below)
    rows = "\n".join(_row(row, table.columns, below) for row in table.rows)
    wrong = sum(any(cell == "FAIL" for cell in row) for row in table.rows)
    count = counted(table.rows, "row")
    count += f', <span class="FAIL">{wrong} FAIL</span>' if wrong else ""
    note = f"<p>{_breakable(table.note)}</p>" if table.note else ""
    title, width = _breakable(table.title), "narrow" if _is_narrow(table) else "wide"
    return (
        f"<details{' open' if is_open else ''}><summary>{title} ({count})</summary>{note}"
        f'<table class="{width}"><thead><tr>{head}</tr></thead>\n{rows}</table></details>'
    )


def _row(row: Sequence[str], columns: Sequence[str], below: set[int]) -> str:
    """Return a tbody for each row, so that the text under a row stays with it."""
    name, under = row[0], [(columns[index], row[index]) for index in sorted(below) if row[index]]
    if len(name) > LONG:
        under.insert(0, (columns[0], name))
        name = textwrap.shorten(name, LONG, placeholder=" …")
    cells = [_cell(name, columns[0])]
    cells += [_cell(cell, columns[index]) for index, cell in enumerate(row) if index and index not in below]
    notes = "".join(
        f'<tr><td class="under" colspan="{len(cells)}">{_text(label)}{": " * bool(label)}{_breakable(cell)}</td></tr>'
        for label, cell in under
    )
    return f"<tbody><tr>{''.join(cells)}</tr>{notes}</tbody>"


def _cell(cell: str, label: str) -> str:
    kind = cell.replace(" ", "-") if cell in COLOURS else ""
    labelled = f' data-label="{_text(label)}"' if label else ""
    return f'<td{labelled} class="{kind}">{_breakable(cell)}</td>'


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def _breakable(value: str) -> str:
    """Return HTML that may break lines after signs in long names, but not in numbers and command options."""

    def word(text: str) -> str:
        text = re.sub(r"\d[\d.]*e-\d+|^-[-\w]+", r'<span class="whole">\g<0></span>', _text(text))
        return re.sub(r"([/\\:_=,(]+)(?=\w)", r"\1<wbr>", text) if len(text) > 20 and "<" not in text else text

    return " ".join(map(word, str(value).split(" ")))
