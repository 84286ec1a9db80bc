"""Tiles that `flash-attn-compat tune` times, by kernel and head dim, because they may be faster on some card.

Each tile fits the architectures that it is listed for. Tuning results may name only these tiles.
"""

from __future__ import annotations

from flash_attn_compat.backends.fused.choosing.tiles import ROLES, SPLIT_K_2, SPLIT_N, TWO_GROUPS, Tile

ENTRIES = ("forward", "dkdv", "dq")

_FOR_TURING: dict[str, dict[int, tuple[Tile, ...]]] = {
    "forward": {
        32: (Tile(32, 4, 2, 3), Tile(64, 8, 1, 2, stages=3), Tile(64, 4, 2, 2), Tile(128, 4, 1, 3)),
        48: (Tile(64, 4, 2, 2), Tile(64, 8, 1, 1), Tile(64, 8, 2, 1, stages=3)),
        64: (Tile(64, 4, 2, 2), Tile(64, 4, 1, 3), Tile(128, 4, 1, 2), Tile(64, 8, 2, 1, stages=3)),
        80: (Tile(32, 4, 2, 2), Tile(64, 8, 1, 1), Tile(64, 4, 1, 2)),
        96: (Tile(32, 4, 2, 2), Tile(64, 8, 1, 1), Tile(64, 4, 1, 2)),
        112: (TWO_GROUPS, Tile(16, 4, 2, 2), Tile(64, 8, 1, 1), Tile(64, 4, 1, 2)),
        128: (
            TWO_GROUPS, Tile(16, 4, 2, 2), Tile(64, 8, 1, 1), Tile(64, 4, 1, 2), Tile(32, 4, 1, 2),
            Tile(32, 8, 1, 1, stages=3),
        ),
        160: (Tile(64, 8, 1, 1), Tile(32, 4, 1, 2)),
        192: (Tile(32, 8, 1, 1, stages=3), Tile(32, 8, 1, 1), Tile(32, 4, 1, 2)),
        224: (Tile(32, 8, 1, 1), Tile(16, 8, 1, 1)),
        256: (Tile(16, 8, 1, 1, stages=3), Tile(16, 8, 1, 1), Tile(32, 4, 1, 1, qk_in_regs=False)),
    },
    "dkdv": {
        32: (Tile(64, 4, 1, 3), Tile(64, 4, 1, 2), Tile(32, 4, 2, 2)),
        48: (Tile(64, 8, 1, 1), Tile(64, 4, 1, 2)),
        64: (Tile(64, 8, 1, 1), Tile(64, 4, 1, 2), Tile(32, 4, 1, 2), Tile(32, 8, 1, 1, stages=3)),
        80: (Tile(32, 8, 1, 1), Tile(32, 4, 1, 2), Tile(32, 8, 1, 1, stages=3)),
        96: (Tile(32, 8, 1, 1), Tile(32, 4, 1, 2)),
        112: (Tile(16, 8, 1, 1), Tile(16, 4, 1, 2)),
        128: (Tile(16, 8, 1, 1), Tile(16, 4, 1, 2, qk_in_regs=False), Tile(16, 4, 1, 2), Tile(32, 8, 1, 1, stages=3)),
        160: (ROLES, SPLIT_N, SPLIT_K_2),
        192: (ROLES, SPLIT_N, SPLIT_K_2),
    },
    "dq": {
        32: (Tile(32, 4, 2, 2), Tile(64, 4, 1, 3)),
        64: (
            Tile(32, 4, 2, 2), Tile(32, 8, 2, 1, stages=3), Tile(32, 4, 2, 2, vo_in_regs=False), Tile(64, 4, 1, 2),
            Tile(32, 4, 1, 3),
        ),
        80: (Tile(16, 4, 2, 2), Tile(64, 8, 1, 1), Tile(64, 4, 1, 2)),
        96: (Tile(64, 8, 1, 1), Tile(32, 4, 1, 2)),
        112: (Tile(64, 8, 1, 1), Tile(32, 8, 1, 1), Tile(32, 4, 1, 2)),
        128: (Tile(32, 8, 1, 1), Tile(32, 4, 1, 2), Tile(32, 8, 1, 1, stages=3)),
        160: (Tile(16, 8, 1, 1), Tile(16, 4, 1, 2)),
        192: (Tile(16, 4, 1, 2), Tile(16, 8, 1, 1), Tile(32, 8, 1, 1, split_n=1)),
        256: (Tile(32, 8, 1, 1, split_n=1), Tile(16, 4, 1, 1, vo_in_regs=False)),
    },
}  # fmt: skip
# From sm_80 on a multiprocessor has 100 KB or more of shared memory, so a block can keep its stationary operands there.
_SHARED = {"qk_in_regs": False, "vo_in_regs": False, "cp_async": True}
_FOR_NEWER: dict[str, dict[int, tuple[Tile, ...]]] = {
    "forward": {
        64: (Tile(64, 4, 2, 2), Tile(64, 4, 1, 3), Tile(128, 4, 1, 2)),
        128: (Tile(64, 4, 2, 1, qk_in_regs=False), Tile(64, 4, 1, 2)),
    },
    "dkdv": {
        64: (Tile(32, 4, 2, 2, **_SHARED), Tile(64, 4, 1, 2, cp_async=True)),
        128: (Tile(64, 4, 1, 1, **_SHARED), Tile(32, 4, 1, 2, **_SHARED)),
    },
    "dq": {
        64: (Tile(64, 4, 2, 1, cp_async=True), Tile(64, 4, 2, 1, **_SHARED), Tile(64, 4, 1, 2)),
        128: (Tile(64, 4, 1, 1, cp_async=True), Tile(32, 4, 1, 2, cp_async=True)),
    },
}


def candidate_tiles(entry: str, number: int, D: int) -> tuple[Tile, ...]:
    """Return the tiles to time; they may include the table's. number: architecture, such as 75; D: one of HEAD_DIMS."""
    table = _FOR_NEWER if number >= 80 else _FOR_TURING
    return table.get(entry, {}).get(D, ())
