"""How many blocks a launch has for the tiles of a head: as many as the longest sequence needs for each, or for all.

Nothing is read from the GPU. Of packed sequences the host knows how many there are, all their tokens, and what the
caller says of the longest. Where that is far above most of them, almost all of its blocks would have nothing to do.
"""

from __future__ import annotations

from typing import NamedTuple

# Neighbouring seats of one head whose blocks stand together, and so share its keys in the L2 cache.
_TOGETHER = 64
# Blocks that a GPU starts in no time, and more than it holds at once: splits pay with fewer alone.
_FEW = 1024


class Grid(NamedTuple):
    """Blocks of one head: ``tiles`` a slab. A slab is a sequence, or some of the ``seats`` that all have together."""

    tiles: int
    slabs: int
    seats: int = 0


def grid(
    longest: int, rows: int, batch: int, heads: int, total: int | None, clears: bool = True, shares: bool = False
) -> Grid:
    """Of tiles of ``rows`` in sequences of up to ``longest``.

    heads: or whatever else there are such blocks for; total: tokens of packed sequences
    clears: whether blocks set the tokens to 0 that lie outside of all; shares: seats even where they do not pay
    """
    found = apart(longest, rows, batch, total is not None and clears)
    if total is None:
        return found
    # Seat in cuda/common.cuh: sequence i has those from its first token // rows + i on; and one is left for none.
    seats, blocks = total // rows + batch + 1, found.tiles * batch
    if not shares and (blocks * heads <= _FEW or blocks <= 2 * seats):
        return found
    slabs = -(-seats // _TOGETHER)
    return Grid(_TOGETHER, slabs, _TOGETHER * slabs)


def apart(longest: int, rows: int, batch: int, clears: bool) -> Grid:
    """The same where each sequence has blocks of its own; with one slab more for what lies outside of all."""
    return Grid(-(-longest // rows), batch + clears)
