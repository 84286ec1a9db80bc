"""What verify's commands say, as values: a Report of tables and pictures. How it is shown is the business of output.py,
page.py and pictures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from .reading import value_of

# Cells that say how something went, and how a terminal shows them.
COLOURS = {
    "pass": "green", "FAIL": "bold red", "declined": "yellow", "not supported": "yellow", "right to fp32": "green",
    "not asked": "yellow",
}  # fmt: skip
TOO_LITTLE = "TOO LITTLE TO SAY"  # begins a verdict that is none


@dataclass(frozen=True)
class Table:
    """folded: for those who ask: not on a terminal, and on a page to be opened; note: what its figures are."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    note: str = ""

    @property
    def used(self) -> Table:
        """Without the columns in which nobody has anything."""
        kept = [index for index in range(len(self.columns)) if any(row[index] not in ("", "-") for row in self.rows)]
        rows = [[row[index] for index in kept] for row in self.rows]
        return replace(self, columns=[self.columns[index] for index in kept], rows=rows)


# ---- pictures --------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """value: its length; text: what is written behind it; wrong: that of a wrong answer."""

    value: float
    text: str
    wrong: bool = False


@dataclass(frozen=True)
class Bars:
    """A group of bars under each label, one of each series, None where there is none; a mark across all at 1."""

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
    """Named lines of (x, y), on logarithmic axes."""

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
    """What `verify COMMAND` found, titled so: where it was obtained, tables, closing lines, the last the verdict on the
    subject, which is whose answers were judged; and what stands right under the verdict.
    """

    title: str
    environment: Mapping[str, str]
    tables: Sequence[Table]
    conclusion: Sequence[str]
    ok: bool
    subject: str = OURS
    pictures: Sequence[Picture] = ()
    under: Sequence[Table] = ()

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Report:
        """Raises TypeError, KeyError, ValueError or OverflowError for what is no report."""
        found = value_of(cls, saved)
        are_whole = all(len(row) == len(table.columns) for table in (*found.tables, *found.under) for row in table.rows)
        if not (found.conclusion and are_whole and all(picture.can_be_drawn for picture in found.pictures)):
            raise ValueError("no verdict, a row of another length than its table's, or a picture that cannot be drawn")
        return found
