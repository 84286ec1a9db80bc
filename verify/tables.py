"""What verify's commands say, as values: a Report of tables. How it is shown is output.py's and page.py's business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Cells that say how something went, and how a terminal shows them.
COLOURS = {"pass": "green", "FAIL": "bold red", "not supported": "yellow"}


class Bar(str):
    """A cell that a page underlays with a bar of this length, 1 being the width of the column."""

    __slots__ = ("share",)
    share: float

    def __new__(cls, text: str, share: float) -> Bar:
        cell = super().__new__(cls, text)
        cell.share = min(max(share, 0.0), 1.0)
        return cell


@dataclass(frozen=True)
class Table:
    """folded: on a page, to be opened; for what most readers do not need."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass(frozen=True)
class Picture:
    png: bytes
    title: str
    caption: str


@dataclass(frozen=True)
class Report:
    """A title, where it was obtained, tables, and closing lines, the last of them the verdict.

    ok: how the verdict is, None where there is none; words: a paragraph for everyone
    """

    title: str
    environment: Mapping[str, str]
    tables: Sequence[Table]
    conclusion: Sequence[str] = ()
    ok: bool | None = None
    words: str = ""
    pictures: Sequence[Picture] = ()
