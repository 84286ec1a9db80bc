"""Speeds on Turing cards that other projects have published, to judge the simulation by.

The charts are triton-turing's (github.com/Chennesxu/triton-turing, commits 661b7c3f5 of 2026-06-30 and 8dca91406 of
2026-08-06): one Titan RTX, clock not locked, read off to 0.3 TFLOP/s. Rivals of one panel and length ran in turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

TRITON, PEER, PYTORCH = "triton-turing", "flash-attention-turing", "PyTorch"
TOKENS = 2048, 4096, 8192


class Cell(NamedTuple):
    """One panel of a chart at one length."""

    direction: str  # forward or backward
    head_dim: int
    tokens: int


Chart = dict[Cell, dict[str, float]]  # TFLOP/s by kernel


def _chart(panels: dict[tuple[str, int], dict[str, tuple[float, float, float]]]) -> Chart:
    return {
        Cell(direction, head_dim, tokens): {kernel: speeds[place] for kernel, speeds in kernels.items()}
        for (direction, head_dim), kernels in panels.items()
        for place, tokens in enumerate(TOKENS)
    }


JUNE = _chart(
    {
        ("forward", 64): {TRITON: (48.2, 58.4, 64.1), PEER: (38.8, 46.6, 51.1), PYTORCH: (24.9, 27.9, 29.6)},
        ("forward", 128): {TRITON: (44.9, 52.4, 56.5), PEER: (41.8, 48.6, 52.4), PYTORCH: (26.0, 27.7, 28.9)},
        ("backward", 64): {TRITON: (23.4, 28.0, 30.6), PEER: (20.4, 23.4, 25.0), PYTORCH: (16.0, 18.2, 19.0)},
        ("backward", 128): {TRITON: (20.4, 23.1, 24.4), PEER: (24.7, 28.4, 30.3), PYTORCH: (17.0, 18.6, 19.6)},
    }
)
AUGUST = _chart(
    {
        ("forward", 64): {TRITON: (62.7, 69.0, 69.5), PEER: (49.8, 55.4, 57.5), PYTORCH: (31.6, 32.9, 31.0)},
        ("forward", 128): {TRITON: (51.9, 57.4, 55.2), PEER: (48.6, 53.0, 53.1), PYTORCH: (30.1, 28.7, 29.5)},
        ("backward", 64): {TRITON: (36.6, 40.0, 40.0), PEER: (27.2, 29.2, 28.4), PYTORCH: (20.8, 22.2, 21.5)},
        ("backward", 128): {TRITON: (26.5, 27.5, 28.8), PEER: (30.9, 32.9, 33.0), PYTORCH: (21.1, 22.0, 21.6)},
    }
)

# Tensor cores' share of the time by simulation with a T4's constants (2026-11-28): flash-attention-turing's causal
# kernels at 6a55261, and PyTorch 2.15.0+cu132's forward on the paths below; means over eight starts of blocks.
SIMULATED = {
    ("forward", 64): {PEER: 0.565, PYTORCH: 0.318},
    ("forward", 128): {PEER: 0.587, PYTORCH: 0.363},
    ("dkdv", 64): {PEER: 0.384},
    ("dkdv", 128): {PEER: 0.504},
    ("dq", 64): {PEER: 0.373},
    ("dq", 128): {PEER: 0.454},
}

# The path of one turn through PyTorch 2.15.0+cu132's memory-efficient forward for sm_75, without bias, dropout and
# masked scores: the hexadecimal addresses of its basic blocks, and for each of the four warps the blocks that it skips.
_WAYS = {
    64: (
        (
            "2050 20c0 26c0 2770 2770 2cb0 3d40 43c0 4a60 4f50 4f60 4f70 50a0 50b0 50c0 51f0 5200 5210 "
            "5340 5350 5410 54d0 5560 5570 55a0 57e0 57f0 7230 72e0 72f0 8a90 8f40 90f0 9060 9550 90f0 "
            "9550 9660 9680"
        ),
        ("", "7230", "7230 5410 54d0", "7230 5410 54d0"),
    ),
    128: (
        (
            "1f00 1f70 2590 2670 2670 2670 2670 2c40 3bd0 4130 46b0 4b40 4b50 4b60 4c90 4ca0 4cb0 4de0 "
            "4df0 4e00 4f30 4f40 4ff0 50b0 5140 5150 5180 53c0 53d0 6e30 6f20 6f30 87b0 8df0 8fa0 8f10 "
            "9450 8fa0 8f10 9450 8fa0 8f10 9450 8fa0 9450 9570 9590"
        ),
        ("", "4ff0 50b0 6e30", "4ff0 50b0 6e30", "4ff0 50b0 6e30"),
    ),
}


def pytorch_ways(head_dim: int) -> list[list[int]]:
    """Return the path of each warp through PyTorch's forward, as addresses of basic blocks. head_dim: 64 or 128"""
    way, skipped = _WAYS[head_dim]
    return [[int(one, 16) for one in way.split() if one not in absent.split()] for absent in skipped]


def clock_factors(cell: Cell) -> dict[str, float]:
    """Return August's speed / June's of each kernel whose code is the same in both charts."""
    same = (PEER, PYTORCH) if cell.direction == "backward" else (TRITON, PEER, PYTORCH)
    return {kernel: AUGUST[cell][kernel] / JUNE[cell][kernel] for kernel in same}


def ratio(chart: Chart, one: tuple[Cell, str], other: tuple[Cell, str]) -> float:
    """Return the speed of ``one`` as a multiple of the speed of ``other``."""
    return chart[one[0]][one[1]] / chart[other[0]][other[1]]


def simulated_speed(direction: str, head_dim: int, kernel: str) -> float:
    """Return the simulated speed of useful products as a share of the tensor cores' limit; a backward is dkdv, then dq.

    A backward computes seven matrix products, of which five count as useful, as in the charts.
    """
    if direction == "forward":
        return SIMULATED["forward", head_dim][kernel]
    dkdv, dq = (SIMULATED[entry, head_dim][kernel] for entry in ("dkdv", "dq"))
    return 5 / (4 / dkdv + 3 / dq)


class Compared(NamedTuple):
    """A ratio of two speeds, by each chart and by simulation. alike: whether one panel of a chart shows both"""

    one: tuple[str, int, str]  # direction, head_dim, kernel
    other: tuple[str, int, str]
    tokens: int
    june: float
    august: float
    simulated: float

    @property
    def alike(self) -> bool:
        return self.one[:2] == self.other[:2]

    @property
    def distances(self) -> tuple[float, float]:
        """How far the simulation is from June's chart, and from August's."""
        return abs(self.simulated - self.june), abs(self.simulated - self.august)


PAIRS = (
    (("forward", 64, PYTORCH), ("forward", 64, PEER)),
    (("forward", 128, PYTORCH), ("forward", 128, PEER)),
    (("backward", 64, PEER), ("forward", 64, PEER)),
    (("backward", 128, PEER), ("forward", 128, PEER)),
    (("forward", 64, PEER), ("forward", 128, PEER)),
    (("forward", 64, PYTORCH), ("forward", 128, PYTORCH)),
    (("backward", 64, PEER), ("backward", 128, PEER)),
)


def compare(tokens: int) -> Iterator[Compared]:
    """Yield each pair of PAIRS at one length."""
    for one, other in PAIRS:
        places = [(Cell(direction, head_dim, tokens), kernel) for direction, head_dim, kernel in (one, other)]
        june, august = (ratio(chart, *places) for chart in (JUNE, AUGUST))
        yield Compared(one, other, tokens, june, august, simulated_speed(*one) / simulated_speed(*other))


def make_rows() -> Iterator[str]:
    """Yield rows of Markdown: how much faster August's clock was than June's, then the ratios of speeds."""
    yield "| panel | tokens | August / June, lowest and highest of the kernels |"
    yield "|---|---|---|"
    for cell in JUNE:
        factors = clock_factors(cell).values()
        yield f"| {cell.direction} {cell.head_dim} | {cell.tokens:,} | {min(factors):.2f} to {max(factors):.2f} |"
    yield ""
    yield "| speeds | tokens | June | August | simulated |"
    yield "|---|---|---|---|---|"
    for found in (found for tokens in TOKENS for found in compare(tokens)):
        one, other = (f"{kernel}'s {direction} {head_dim}" for direction, head_dim, kernel in (found.one, found.other))
        yield (
            f"| {one} / {other} | {found.tokens:,} | {found.june:.2f} | {found.august:.2f} | {found.simulated:.2f} |"
        )
