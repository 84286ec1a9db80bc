"""A causal window over a long sequence as many short problems, for backends that compute whole tiles.

Rows are cut into blocks that all see equally many keys; the slices of keys of neighbouring blocks overlap,
which a strided view expresses without a copy. Where windows reach before the first key, blank keys are put
in front. The last rows, which fill no block, are a problem of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.engine.layout import Block
from flash_attn_compat.engine.mask import Range

_MIN_ROWS, _MAX_ROWS, _ROUNDED_TO = 128, 1024, 64


class Part(NamedTuple):
    """Consecutive rows of one sequence of a block, as some ``problems`` of the same shape.

    block: their q, k and v with the problems as its sequences; the slices of keys begin at ``first_key``, before 0
    where there are blank keys, and each starts as many keys after the one before as a problem has rows
    """

    sequence: slice
    rows: Range
    first_key: int
    block: Block

    @property
    def problems(self) -> int:
        return self.block.q.shape[0]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """(n, seqlen_q, heads, head_dim) of the whole block -> a view (problems, rows, heads, head_dim)."""
        rows = tensor[self.sequence, self.rows.start : self.rows.stop]
        return torch.unflatten(rows, 1, (self.problems, -1)).squeeze(0)

    def lse_of(self, lse: Tensor) -> Tensor:
        """(n, heads, seqlen_q) of the whole block -> a view (problems, heads, rows)."""
        rows = lse[self.sequence, :, self.rows.start : self.rows.stop].squeeze(0)
        return torch.unflatten(rows, 1, (self.problems, -1)).transpose(0, 1)

    def add_keys_to(self, total: KeySums, values: Tensor) -> None:
        """Add (problems, keys, heads, head_dim) to what the whole block's keys have got so far."""
        target = total.tensor[self.sequence].squeeze(0)
        add_overlapping(target, values, total.front + self.first_key, self.rows.size // self.problems)


def add_overlapping(total: Tensor, slices: Tensor, first: int, step: int) -> None:
    """Add (count, size, ...) slices to (tokens, ...): the first from ``first`` on, each next one ``step`` further.

    ``total`` holds ``count`` whole steps behind the start of each share of a slice.
    """
    count, size = slices.shape[:2]
    if count == 1:
        total.narrow(0, first, size).add_(slices[0])
        return
    for start in range(0, size, step):
        share = slices[:, start : start + step]
        places = total.narrow(0, first + start, count * step).unflatten(0, (count, step))
        places[:, : share.shape[1]].add_(share)


class KeySums(NamedTuple):
    """Sums per key of the whole block, (n, front + seqlen_k + scratch, heads, head_dim)."""

    tensor: Tensor
    front: int

    @classmethod
    def zeros(cls, keys: Tensor, left: int, dtype: torch.dtype) -> KeySums:
        """For keys (n, seqlen_k, heads, head_dim), with room for blank keys in front and a last share behind."""
        n, seqlen_k = keys.shape[:2]
        return cls(keys.new_zeros(n, left + seqlen_k + _MAX_ROWS, *keys.shape[2:], dtype=dtype), left)

    def found(self, seqlen_k: int) -> Tensor:
        return self.tensor[:, self.front : self.front + seqlen_k]


def cut(block: Block, left: int) -> Iterator[Part]:
    """The parts of a block under a causal mask with ``left`` keys beside a row's own; rows without keys are in none."""
    seqlen_q = block.q.shape[1]
    # A quarter of the window more is computed than seen.
    step = min(_MAX_ROWS, max(_MIN_ROWS, -(-left // 4 // _ROUNDED_TO) * _ROUNDED_TO))
    first = min(seqlen_q, max(0, -block.offset))
    count = (seqlen_q - first) // step
    tail = first + count * step
    for n in range(block.q.shape[0]):
        one = block.narrow(slice(n, n + 1))
        for rows, problems in ((Range(first, tail), count), (Range(tail, seqlen_q), 1)):
            if rows.size:
                yield _part(one, slice(n, n + 1), rows, problems, left)


def pays(block: Block, left: int) -> bool:
    """Whether cutting saves much: long sequences without padding, and a window that is short beside them."""
    has_padding = block.first_row is not None or block.first_key is not None
    return not has_padding and block.q.shape[1] >= 8 * _MIN_ROWS and 2 * left <= block.k.shape[1]


def _part(one: Block, sequence: slice, rows: Range, count: int, left: int) -> Part:
    step = rows.size // count
    first_key = rows.start + one.offset - left
    keys, blank = step + left, max(0, -first_key)
    start = first_key + blank
    q = one.q[0, rows.start : rows.stop].unflatten(0, (count, step))
    k, v = (tensor[0, start : start + keys + (count - 1) * step - blank] for tensor in (one.k, one.v))
    if blank:
        k, v = (F.pad(tensor, (0, 0, 0, 0, blank, 0)) for tensor in (k, v))
    k, v = (tensor.unfold(0, keys, step).movedim(-1, 1) for tensor in (k, v))
    slopes = None if one.slopes is None else one.slopes.expand(count, -1)
    blank_keys = range(blank, 0, -step)[:count]
    return Part(sequence, rows, first_key, Block(q, k, v, slopes, list(one.sequences) * count, blank_keys=blank_keys))
