"""Which weights the key tiles of a row get where an online softmax forgets something from some key tile on.

A kernel goes over the key tiles with a running maximum m, a row sum l and an output O. Where m grows by a factor of
1 / r, l and O have to be multiplied by r. What comes of forgetting that follows from the right weights alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

ROW_SUM = "the row sum l is not brought to the new maximum as the output is (FA2 algorithm 1, line 9)"
OUTPUT = "the output O is not brought to the new maximum as the row sum is (FA2 algorithm 1, line 10)"
NEITHER = "neither the row sum l nor the output O is brought to the new maximum (FA2 algorithm 1, lines 9 and 10)"
SIZES = 16, 32, 64, 128  # of key tiles that a kernel may have whose author did not say
MATCHES = 0.9  # of the rows


class Forgotten(NamedTuple):
    """What is forgotten, from which key tile on, and the weights (rows, keys) that this gives."""

    what: str
    tile: int
    weights: Tensor


def forgotten(probabilities: Tensor, size: int) -> Iterator[Forgotten]:
    """Of the right probabilities (rows, keys) in fp64 and key tiles of a size: the earliest tile first."""
    tiles = probabilities.split(size, dim=-1)
    highest = torch.stack([tile.amax(-1) for tile in tiles], -1).cummax(-1).values
    # By how much O and l must shrink as each tile comes in; 1 where nothing was added up before.
    before, after = highest[:, :-1], highest[:, 1:]
    shrink = torch.where(before > 0, before / after, 1.0)
    lengths = torch.tensor([tile.shape[-1] for tile in tiles], device=probabilities.device)
    for first in range(1, len(tiles)):
        missing = 1 / torch.cat([torch.ones_like(shrink[:, : first - 1]), shrink[:, first - 1 :]], -1)
        # Of what is left out as the tiles behind it come in.
        growth = torch.cat([missing.flip(-1).cumprod(-1).flip(-1), torch.ones_like(missing[:, :1])], -1)
        grown = probabilities * growth.repeat_interleave(lengths, -1)
        total = grown.sum(-1, keepdim=True)
        yield Forgotten(OUTPUT, first, grown)
        yield Forgotten(ROW_SUM, first, probabilities / total)
        yield Forgotten(NEITHER, first, grown / total)


def name(probabilities: Tensor, measured: Tensor, block: int, slack: float) -> str:
    """What was forgotten, if these weights (rows, tiles of ``block`` keys) were measured; right ones match nothing."""

    def of_blocks(weights: Tensor) -> Tensor:
        return torch.stack([part.sum(-1) for part in weights.split(block, dim=-1)], -1)

    right = of_blocks(probabilities)
    for size in dict.fromkeys((block, *SIZES)):
        if size >= probabilities.shape[-1]:
            continue
        for what, tile, weights in forgotten(probabilities, size):
            expected = of_blocks(weights)
            near = ((measured - expected).abs() <= slack * (1 + expected.abs())).all(-1)
            tells = ((right - expected).abs() > 2 * slack * (1 + expected.abs())).any(-1)
            if tells.double().mean() >= MATCHES and near.double().mean() >= MATCHES:
                since = "" if tile == 1 else f", from key tile {tile} on"
                return what + since + (f" (key tiles of {size})" if size != block else "")
    return ""
