"""What verify's commands say, as values: a Report of tables. How it is shown is output.py's and page.py's business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# Cells that say how something went, and how a terminal shows them.
COLOURS = {"pass": "green", "FAIL": "bold red", "declined": "yellow", "not supported": "yellow"}
# The characters of a heat map, from within tolerance up, each ten times worse than the one before.
SHADES = "·░▒▓█"


@dataclass(frozen=True)
class Table:
    """folded: for those who ask: not on a terminal, and on a page to be opened."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False

    @property
    def used(self) -> Table:
        """Without the columns in which nobody has anything."""
        kept = [index for index in range(len(self.columns)) if any(row[index] not in ("", "-") for row in self.rows)]
        rows = [[row[index] for index in kept] for row in self.rows]
        return Table(self.title, [self.columns[index] for index in kept], rows, self.folded)


@dataclass(frozen=True)
class Report:
    """What `verify COMMAND` found, titled so: where it was obtained, tables, closing lines, the last the verdict."""

    title: str
    environment: Mapping[str, str]
    tables: Sequence[Table]
    conclusion: Sequence[str]
    ok: bool

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Report:
        """Raises KeyError or TypeError for what is no report."""
        values = {field.name: saved[field.name] for field in fields(cls)}
        return cls(**values | {"tables": [Table(**table) for table in saved["tables"]]})
