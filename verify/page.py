"""A Report as one HTML page: the verdict first, tables to filter and unfold, readable on a phone and in the dark.

Nothing comes from the network, and without its few lines of script only the filter is missing.
"""

from __future__ import annotations

import base64
import html

from verify.tables import COLOURS, Bar, Picture, Report, Table

LONG = 12  # rows, beyond which a table is folded

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #d9d9e0; --card: #f7f8fa; --page: #fff;
  --pass: #18794e; --fail: #ce2c31; --warn: #976b00; --bar: #d5e5f7 }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e8eaec; --soft: #a3a8b0; --line: #3a3d42; --card: #1f2226;
  --page: #151719; --pass: #4cc38a; --fail: #ff8589; --warn: #f1a10d; --bar: #1d3a5c }} }}
* {{ box-sizing: border-box }}
body {{ margin: 0 auto; padding: 1rem 1rem 3rem; max-width: 68rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere }}
h1 {{ font-size: 1.4rem; margin: .5rem 0 }}
summary {{ font-weight: 650; padding: .5rem 0; cursor: pointer }}
details {{ border-top: 1px solid var(--line) }}
.verdict {{ border: 2px solid; border-radius: .6rem; padding: .7rem 1rem; font-size: 1.15rem; font-weight: 650 }}
.pass {{ color: var(--pass) }} .FAIL {{ color: var(--fail); font-weight: 650 }} .not-supported {{ color: var(--warn) }}
.words {{ background: var(--card); border-radius: .6rem; padding: .8rem 1rem }}
.count, dt, figcaption {{ color: var(--soft); font-size: .88rem; font-weight: 400 }}
input {{ font: inherit; width: 100%; padding: .5rem .8rem; margin: .5rem 0; border: 1px solid var(--line);
  border-radius: .4rem; background: var(--page); color: var(--ink) }}
div {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin-bottom: .8rem }}
th, td {{ text-align: left; padding: .2rem .9rem .2rem .3rem; border-bottom: 1px solid var(--line);
  vertical-align: top }}
.bar {{ background: linear-gradient(90deg, var(--bar) var(--share), transparent 0); min-width: 6rem }}
img {{ width: 100%; max-width: 44rem; background: #fff; border-radius: .4rem }} figure {{ margin: .6rem 0 }}
dd {{ margin: 0 0 .4rem }}
@media (max-width: 40rem) {{
  thead {{ display: none }} table, tbody, tr, td {{ display: block; border: 0 }}
  tr {{ border-bottom: 1px solid var(--line); padding: .4rem 0 }}
  td {{ display: grid; grid-template-columns: 8rem 1fr; padding: .05rem 0 }} td:empty {{ display: none }}
  td::before {{ content: attr(data-label); color: var(--soft) }} td:first-child {{ font-weight: 650 }}
}}
</style></head><body>
{body}
<script>
const box = document.getElementById("filter");
if (box) {{
  const folded = new Map([...document.querySelectorAll("details")].map(d => [d, d.open]));
  box.hidden = false;
  box.oninput = () => {{
    const words = box.value.toLowerCase().split(" ").filter(Boolean);
    for (const row of document.querySelectorAll("tbody tr"))
      row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
    for (const [d, open] of folded) d.open = words.length ? !!d.querySelector("tbody tr:not([hidden])") : open;
  }};
}}
</script>
</body></html>
"""


def to_html(report: Report) -> str:
    """One self-contained page."""
    *remarks, verdict = report.conclusion or [""]
    kind = {True: "pass", False: "FAIL", None: ""}[report.ok]
    body = [f"<h1>{_text(report.title)}</h1>"]
    body += [f'<p class="verdict {kind}">{_text(verdict)}</p>'] if verdict else []
    body += [f"<p>{_text(line)}</p>" for line in remarks]
    body += [f'<p class="words">{_text(report.words)}</p>'] if report.words else []
    body.append('<input id="filter" type="search" hidden placeholder="Show only rows with these words, such as: FAIL">')
    tables = sorted(report.tables, key=_is_folded)  # what has to be opened comes last
    body += map(_table, tables)
    body += map(_picture, report.pictures)
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
        f"<details{'' if _is_folded(table) else ' open'}><summary>{_text(table.title)} "
        f'<span class="count">{count}</span></summary><div><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _cell(cell: str, label: str) -> str:
    kind = f' class="{cell.replace(" ", "-")}"' if cell in COLOURS else ""
    if isinstance(cell, Bar):
        kind = f' class="bar" style="--share: {cell.share:.1%}"'
    return f'<td data-label="{_text(label)}"{kind}>{_text(cell)}</td>'


def _picture(picture: Picture) -> str:
    encoded = base64.b64encode(picture.png).decode()
    return (
        f'<figure><b>{_text(picture.title)}</b><br><img alt="Heat map of the error over query row and head: '
        f'{_text(picture.title)}" src="data:image/png;base64,{encoded}">'
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
    )


def _text(value: object) -> str:
    return html.escape(str(value))
