"""A Report as one HTML page: the verdict first, tables to filter and unfold, readable on a phone and in the dark.

Nothing comes from the network, and without its few lines of script only the filter is missing.
"""

from __future__ import annotations

import html

from .tables import COLOURS, SHADES, Report, Table

LONG = 12  # rows, beyond which a table is folded

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark }}
body {{ margin: 0 auto; padding: 1rem; max-width: 68rem; font: 1rem/1.5 system-ui; overflow-wrap: anywhere }}
summary {{ font-weight: bold; padding: .5rem 0; cursor: pointer }}
details {{ border-top: 1px solid gray; overflow-x: auto }}
.verdict {{ border: 2px solid; border-radius: .6rem; padding: .7rem 1rem; font-weight: bold }}
.pass {{ color: #299764 }} .FAIL {{ color: #e5484d }} .not-supported {{ color: #ab6400 }}
.map {{ font-family: monospace; white-space: pre; overflow-wrap: normal }}
input {{ font: inherit; width: 100%; padding: .4rem }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }}
th, td {{ text-align: left; padding: .2rem .9rem .2rem .3rem; border-bottom: 1px solid #8884; vertical-align: top }}
@media (max-width: 40rem) {{
  thead {{ display: none }} tr, td {{ display: block }} td:empty {{ display: none }}
  td::before {{ content: attr(data-label) ": "; opacity: .7 }}
}}
</style></head><body>
{body}
<script>
const box = document.getElementById("filter");
const folded = new Map([...document.querySelectorAll("details")].map(d => [d, d.open]));
box.hidden = false;
box.oninput = () => {{
  const words = box.value.toLowerCase().split(" ").filter(Boolean);
  for (const row of document.querySelectorAll("tbody tr"))
    row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  for (const [d, open] of folded) d.open = words.length ? !!d.querySelector("tbody tr:not([hidden])") : open;
}};
</script>
</body></html>
"""


def to_html(report: Report, about: str = "") -> str:
    """One self-contained page. about: a paragraph for everybody, behind the verdict."""
    *remarks, verdict = report.conclusion
    body = [f"<h1>{_text(report.title)}</h1>"]
    body.append(f'<p class="verdict {"pass" if report.ok else "FAIL"}">{_text(verdict)}</p>')
    body += [f"<p>{_text(line)}</p>" for line in (*remarks, about) if line]
    body.append('<input id="filter" type="search" hidden placeholder="Show only rows with these words, such as: FAIL">')
    tables = sorted((table.used for table in report.tables), key=_is_folded)  # what has to be opened comes last
    body += map(_table, tables)
    facts = "".join(f"<dt>{_text(label)}</dt><dd>{_text(fact)}</dd>" for label, fact in report.environment.items())
    body.append(f"<details><summary>Where and how this was obtained</summary><dl>{facts}</dl></details>")
    return _PAGE.format(title=_text(report.title), body="\n".join(body))


def _is_folded(table: Table) -> bool:
    return table.folded or len(table.rows) > LONG


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(map(_cell, row, table.columns)) + "</tr>\n" for row in table.rows)
    wrong = sum(any(cell == "FAIL" for cell in row) for row in table.rows)
    count = f"{len(table.rows)} rows" + (f', <span class="FAIL">{wrong} FAIL</span>' if wrong else "")
    return (
        f"<details{'' if _is_folded(table) else ' open'}><summary>{_text(table.title)} ({count})</summary>"
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></details>"
    )


def _cell(cell: str, label: str) -> str:
    kind = cell.replace(" ", "-") if cell in COLOURS else "map" if cell and not set(cell) - set(SHADES) else ""
    return f'<td data-label="{_text(label)}" class="{kind}">{_text(cell)}</td>'


def _text(value: object) -> str:
    return html.escape(str(value))
