"""The progress of a command that takes minutes, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_LINES = 20


def show_progress(items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Item]:
    """Yield the items and move a bar; without rich, or without a terminal, print about 20 lines instead."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield from _print_lines(items, label)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _print_lines(items, label)
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(items))
        for item in items:
            progress.update(task, description=label(item))
            yield item
            progress.advance(task)


def _print_lines(items: Sequence[Item], label: Callable[[Item], str]) -> Iterator[Item]:
    printed = -1
    for number, item in enumerate(items, 1):
        share = number * _LINES // len(items)
        if share != printed:
            printed = share
            print(f"{number}/{len(items)} {label(item)}".rstrip(), file=sys.stderr, flush=True)
        yield item
