"""Where two outputs differ and what the differing elements look like: pure functions of tensors.

Outputs come as (batch, seqlen_q, nheads, head_dim) and are looked at as (batch, nheads, row, channel), the order in
which "first" is meant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Of a tile (row, channel) that differs at all, this share differs where the whole of it is wrong: by chance some
# elements come out near the right value.
WHOLE = 0.8


class Place(NamedTuple):
    """An element of the output, and the query tile it lies in."""

    batch: int
    head: int
    row: int
    channel: int
    query_tile: int


def gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| as (batch, nheads, row, channel) in fp64; 0 for equal infinities, inf where one of them is no number."""
    a, b = (x.double().transpose(1, 2) for x in (a, b))
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def first_place(differs: Tensor, block_rows: int) -> Place | None:
    """The first True of (batch, nheads, row, channel)."""
    if not differs.any():
        return None
    batch, head, row, channel = (int(i) for i in torch.unravel_index(differs.flatten().int().argmax(), differs.shape))
    return Place(batch, head, row, channel, row // block_rows)


def texture(differs: Tensor, block_rows: int) -> str:
    """What differs together, the largest first: whole tiles, whole rows, whole channels, or elements here and there."""
    tiles = [tile.flatten(2) for tile in differs.split(block_rows, dim=2)]
    shares = torch.cat([tile.double().mean(-1).flatten() for tile in tiles])
    if _whole(shares):
        return "whole tiles"
    if _whole(differs.double().mean(-1)):
        return "whole rows"
    if _whole(torch.stack([tile.double().mean(2) for tile in differs.split(block_rows, dim=2)])):
        return "whole channels of tiles"
    return "scattered elements"


def _whole(shares: Tensor) -> bool:
    touched = shares[shares > 0]
    return bool(touched.numel()) and touched.mean().item() >= WHOLE


def which(wrong: Sequence[bool], noun: str) -> str:
    """The wrong ones of a sequence in words: "query tile 0 is right, every later one is wrong"."""
    count, bad = len(wrong), [index for index, is_wrong in enumerate(wrong) if is_wrong]
    if not bad:
        return f"no {noun} is wrong"
    if len(bad) == count:
        return f"all {count} {noun}s are wrong" if count > 1 else f"the only {noun} is wrong"
    if bad[0] > 0 and bad == list(range(bad[0], count)):
        right = f"{noun} 0 is" if bad[0] == 1 else f"{noun}s 0 to {bad[0] - 1} are"
        return f"{right} right, every later one is wrong"
    few = ", ".join(map(str, bad[:6])) + (" and more" if len(bad) > 6 else "")
    return f"of {count} {noun}s only {few} {'are' if len(bad) > 1 else 'is'} wrong"
