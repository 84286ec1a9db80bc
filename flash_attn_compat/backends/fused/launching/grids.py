"""The grid of a launch: blocks for the tiles of each head, and splits where a call has too few tiles for the GPU.

Each sequence gets as many blocks as the longest one needs, or all sequences share a grid. Splits share the keys, or the
query heads, of one tile. Nothing is read from the GPU. Of packed sequences the host knows the count, the total of
tokens, and the caller's maximum. If that maximum is far above most lengths, almost all blocks of a grid by sequence
would be idle.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flash_attn_compat.backends.fused.choosing.kinds import FEW_ROWS, ONE_TILE
from flash_attn_compat.backends.fused.choosing.variants import Variant

# Tiles of one head in a group of a shared grid: their blocks are adjacent, and so share its keys in the L2 cache.
_TILES_PER_GROUP = 64
# A GPU starts so many blocks in negligible time. It holds fewer at once, so splits pay only below this.
_FEW_BLOCKS = 1024
# The fewest keys worth a split, and the most splits of a tile.
_SPLIT_KEYS = {"forward": 256, "decode": 64}
_MAX_SPLITS = 256
# Splits of a decoding step that are merged in the time of one step over _SPLIT_KEYS keys: on an H100 0.12 us each, and
# 1.1 us for the step. More splits than sqrt(_MERGED_PER_STEP * steps) cost more than they save.
_MERGED_PER_STEP = 9
# Lanes of a warp take a split each when it merges; so few more splits cost a second turn, and save less.
_LANES, _LITTLE_MORE = 32, 36
# The fewest query rows worth a split of dkdv: they cost as much as storing its gradients and adding them up.
_SPLIT_ROWS = 512
# Rows of Turing's tall tiles; the fewest and the most rows, and the most keys, of calls for which they may be too few.
_TALL, _MIDDLE_LENGTHS = 128, (256, 512)
# The most small tiles of a sequence that are compared with tall ones, and the head dims whose tall tiles, of which a
# multiprocessor holds one, are no faster.
_MOST_SMALL, _ALIKE = 5, range(112, 193)
# Rows over which one block may walk however idle the GPU is.
_FEW_ROWS = 256
# KB of shared memory of a multiprocessor by architecture, and the minimum for all other architectures.
_SHARED, _MIN_SHARED = {75: 64, 80: 164, 87: 164, 90: 228, 100: 228, 103: 228}, 100


class Grid(NamedTuple):
    """Blocks of one head: ``tiles`` for each of ``groups``.

    A group is a sequence. In a shared grid it is a part of the ``varlen_tiles`` of all sequences; 0 in other grids.
    """

    tiles: int
    groups: int
    varlen_tiles: int = 0


def choose_grid(
    longest: int, rows: int, batch: int, heads: int, total: int | None, clears: bool = True, shares: bool = False
) -> Grid:
    """Return the grid for tiles of ``rows`` in sequences of at most ``longest``.

    heads: heads, or other units, that each have such a grid; total: tokens of packed sequences, None for dense ones. If
        they are more than longest * batch, some sequence is longer: a shared grid is enough for any lengths
    clears: whether blocks set tokens outside of all sequences to 0; shares: share a grid even where it does not pay
    """
    grid = per_sequence_grid(longest, rows, batch, total is not None and clears)
    if total is None:
        return grid
    # As VarlenTile in cuda: the tiles of sequence i start at its first token // rows + i; the last one is left unused.
    varlen_tiles, blocks = total // rows + batch + 1, grid.tiles * batch
    if not shares and total <= longest * batch and (blocks * heads <= _FEW_BLOCKS or blocks <= 2 * varlen_tiles):
        return grid
    groups = -(-varlen_tiles // _TILES_PER_GROUP)
    return Grid(_TILES_PER_GROUP, groups, _TILES_PER_GROUP * groups)


def per_sequence_grid(longest: int, rows: int, batch: int, clears: bool) -> Grid:
    """Return the grid where each sequence has its own blocks; ``clears``: one more group for tokens outside of all."""
    return Grid(-(-longest // rows), batch + clears)


def fills_gpu(rows: int, keys: int, heads: int, processors: int) -> bool:
    """Return whether tall tiles of dense sequences give each multiprocessor work; True for very short and long ones.

    heads: of all sequences together
    """
    is_middle = _MIDDLE_LENGTHS[0] <= rows <= _MIDDLE_LENGTHS[1] >= keys
    return not is_middle or -(-rows // _TALL) * heads > processors


def takes_small_tiles(rows: int, head_dim: int, local: bool) -> bool:
    """Return whether small tiles pay on Turing: tall ones would be emptier, or hide more, or be no faster (_ALIKE).

    rows: of the longest sequence; head_dim: the larger one; local: under a causal mask, or in a window
    """
    tiles = -(-rows // FEW_ROWS)
    if tiles % 2:
        return tiles <= _MOST_SMALL
    return (tiles == 2 and local) or (tiles <= 4 and head_dim in _ALIKE)


def choose_one_tile(rows: int, keys: int, size: int, heads: int, processors: int) -> int:
    """Return the keys of the tile that holds each sequence's keys, one of ONE_TILE; 0 where it does not pay.

    Its blocks walk over all rows of a head: few heads of many rows would leave multiprocessors idle.
    size: of a head, one of HEAD_DIMS; heads: key heads of all sequences together
    """
    if keys == 0 or (rows > _FEW_ROWS and heads < 4 * processors):
        return 0
    return next((tile for tile, sizes in ONE_TILE.items() if keys <= tile and size in sizes), 0)


def resident_blocks(variant: Variant, processors: int, number: int) -> int:
    """Return the blocks of a variant that run at once on ``processors`` multiprocessors of architecture ``number``.

    Registers (or 8 warps) and shared memory bound them.
    """
    macros = dict(variant.macros)
    used = variant.shared + 1024 * (number >= 80)  # CUDA reserves 1 KB of each block there
    room = _SHARED.get(number, _MIN_SHARED) * 1024 // max(used, 1)
    by_warps = 256 // variant.threads * macros.get("MMA_K16", 0)
    return processors * max(1, min(room, max(macros["MIN_BLOCKS"], by_warps)))


def count_splits(variant: Variant, tiles: int, keys: int, resident: int) -> int:
    """Return the splits of one tile of rows: as many blocks as the GPU holds at once (benchmarks/kernel_tiles.py).

    variant: of forward or decode; tiles: of the whole call; keys: the most that a tile sees, or the cache's capacity
    resident: the GPU's resident blocks.
    The kernel uses fewer splits for a short sequence.
    """
    macros = dict(variant.macros)
    if variant.entry == "forward" and macros["D"] > 192 and not macros.get("MMA_K16", 0):
        return 1  # the kernel has no registers left for it
    steps = -(-keys // _SPLIT_KEYS[variant.entry])
    most = min(steps, _MAX_SPLITS)
    if variant.entry == "decode":
        most = min(most, round(math.sqrt(_MERGED_PER_STEP * steps)))
    found = max(1, min(resident // tiles, most))
    return _LANES if variant.entry == "decode" and _LANES < found <= _LITTLE_MORE else found


def count_head_splits(variant: Variant, blocks: int, group: int, rows: int, resident: int) -> int:
    """Return the splits of one tile of keys by query heads. All splits have equally many heads, except the last.

    variant: of dkdv; blocks: of the whole call; group: query heads of a key head; rows: queries of each head
    resident: the GPU's resident blocks
    """
    # Under a mask some blocks finish early: twice as many blocks keep the GPU busy.
    room = resident * (2 if dict(variant.macros).get("LOCAL") else 1)
    most = max(1, min(room // blocks, group, group * rows // _SPLIT_ROWS))
    return -(-group // -(-group // most))


def split_bytes(variant: Variant) -> int:
    """Return the most bytes that one split of a tile stores for the last split, in fp32.

    Forward and decode store a result with the maxima and sums of its rows, dkdv two gradients.
    """
    macros = dict(variant.macros)
    D = macros["D"]
    DV = macros.get("DV", D)
    return 4 * variant.rows * (D + DV if variant.entry == "dkdv" else DV + (8 << macros.get("SPLIT_K", 0)))
