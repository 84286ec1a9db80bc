"""The wrong softmax weights of a kernel whose online softmax does not rescale from some key tile on.

A kernel goes over the key tiles with a running maximum m, a row sum l and an output O. If exp(m) grows by a factor of
1 / r, the kernel must multiply l and O by r. If it does not, its wrong weights follow from the right weights alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .formulas import TILES

ROW_SUM = "the row sum l is not rescaled to the new maximum as the output is (FA2 algorithm 1, line 9)"
OUTPUT = "the output O is not rescaled to the new maximum as the row sum is (FA2 algorithm 1, line 10)"
NEITHER = "neither the row sum l nor the output O is rescaled to the new maximum (FA2 algorithm 1, lines 9 and 10)"
INVERTED = "the row sum l and the output O are rescaled by exp(m_new - m), not by exp(m - m_new)"
OWN_MAXIMUM = "each key tile subtracts its own maximum, not the running maximum m (FA2 algorithm 1, line 9)"
MATCHES = 0.9  # share of rows that must have a mistake's weights, to name it
TELLS = 0.3  # share of rows that the mistake must change: in the others it stays within one block


class Forgotten(NamedTuple):
    """A skipped rescaling, its first key tile, and the resulting weights (rows, keys)."""

    mistake: str
    tile: int
    weights: Tensor


def forgotten(probabilities: Tensor, size: int) -> Iterator[Forgotten]:
    """Yield the weights of each skipped rescaling, the earliest key tile first.

    probabilities: the right weights, (rows, keys) in fp64; size: how many keys a tile has
    """
    tiles = probabilities.split(size, dim=-1)
    highest = torch.stack([tile.amax(-1) for tile in tiles], -1).cummax(-1).values
    # The factor that shrinks O and l at each tile; 1 where nothing was added up before.
    before, after = highest[:, :-1], highest[:, 1:]
    shrink = torch.where(before > 0, before / after, 1.0)
    lengths = torch.tensor([tile.shape[-1] for tile in tiles], device=probabilities.device)
    for first in range(1, len(tiles)):
        missing = 1 / torch.cat([torch.ones_like(shrink[:, : first - 1]), shrink[:, first - 1 :]], -1)
        # By how much a tile's weights are too large: the product of the factors that later tiles leave out.
        growth = torch.cat([missing.flip(-1).cumprod(-1).flip(-1), torch.ones_like(missing[:, :1])], -1)
        grown = probabilities * growth.repeat_interleave(lengths, -1)
        total = grown.sum(-1, keepdim=True)
        yield Forgotten(OUTPUT, first, grown)
        yield Forgotten(ROW_SUM, first, probabilities / total)
        yield Forgotten(NEITHER, first, grown / total)
        inverted = probabilities * (growth**2).repeat_interleave(lengths, -1)
        yield Forgotten(INVERTED, first, inverted / inverted.sum(-1, keepdim=True))
    of_tile = torch.stack([tile.amax(-1) for tile in tiles], -1).repeat_interleave(lengths, -1)
    own = torch.where(of_tile > 0, probabilities / of_tile, 0.0)
    yield Forgotten(OWN_MAXIMUM, 1, own / own.sum(-1, keepdim=True))


def name(probabilities: Tensor, measured: Tensor, block: int, slack: float) -> str:
    """Return the mistake that gives the measured weights (rows, tiles of ``block`` keys), or "" if none does."""

    def of_blocks(weights: Tensor) -> Tensor:
        return torch.stack([part.sum(-1) for part in weights.split(block, dim=-1)], -1)

    right = of_blocks(probabilities)
    for size in dict.fromkeys((block, *TILES)):
        if size >= probabilities.shape[-1]:
            continue
        for mistake, tile, weights in forgotten(probabilities, size):
            expected = of_blocks(weights)
            near = ((measured - expected).abs() <= slack * (1 + expected.abs())).all(-1)
            tells = ((right - expected).abs() > 2 * slack * (1 + expected.abs())).any(-1)
            if tells.double().mean() >= TELLS and near.double().mean() >= MATCHES:
                since = "" if tile == 1 else f", from key tile {tile} on"
                return mistake + since + (f" (key tiles of {size})" if size != block else "")
    return ""
