"""The grid of a launch: blocks for the tiles of each head; and splits, if a call has too few tiles to fill the GPU.

Each sequence gets as many blocks as the longest one needs, or all sequences share a grid. Splits are blocks that share
the keys, or the query heads, of one tile. Nothing is read from the GPU: the host knows only the number of packed
sequences, the total of tokens, and the caller's maximum. If this maximum is far above most lengths, most blocks of a
grid by sequence would be idle, and sequences share a grid.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flash_attn_compat.backends.fused.choosing.kinds import FEW_ROWS, ONE_TILE
from flash_attn_compat.backends.fused.choosing.variants import Variant

# Tiles of one head in a group of a shared grid. Their blocks run next to each other, and share keys in the L2 cache.
_TILES_PER_GROUP = 64
# Up to so many blocks, idle ones cost negligible time, and a shared grid does not pay.
_FEW_BLOCKS = 1024
# The fewest keys for which a split pays, by kernel, and the most splits of a tile.
_SPLIT_KEYS = {"forward": 256, "decode": 64}
_MAX_SPLITS = 256
# How many splits the decode kernel merges in the time that it takes for _SPLIT_KEYS keys: on an H100 a merge takes
# 0.12 us, and the keys 1.1 us. More splits than sqrt(_MERGED_PER_STEP * steps) cost more than they save.
_MERGED_PER_STEP = 9
# Each of the 32 lanes of a warp merges one split. 33 to 36 splits need a second turn, which costs more than they save.
_LANES, _LITTLE_MORE = 32, 36
# The fewest query rows for which a split of dkdv pays: so many take as long as storing and adding up its gradients.
_SPLIT_ROWS = 512
# Rows of Turing's tall tiles. In calls of 256 to 512 rows, and at most 512 keys, they may be too few to fill the GPU.
_TALL, _MIDDLE_LENGTHS = 128, (256, 512)
# Small tiles may pay for sequences of up to _MOST_SMALL of them. At the head dims _ALIKE a multiprocessor holds only
# one tall tile, and tall tiles are no faster than small ones.
_MOST_SMALL, _ALIKE = 5, range(112, 193)
# Up to so many rows, one block may take all rows of a head, even if most of the GPU stays idle.
_FEW_ROWS = 256
# KB of shared memory of a multiprocessor, by architecture, and the least that any other architecture has.
_SHARED, _MIN_SHARED = {75: 64, 80: 164, 87: 164, 90: 228, 100: 228, 103: 228}, 100


class Grid(NamedTuple):
    """The blocks of one head: ``groups`` times ``tiles``.

    A group is a sequence, and ``varlen_tiles`` is 0. In a shared grid, a group is a part of the ``varlen_tiles`` tiles
    of all sequences together.
    """

    tiles: int
    groups: int
    varlen_tiles: int = 0


def choose_grid(
    longest: int, rows: int, batch: int, heads: int, total: int | None, clears: bool = True, shares: bool = False
) -> Grid:
    """Return the grid for tiles of ``rows`` rows in sequences of at most ``longest`` rows.

    heads: how many heads, or other units, have such a grid each
    total: tokens of packed sequences, None for dense ones. If it exceeds longest * batch, some sequence is longer than
        ``longest``; then the grid is shared, which is enough for any lengths
    clears: whether blocks set tokens outside of all sequences to 0; shares: share a grid even if it does not pay
    """
    grid = per_sequence_grid(longest, rows, batch, total is not None and clears)
    if total is None:
        return grid
    # As VarlenTile in cuda/base/sequences.cuh: the tiles of sequence i start at its first token // rows + i.
    varlen_tiles, blocks = total // rows + batch + 1, grid.tiles * batch
    if not shares and total <= longest * batch and (blocks * heads <= _FEW_BLOCKS or blocks <= 2 * varlen_tiles):
        return grid
    groups = -(-varlen_tiles // _TILES_PER_GROUP)
    return Grid(_TILES_PER_GROUP, groups, _TILES_PER_GROUP * groups)


def per_sequence_grid(longest: int, rows: int, batch: int, clears: bool) -> Grid:
    """Return the grid in which each sequence has its own blocks.

    clears: whether to add a group of blocks that set tokens outside of all sequences to 0
    """
    return Grid(-(-longest // rows), batch + clears)


def fills_gpu(rows: int, keys: int, heads: int, processors: int) -> bool:
    """Return whether tall tiles give each multiprocessor work; True without a check for very short and long sequences.

    heads: of all sequences together; processors: the GPU's multiprocessors
    """
    is_middle = _MIDDLE_LENGTHS[0] <= rows <= _MIDDLE_LENGTHS[1] >= keys
    return not is_middle or -(-rows // _TALL) * heads > processors


def takes_small_tiles(rows: int, head_dim: int, local: bool) -> bool:
    """Return whether small tiles pay on Turing: tall tiles would be emptier, or more masked, or no faster (_ALIKE).

    rows: of the longest sequence; head_dim: the larger of q's and v's; local: whether there is a causal mask or window
    """
    tiles = -(-rows // FEW_ROWS)
    if tiles % 2:
        return tiles <= _MOST_SMALL
    return (tiles == 2 and local) or (tiles <= 4 and head_dim in _ALIKE)


def choose_one_tile(rows: int, keys: int, size: int, heads: int, processors: int) -> int:
    """Return the size, one of ONE_TILE, of a tile that holds all keys of any sequence; 0 if such a tile does not pay.

    One block then takes all rows of a head, so few heads with many rows would leave multiprocessors idle.
    size: the head dim, one of HEAD_DIMS; heads: key heads of all sequences together
    """
    if keys == 0 or (rows > _FEW_ROWS and heads < 4 * processors):
        return 0
    return next((tile for tile, sizes in ONE_TILE.items() if keys <= tile and size in sizes), 0)


def resident_blocks(variant: Variant, processors: int, number: int) -> int:
    """Return how many blocks of a variant run at once on ``processors`` multiprocessors of architecture ``number``.

    Registers (or 8 warps) and shared memory limit the number.
    """
    macros = dict(variant.macros)
    used = variant.shared + 1024 * (number >= 80)  # from sm_80 on CUDA reserves 1 KB for each block
    room = _SHARED.get(number, _MIN_SHARED) * 1024 // max(used, 1)
    by_warps = 256 // variant.threads * macros.get("MMA_K16", 0)
    return processors * max(1, min(room, max(macros["MIN_BLOCKS"], by_warps)))


def count_splits(variant: Variant, tiles: int, keys: int, resident: int) -> int:
    """Return into how many splits a tile of rows is divided: as many as give the GPU all blocks that it runs at once.

    variant: of forward or decode; tiles: of the whole call; keys: the most that a tile sees, or the cache's capacity
    resident: how many blocks the GPU runs at once
    For a short sequence the kernel itself uses fewer splits.
    """
    macros = dict(variant.macros)
    if variant.entry == "forward" and macros["D"] > 192 and not macros.get("MMA_K16", 0):
        return 1  # Turing's forward has no registers left for splits
    steps = -(-keys // _SPLIT_KEYS[variant.entry])
    most = min(steps, _MAX_SPLITS)
    if variant.entry == "decode":
        most = min(most, round(math.sqrt(_MERGED_PER_STEP * steps)))
    found = max(1, min(resident // tiles, most))
    return _LANES if variant.entry == "decode" and _LANES < found <= _LITTLE_MORE else found


def count_head_splits(variant: Variant, blocks: int, group: int, rows: int, resident: int) -> int:
    """Return into how many splits the query heads of a tile of keys are divided; all but the last get equally many.

    variant: of dkdv; blocks: of the whole call; group: query heads of a key head; rows: queries of each head
    resident: how many blocks the GPU runs at once
    """
    # Under a mask some blocks finish early: twice as many blocks keep the GPU busy.
    room = resident * (2 if dict(variant.macros).get("LOCAL") else 1)
    most = max(1, min(room // blocks, group, group * rows // _SPLIT_ROWS))
    return -(-group // -(-group // most))


def split_bytes(variant: Variant) -> int:
    """Return the most bytes that one split of a tile stores in fp32, until the last split merges all of them.

    Splits of forward and decode store a result with the maxima and sums of its rows, those of dkdv two gradients.
    """
    macros = dict(variant.macros)
    D = macros["D"]
    DV = macros.get("DV", D)
    return 4 * variant.rows * (D + DV if variant.entry == "dkdv" else DV + (8 << macros.get("SPLIT_K", 0)))
