"""The output of verify's commands, as values: a Report of tables and pictures. output.py, page.py and pictures.py show
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from .reading import value_of

# Verdict cells, and their colours on a terminal.
COLOURS = {
    "pass": "green", "FAIL": "bold red", "declined": "yellow", "not supported": "yellow", "right to fp32": "green",
    "not asked": "yellow",
}  # fmt: skip
SCOPE = "; judged: "  # stands between a verdict and the features that were judged
TOO_LITTLE = "TOO LITTLE TO SAY"  # begins a verdict on too few answers


def counted(things: Sized, name: str) -> str:
    """Return how many things there are, with their name: "1 row", "2 rows"."""
    return f"{len(things)} {name}" + "s" * (len(things) != 1)


@dataclass(frozen=True)
class Table:
    """A table of text. folded: left out on a terminal, closed on a page; note: explains the figures"""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    note: str = ""

    @property
    def used(self) -> Table:
        """Return the table without its empty columns."""
        kept = [index for index in range(len(self.columns)) if any(row[index] not in ("", "-") for row in self.rows)]
        rows = [[row[index] for index in kept] for row in self.rows]
        return replace(self, columns=[self.columns[index] for index in kept], rows=rows)


# ---- pictures --------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A bar of a picture. value: its length; text: shown behind it; wrong: the answer that was timed is wrong"""

    value: float
    text: str
    wrong: bool = False


@dataclass(frozen=True)
class Bars:
    """A picture of bars: groups of (label, a bar or None for each series), and a line named ``mark`` at the value 1."""

    title: str
    mark: str
    series: Sequence[str]
    groups: Sequence[tuple[str, Sequence[Bar | None]]]
    kind: Literal["bars"] = "bars"

    @property
    def can_be_drawn(self) -> bool:
        return all(len(bars) == len(self.series) for _, bars in self.groups)


@dataclass(frozen=True)
class Curves:
    """A picture of curves: named lines through points (x, y), on logarithmic axes."""

    title: str
    x: str
    y: str
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    kind: Literal["curves"] = "curves"

    @property
    def can_be_drawn(self) -> bool:
        return all(number > 0 for _, points in self.lines for point in points for number in point)


Picture = Bars | Curves


# ---- reports ---------------------------------------------------------------------------------------------------------

OURS = "flash_attn_compat"


@dataclass(frozen=True)
class Report:
    """The results of a command, "verify COMMAND" in ``title``.

    environment: machine and settings; conclusion: closing lines, of which the last is the verdict on ``subject``, the
    judged implementation; under: tables to show right below the verdict; headline: closing lines that a page shows in
    the verdict's box
    """

    title: str
    environment: Mapping[str, str]
    tables: Sequence[Table]
    conclusion: Sequence[str]
    ok: bool
    subject: str = OURS
    pictures: Sequence[Picture] = ()
    under: Sequence[Table] = ()
    headline: Sequence[str] = ()

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Report:
        """Return the report. Raises TypeError, KeyError, ValueError or OverflowError for other JSON"""
        found = value_of(cls, saved)
        are_whole = all(len(row) == len(table.columns) for table in (*found.tables, *found.under) for row in table.rows)
        if not (found.conclusion and are_whole and all(picture.can_be_drawn for picture in found.pictures)):
            raise ValueError("no verdict, a row of another length than its table's, or a picture that cannot be drawn")
        return found
