"""The tiles of the fused kernels: their sizes, and those that calls on Turing take, by entry and head dim.

variants.py has the rules for newer GPUs, and chooses; candidates.py lists the tiles among which ``tune`` looks.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """The size of a block's tile, its warps, and the operands that stay in registers instead of shared memory."""

    streamed_rows: int  # streamed rows (keys; queries for dkdv) of one turn of the main loop
    warps: int
    mma_m: int  # tiles of 16 stationary rows (queries; keys for dkdv) of each warp
    min_blocks: int  # blocks that a multiprocessor has registers for
    qk_in_regs: bool = True  # the stationary operand of S = Q K^T lies in registers, else in shared memory
    vo_in_regs: bool = True  # the same for dP = dO V^T, in a backward
    cp_async: bool = False  # a backward loads by cp.async where the GPU has it
    split_n: int = 0  # 1: two warps of a backward share rows, and each computes half of the gradients' channels
    split_k: int = 0  # 2^split_k warps share rows; each multiplies a share of all channels, and they add up scores
    roles: bool = False  # two warps of a backward share rows; one computes P, the other dP
    stages: int = 1  # tiles of each streamed operand in shared memory
    load_v_with_k: bool = False  # a forward with one stage loads V with K, not after it
    ds_over_q: bool = False  # dkdv with dq stores dS over its tile of Q, which then has one slot

    @property
    def rows(self) -> int:
        """Stationary rows of a block."""
        return (self.warps >> (self.split_n + self.split_k + self.roles)) * self.mma_m * 16

    def macros(self) -> list[tuple[str, int]]:
        """Of every kernel with tiles."""
        found = [("STREAMED_ROWS", self.streamed_rows), ("WARPS", self.warps), ("MMA_M", self.mma_m)]
        return [*found, ("MIN_BLOCKS", self.min_blocks), ("QK_IN_REGS", int(self.qk_in_regs))]


class Choice(NamedTuple):
    """small: the tile for few rows and narrow windows, which would leave most of a tall tile empty or masked"""

    usual: Tile
    small: Tile


SPLIT_N = Tile(32, 8, 1, 1, split_n=1)
ROLES = Tile(16, 8, 1, 1, roles=True, stages=3)
SPLIT_K_2, SPLIT_K_4 = Tile(16, 8, 1, 1, split_k=1), Tile(16, 8, 1, 1, split_k=2)
# For sm_75: among tiles that hardly spill the best by the model of benchmarks.kernel_report, or by the simulation of
# benchmarks.turing_sm where that is clear (docs/kernels.md).
TURING: dict[str, dict[int, Choice]] = {
    "forward": {
        16: Choice(Tile(128, 4, 1, 3), Tile(64, 4, 1, 3)),
        32: Choice(Tile(128, 4, 1, 3), Tile(64, 4, 1, 3)),
        48: Choice(Tile(64, 4, 2, 2), Tile(64, 4, 1, 3)),
        64: Choice(Tile(64, 4, 2, 2), Tile(64, 4, 1, 3)),
        80: Choice(Tile(32, 4, 2, 2), Tile(64, 4, 1, 2)),
        96: Choice(Tile(32, 4, 2, 2), Tile(64, 4, 1, 2)),
        112: Choice(Tile(64, 8, 1, 1), Tile(64, 4, 1, 2)),
        128: Choice(Tile(64, 8, 1, 1), Tile(64, 4, 1, 2)),
        160: Choice(Tile(64, 8, 1, 1), Tile(32, 4, 1, 2)),
        192: Choice(Tile(32, 8, 1, 1, stages=3), Tile(32, 4, 1, 2)),
        224: Choice(Tile(32, 8, 1, 1), Tile(16, 4, 1, 2)),
        256: Choice(Tile(16, 8, 1, 1), Tile(16, 4, 1, 2)),
        512: Choice(SPLIT_K_2, SPLIT_K_2),
    },
    "dkdv": {
        16: Choice(Tile(64, 4, 1, 3), Tile(64, 4, 1, 3)),
        32: Choice(Tile(64, 4, 1, 3), Tile(64, 4, 1, 2)),
        48: Choice(Tile(64, 4, 1, 2), Tile(64, 4, 1, 2)),
        64: Choice(Tile(64, 8, 1, 1), Tile(64, 4, 1, 2)),
        80: Choice(Tile(32, 4, 1, 2), Tile(32, 4, 1, 2)),
        96: Choice(Tile(32, 8, 1, 1, stages=3), Tile(32, 4, 1, 2)),
        112: Choice(Tile(32, 8, 1, 1, stages=3), Tile(16, 4, 1, 2)),
        128: Choice(Tile(32, 8, 1, 1, stages=3), Tile(16, 4, 1, 2, qk_in_regs=False)),
        160: Choice(ROLES._replace(streamed_rows=32, stages=2), SPLIT_N),
        192: Choice(ROLES._replace(streamed_rows=32, stages=2), SPLIT_N),
        224: Choice(SPLIT_K_2, SPLIT_K_2),
        256: Choice(ROLES, SPLIT_K_2),
        512: Choice(SPLIT_K_4, SPLIT_K_4),
    },
    "dq": {
        16: Choice(Tile(32, 4, 2, 2), Tile(64, 4, 1, 3)),
        32: Choice(Tile(32, 4, 2, 2), Tile(64, 4, 1, 3)),
        48: Choice(Tile(32, 4, 2, 2), Tile(32, 4, 1, 3)),
        64: Choice(Tile(32, 4, 2, 2), Tile(64, 4, 1, 2)),
        80: Choice(Tile(16, 4, 2, 2), Tile(64, 4, 1, 2)),
        96: Choice(Tile(64, 8, 1, 1), Tile(32, 4, 1, 2)),
        112: Choice(Tile(32, 8, 1, 1, stages=3), Tile(32, 4, 1, 2)),
        128: Choice(Tile(32, 8, 1, 1, stages=3), Tile(32, 4, 1, 2)),
        160: Choice(Tile(16, 4, 1, 2), SPLIT_N),
        192: Choice(Tile(16, 4, 1, 2), SPLIT_N),
        224: Choice(SPLIT_N, SPLIT_N),
        256: Choice(SPLIT_N, SPLIT_N),
        512: Choice(SPLIT_K_4, SPLIT_K_4),
    },
}

# Under dense masks and for unaligned rows, where the usual tile would spill more than other tiles do.
CROWDED = {("dkdv", 112): Tile(16, 8, 1, 1), ("dkdv", 128): Tile(16, 8, 1, 1)}
