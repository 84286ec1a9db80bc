"""The tiles of the fused kernels, in one table: by GPU, kernel and head dim, then by condition.

A call meets several conditions, the most specific first and USUAL last (kinds.conditions). It takes the tile of the
first condition that its row of the table has. candidates.py lists the tiles that ``tune`` times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """The size of a block's tile, its warps, and the operands that stay in registers instead of shared memory."""

    streamed_rows: int  # rows that one turn of the main loop reads: keys; queries in dkdv
    warps: int
    mma_m: int  # how many times 16 stationary rows each warp keeps: queries; keys in dkdv
    min_blocks: int  # how many blocks a multiprocessor must have registers for
    qk_in_regs: bool = True  # the stationary operand of S = Q K^T lies in registers, else in shared memory
    vo_in_regs: bool = True  # the stationary operand of dP = dO V^T, in a backward, lies in registers
    cp_async: bool = False  # a backward loads by cp.async, if the GPU has it
    split_n: int = 0  # 1: two warps of a backward share rows, and each computes half of the gradients' channels
    split_k: int = 0  # 2^split_k warps share rows; each multiplies a part of the channels, and they add up the scores
    roles: bool = False  # two warps of a backward share rows; one computes P, the other dP
    stages: int = 1  # how many tiles of each streamed operand shared memory holds
    load_v_with_k: bool = False  # a forward with one stage loads V together with K, not after it
    ds_over_q: bool = False  # dkdv that also computes dq stores dS over its only tile of Q
    groups: int = 1  # 2: two groups of a forward's warps share rows and Q, and take alternate tiles of keys

    @property
    def rows(self) -> int:
        """How many rows (queries; keys in dkdv) one block keeps."""
        return (self.warps >> (self.split_n + self.split_k + self.roles)) // self.groups * self.mma_m * 16

    def macros(self) -> list[tuple[str, int]]:
        """Return the macros, as (name, value), that give a kernel the size of its tiles."""
        found = [("STREAMED_ROWS", self.streamed_rows), ("WARPS", self.warps), ("MMA_M", self.mma_m)]
        return [*found, ("MIN_BLOCKS", self.min_blocks), ("QK_IN_REGS", int(self.qk_in_regs))]


# Conditions. SHORT_SEQUENCES: sequences fill at most half of a small tile. FEW_ROWS: they fill at most half of a tall
# tile, or tall tiles would leave multiprocessors idle. FEW_ROWS_AND_KEYS, FEW_LOCAL_ROWS, FEW_FREE_ROWS: few rows, and
# the kernel has registers to load V together with K, so that blocks wait less for their first loads. UNLIKE: q and v
# have different head dims. CONVERTED: each tile converts bf16. LESS_SHARED: a multiprocessor has less shared memory
# than an A100's or H100's. LONG: many rows and keys, and nothing changes or hides scores; LONG_FP16: LONG in fp16.
# LONG_CAUSAL: still more rows and keys, in fp16 under a mask without a window. PLAIN and PLAIN_LOCAL:
# aligned calls whose features leave two groups of warps enough registers, without and with a causal mask or window.
# PLAIN_LOCAL_COPIES: PLAIN_LOCAL over fp16 copies of bf16.
SHORT_SEQUENCES, NARROW_WINDOW, SOFTCAP, DROPOUT = "short sequences", "narrow window", "softcap", "dropout"
FEW_ROWS_AND_KEYS, FEW_LOCAL_ROWS, FEW_FREE_ROWS = "few rows and keys", "few local rows", "few free rows"
FEW_ROWS, UNLIKE, BIASES, DENSE_MASK = "few rows", "unlike head dims", "biases", "dense mask"
UNALIGNED, CONVERTED, LOCAL, LESS_SHARED, USUAL = "unaligned", "converted", "local", "less shared memory", "usual"
LONG, LONG_FP16, LONG_CAUSAL = "long", "long fp16", "long causal"
PLAIN, PLAIN_LOCAL, PLAIN_LOCAL_COPIES = "plain", "plain local", "plain local copies"

Row = dict[str, Tile]


def few_keys(keys: int) -> str:
    """Return the condition of a backward in which one tile, of the size ``keys``, holds all keys of a sequence."""
    return f"at most {keys} keys"


SPLIT_N = Tile(32, 8, 1, 1, split_n=1)
ROLES = Tile(16, 8, 1, 1, roles=True, stages=3)
SPLIT_K_2, SPLIT_K_4 = Tile(16, 8, 1, 1, split_k=1), Tile(16, 8, 1, 1, split_k=2)
_K_SHARED = Tile(32, 8, 1, 1, qk_in_regs=False)  # K stays in shared memory, where dq reads it
# As _K_SHARED; dS is stored over the tile of Q.
_OVER_Q = _K_SHARED._replace(ds_over_q=True)
TWO_GROUPS = Tile(32, 8, 2, 1, qk_in_regs=False, groups=2)
_ASYNC = Tile(64, 4, 1, 1, qk_in_regs=False, vo_in_regs=False, cp_async=True)


def _forward(usual: Tile, small: Tile, **others: Tile) -> Row:
    row = dict.fromkeys((NARROW_WINDOW, SOFTCAP, DROPOUT, FEW_ROWS, FEW_LOCAL_ROWS), small)
    early = small._replace(load_v_with_k=True)
    return row | {FEW_FREE_ROWS: early, FEW_ROWS_AND_KEYS: early} | _named(others) | {USUAL: usual}


def _narrow_forward(usual: Tile, small: Tile, **others: Tile) -> Row:
    """Return the row of a head dim up to 64: more blocks fit, and short sequences have a tile of their own."""
    packed = small._replace(min_blocks=4)
    own = {FEW_LOCAL_ROWS: packed, FEW_ROWS_AND_KEYS: packed._replace(load_v_with_k=True)}
    return _forward(usual, small, biases=small, **others) | {SHORT_SEQUENCES: Tile(32, 2, 1, 6)} | own


def _backward(usual: Tile, small: Tile, **others: Tile) -> Row:
    return dict.fromkeys((NARROW_WINDOW, FEW_ROWS), small) | _named(others) | {USUAL: usual}


def _named(others: dict[str, Tile]) -> Row:
    return {name.replace("_", " "): tile for name, tile in others.items()}


# For sm_75: among the tiles that hardly spill registers, the best one by the model of benchmarks.kernel_report, or by
# the simulation of benchmarks.turing_sm if its answer is clear (docs/kernels.md).
TURING: dict[str, dict[int, Row]] = {
    "forward": {
        16: _narrow_forward(Tile(128, 4, 1, 3), Tile(64, 4, 1, 3), converted=Tile(64, 4, 2, 2)),
        32: _narrow_forward(
            Tile(128, 4, 1, 3), Tile(64, 4, 1, 3), converted=Tile(64, 4, 2, 2),
            long_fp16=Tile(64, 8, 1, 2, stages=3), long_causal=Tile(64, 8, 1, 2, stages=3),
        ),
        48: _narrow_forward(Tile(64, 4, 2, 2), Tile(64, 4, 1, 3), long=Tile(64, 8, 2, 1, stages=3)),
        64: _narrow_forward(
            Tile(64, 4, 2, 2), Tile(64, 4, 1, 3),
            long=Tile(64, 8, 2, 1, stages=3), long_causal=Tile(64, 8, 2, 1, stages=3),
        ),
        80: _forward(Tile(32, 4, 2, 2), Tile(64, 4, 1, 2), biases=Tile(64, 4, 1, 2)),
        96: _forward(Tile(32, 4, 2, 2), Tile(64, 4, 1, 2), biases=Tile(64, 4, 1, 2)),
        112: _forward(Tile(64, 8, 1, 1), Tile(64, 4, 1, 2), plain=TWO_GROUPS, plain_local=TWO_GROUPS),
        128: _forward(
            Tile(64, 8, 1, 1), Tile(64, 4, 1, 2),
            plain=TWO_GROUPS, plain_local_copies=TWO_GROUPS, long_causal=TWO_GROUPS,
        ),
        160: _forward(Tile(64, 8, 1, 1), Tile(32, 4, 1, 2)),
        192: _forward(Tile(32, 8, 1, 1, stages=3), Tile(32, 4, 1, 2), biases=Tile(32, 8, 1, 1)),
        224: _forward(Tile(32, 8, 1, 1), Tile(16, 4, 1, 2)),
        256: _forward(Tile(16, 8, 1, 1), Tile(16, 4, 1, 2)),
        512: _forward(SPLIT_K_2, SPLIT_K_2),
    },
    "dkdv": {
        16: _backward(Tile(64, 4, 1, 3), Tile(64, 4, 1, 3), short_sequences=Tile(32, 2, 1, 6)),
        32: _backward(Tile(64, 4, 1, 3), Tile(64, 4, 1, 2), short_sequences=Tile(32, 2, 1, 4))
        | {
            few_keys(32): Tile(32, 2, 1, 3, qk_in_regs=False),
            few_keys(64): Tile(32, 4, 1, 3, qk_in_regs=False),
            **dict.fromkeys((few_keys(96), few_keys(128)), Tile(32, 4, 2, 2, qk_in_regs=False)),
        },
        48: _backward(Tile(64, 4, 1, 2), Tile(64, 4, 1, 2), short_sequences=Tile(32, 2, 1, 4)),
        64: _backward(
            Tile(64, 8, 1, 1), Tile(64, 4, 1, 2), short_sequences=Tile(32, 2, 1, 4), long=Tile(32, 8, 1, 1, stages=3)
        )
        | {
            few_keys(32): Tile(32, 2, 1, 2, qk_in_regs=False),
            few_keys(64): Tile(64, 4, 1, 2, qk_in_regs=False, ds_over_q=True),
            few_keys(96): _K_SHARED,
            few_keys(128): _K_SHARED._replace(streamed_rows=64),
        },
        80: _backward(Tile(32, 4, 1, 2), Tile(32, 4, 1, 2), long_fp16=Tile(32, 8, 1, 1, stages=3)),
        96: _backward(Tile(32, 8, 1, 1, stages=3), Tile(32, 4, 1, 2))
        | {few_keys(64): Tile(32, 4, 1, 2, qk_in_regs=False, ds_over_q=True)},
        112: _backward(
            Tile(32, 8, 1, 1, stages=3), Tile(16, 4, 1, 2), dense_mask=Tile(16, 8, 1, 1), unaligned=Tile(16, 8, 1, 1)
        ),
        128: _backward(
            Tile(32, 8, 1, 1, stages=3), Tile(16, 4, 1, 2, qk_in_regs=False),
            dense_mask=Tile(16, 8, 1, 1), unaligned=Tile(16, 8, 1, 1),
        )
        | {
            few_keys(64): Tile(16, 4, 1, 2, qk_in_regs=False, ds_over_q=True),
            **dict.fromkeys((few_keys(96), few_keys(128)), _OVER_Q),
        },
        160: _backward(ROLES._replace(streamed_rows=32, stages=2), SPLIT_N, unlike_head_dims=SPLIT_N),
        192: _backward(ROLES._replace(streamed_rows=32, stages=2), SPLIT_N, unlike_head_dims=SPLIT_N),
        224: _backward(SPLIT_K_2, SPLIT_K_2),
        256: _backward(ROLES, SPLIT_K_2, unlike_head_dims=SPLIT_K_2),
        512: _backward(SPLIT_K_4, SPLIT_K_4),
    },
    "dq": {
        16: _backward(Tile(32, 4, 2, 2), Tile(64, 4, 1, 3), short_sequences=Tile(32, 2, 1, 6)),
        32: _backward(Tile(32, 4, 2, 2), Tile(64, 4, 1, 3), short_sequences=Tile(32, 2, 1, 6)),
        48: _backward(Tile(32, 4, 2, 2), Tile(32, 4, 1, 3), short_sequences=Tile(32, 2, 1, 6)),
        64: _backward(Tile(32, 4, 2, 2), Tile(64, 4, 1, 2), short_sequences=Tile(32, 2, 1, 4)),
        80: _backward(Tile(16, 4, 2, 2), Tile(64, 4, 1, 2)),
        96: _backward(Tile(64, 8, 1, 1), Tile(32, 4, 1, 2)),
        112: _backward(Tile(32, 8, 1, 1, stages=3), Tile(32, 4, 1, 2)),
        128: _backward(Tile(32, 8, 1, 1, stages=3), Tile(32, 4, 1, 2)),
        160: _backward(Tile(16, 4, 1, 2), SPLIT_N),
        192: _backward(Tile(16, 4, 1, 2), SPLIT_N),
        224: _backward(SPLIT_N, SPLIT_N),
        256: _backward(SPLIT_N, SPLIT_N),
        512: _backward(SPLIT_K_4, SPLIT_K_4),
    },
}  # fmt: skip


def _by_size(*rows: tuple[Sequence[int], Row]) -> dict[int, Row]:
    return {size: row for sizes, row in rows for size in sizes}


def _more_work(usual: Tile, small: Tile, *names: str) -> Row:
    return dict.fromkeys((DROPOUT, BIASES, *names), small) | {USUAL: usual}


# From sm_80 on: the fastest tiles on an H200 by benchmarks/kernel_tiles.py. At head dim 64, a dq that keeps its rows in
# shared memory takes 56 KB, so a multiprocessor with 100 KB would hold one block instead of two.
NEWER: dict[str, dict[int, Row]] = {
    "forward": _by_size(
        ((16, 32), _more_work(Tile(128, 4, 1, 3), Tile(64, 4, 1, 3), NARROW_WINDOW, DENSE_MASK)),
        ((48, 64), _more_work(Tile(64, 4, 2, 2), Tile(64, 4, 1, 3), SOFTCAP, NARROW_WINDOW, FEW_ROWS)),
        ((80, 96, 112, 128), _more_work(Tile(64, 4, 2, 1, qk_in_regs=False), Tile(64, 4, 1, 2), SOFTCAP, FEW_ROWS)),
        ((160, 192), {USUAL: Tile(64, 4, 1, 2)}),
        ((224, 256), {USUAL: Tile(64, 4, 1, 1, qk_in_regs=False)}),
        ((512,), {USUAL: SPLIT_K_2}),
    ),
    "dkdv": _by_size(
        ((16, 32), {USUAL: Tile(64, 4, 1, 2, cp_async=True)}),
        ((48, 64), {USUAL: Tile(32, 4, 2, 2, qk_in_regs=False, vo_in_regs=False, cp_async=True)}),
        ((80, 96, 112, 128), {USUAL: _ASYNC}),
        ((160,), {USUAL: _ASYNC._replace(streamed_rows=32)}),  # dk and dv still fit into registers unsplit
        ((192,), {USUAL: SPLIT_N._replace(cp_async=True)}),
        ((224, 256), {USUAL: SPLIT_K_2._replace(cp_async=True)}),
        ((512,), {USUAL: SPLIT_K_4._replace(cp_async=True)}),
    ),
    "dq": _by_size(
        ((16, 32), {USUAL: Tile(32, 4, 2, 2)}),
        (
            (48, 64),
            dict.fromkeys((LOCAL, LESS_SHARED), Tile(64, 4, 2, 1, cp_async=True))
            | {USUAL: Tile(64, 4, 2, 1, qk_in_regs=False, vo_in_regs=False, cp_async=True)},
        ),
        ((80, 96, 112, 128), {USUAL: Tile(64, 4, 1, 1, cp_async=True)}),
        ((160,), {USUAL: Tile(32, 4, 1, 1, cp_async=True)}),
        ((192,), {USUAL: Tile(32, 4, 1, 1, vo_in_regs=False, cp_async=True)}),
        ((224, 256), {USUAL: Tile(16, 4, 1, 1, qk_in_regs=False, vo_in_regs=False)}),
        ((512,), {USUAL: SPLIT_K_4._replace(cp_async=True)}),
    ),
}


def find_tile(number: int, entry: str, size: int, conditions: Sequence[str]) -> Tile:
    """Return the tile of the first of ``conditions`` that the table's row has.

    number: of the architecture, such as 75; entry: the kernel; size: the head dim
    """
    row = (TURING if number < 80 else NEWER)[entry][size]
    return next(row[one] for one in conditions if one in row)
