"""How many blocks a launch has: as many as the longest sequence needs for the tiles of a head, for each or for all.

Where a call has too few tiles for the GPU, splits share the keys, or the query heads, of one tile.

Nothing is read from the GPU. Of packed sequences the host knows how many there are, all their tokens, and what the
caller says of the longest. Where that is far above most of them, almost all of its blocks would have nothing to do.
"""

from __future__ import annotations

from typing import NamedTuple

from flash_attn_compat.backends.fused.variants import Variant

# Neighbouring seats of one head whose blocks stand together, and so share its keys in the L2 cache.
_SEATS_PER_SLAB = 64
# Blocks that a GPU starts in no time, and more than it holds at once: splits pay with fewer alone.
_FEW_BLOCKS = 1024
# Keys that are worth a block of their own, and blocks that share a tile's keys at most.
_SPLIT_KEYS = {"forward": 256, "decode": 64}
_MAX_SPLITS = 256
# Rows of queries worth a block of their own in dkdv: they cost as much as leaving its gradients and adding them up.
_SPLIT_ROWS = 512
# KB of shared memory that a multiprocessor has for its blocks, by architecture; and of those that are not named here.
_SHARED, _MIN_SHARED = {75: 64, 80: 164, 87: 164, 90: 228, 100: 228, 103: 228}, 100


class Grid(NamedTuple):
    """Blocks of one head: ``tiles`` a slab. A slab is a sequence, or some of the ``seats`` that all have together."""

    tiles: int
    slabs: int
    seats: int = 0


def choose_grid(
    longest: int, rows: int, batch: int, heads: int, total: int | None, clears: bool = True, shares: bool = False
) -> Grid:
    """Of tiles of ``rows`` in sequences of up to ``longest``.

    heads: or whatever else there are such blocks for; total: tokens of packed sequences. Where they are more than so
        many sequences hold, one is longer: seats are enough for any lengths
    clears: whether blocks set the tokens to 0 that lie outside of all; shares: seats even where they do not pay
    """
    found = per_sequence_grid(longest, rows, batch, total is not None and clears)
    if total is None:
        return found
    # Seat in cuda/common.cuh: sequence i has those from its first token // rows + i on; and one is left for none.
    seats, blocks = total // rows + batch + 1, found.tiles * batch
    if not shares and total <= longest * batch and (blocks * heads <= _FEW_BLOCKS or blocks <= 2 * seats):
        return found
    slabs = -(-seats // _SEATS_PER_SLAB)
    return Grid(_SEATS_PER_SLAB, slabs, _SEATS_PER_SLAB * slabs)


def per_sequence_grid(longest: int, rows: int, batch: int, clears: bool) -> Grid:
    """The same where each sequence has blocks of its own; with one slab more for what lies outside of all."""
    return Grid(-(-longest // rows), batch + clears)


class Gpu(NamedTuple):
    """Its multiprocessors, and the architecture's number, as 75."""

    processors: int
    number: int

    def resident_blocks(self, variant: Variant) -> int:
        """Blocks of a variant at once: as many as registers are bounded for, or 8 warps, if shared memory suffices."""
        macros = dict(variant.macros)
        taken = variant.shared + 1024 * (self.number >= 80)  # the system has some of each block's there
        room = _SHARED.get(self.number, _MIN_SHARED) * 1024 // max(taken, 1)
        return self.processors * max(1, min(room, max(macros["MINB"], 256 // variant.threads * macros.get("MMA16", 0))))


def count_splits(variant: Variant, tiles: int, keys: int, gpu: Gpu) -> int:
    """Blocks for the keys of one tile of rows, as many as the GPU holds at once (benchmarks/kernel_tiles.py).

    variant: of forward or decode; tiles: of the whole call; keys: that a tile can see, or the capacity. The kernel uses
    fewer where a sequence turns out to be short.
    """
    macros = dict(variant.macros)
    if variant.entry == "forward" and macros["D"] > 192 and not macros.get("MMA16", 0):
        return 1  # the kernel has no registers left for it
    return max(1, min(gpu.resident_blocks(variant) // tiles, -(-keys // _SPLIT_KEYS[variant.entry]), _MAX_SPLITS))


def count_head_splits(variant: Variant, blocks: int, group: int, rows: int, gpu: Gpu) -> int:
    """Blocks for the query heads of one tile of keys: all have as many of them, but for the last.

    variant: of dkdv; blocks: of the whole call; group: heads; rows: queries of each
    """
    # Under a mask some blocks are short: with twice as many, others take their place.
    room = gpu.resident_blocks(variant) * (1 + dict(variant.macros).get("LOCAL", 0))
    most = max(1, min(room // blocks, group, group * rows // _SPLIT_ROWS))
    return -(-group // -(-group // most))


def split_bytes(variant: Variant) -> int:
    """What one split of a tile leaves for the last one, at most, in fp32.

    The result, with maxima and sums of its rows; of dkdv, two gradients.
    """
    macros = dict(variant.macros)
    D = macros["D"]
    DV = macros.get("DV", D)
    return 4 * variant.rows * (D + DV if variant.entry == "dkdv" else DV + (8 << macros.get("SUMS", 0)))
