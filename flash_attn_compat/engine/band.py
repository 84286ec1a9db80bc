"""A causal window over a long sequence as many short problems, for backends that compute whole tiles.

Rows are cut into blocks that all see equally many keys; the slices of keys of neighbouring blocks overlap,
which a strided view expresses without a copy. The first rows, whose window reaches before the first key,
and the last ones, which fill no block, remain problems of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from flash_attn_compat.engine.layout import Block
from flash_attn_compat.engine.mask import Range

_MIN_ROWS, _MAX_ROWS, _ROUNDED_TO = 128, 1024, 64
# So many more keys a target of Part.add_keys_to has, for the last problem's last share to be added like all others.
SPARE_KEYS = _MAX_ROWS


class Part(NamedTuple):
    """Consecutive rows of one sequence of a block, as ``count`` problems of the same shape.

    block: their q, k and v with the problems as its sequences; the slices of keys begin at ``first_key`` and
    each starts as many keys after the one before as a problem has rows.
    """

    sequence: slice
    rows: Range
    first_key: int
    block: Block

    @property
    def count(self) -> int:
        return self.block.q.shape[0]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """(n, seqlen_q, heads, head_dim) of the whole block -> a view (count, rows, heads, head_dim)."""
        return tensor[self.sequence, self.rows.start : self.rows.stop].unflatten(1, (self.count, -1)).squeeze(0)

    def lse_of(self, lse: Tensor) -> Tensor:
        """(n, heads, seqlen_q) of the whole block -> a view (count, heads, rows)."""
        rows = lse[self.sequence, :, self.rows.start : self.rows.stop].squeeze(0)
        return rows.unflatten(1, (self.count, -1)).transpose(0, 1)

    def add_keys_to(self, total: Tensor, values: Tensor) -> None:
        """Add (count, keys, heads, head_dim) to the keys of the whole block.

        total: (n, seqlen_k + SPARE_KEYS, heads, head_dim); what lies behind seqlen_k is scratch
        """
        step = self.rows.size // self.count
        target = total[self.sequence].squeeze(0)
        if self.count == 1:
            target[self.first_key : self.first_key + values.shape[1]].add_(values[0])
            return
        for first in range(0, values.shape[1], step):
            share = values[:, first : first + step]
            start = self.first_key + first
            places = target[start : start + self.count * step].unflatten(0, (self.count, step))
            places[:, : share.shape[1]].add_(share)


def cut(block: Block, left: int) -> Iterator[Part]:
    """The parts of a block without padding, under a causal mask with ``left`` more keys than a row's own."""
    seqlen_q, offset = block.q.shape[1], block.offset
    # A quarter of the window more is computed than seen.
    step = min(_MAX_ROWS, max(_MIN_ROWS, -(-left // 4 // _ROUNDED_TO) * _ROUNDED_TO))
    head = min(seqlen_q, max(0, left - offset))
    count = (seqlen_q - head) // step
    tail = head + count * step
    for n in range(block.q.shape[0]):
        one = block.narrow(slice(n, n + 1))
        for rows, problems in ((Range(0, head), 1), (Range(head, tail), count), (Range(tail, seqlen_q), 1)):
            if rows.size:
                yield _part(one, slice(n, n + 1), rows, problems, left)


def pays(block: Block, left: int) -> bool:
    """Whether most rows lie in blocks: else the whole is as good."""
    has_padding = block.first_row is not None or block.first_key is not None
    return not has_padding and block.q.shape[1] - max(0, left - block.offset) >= 8 * _MIN_ROWS


def _part(one: Block, sequence: slice, rows: Range, count: int, left: int) -> Part:
    step = rows.size // count
    first_key = max(0, rows.start + one.offset - left)
    keys = max(first_key, rows.start + step + one.offset) - first_key
    if count == 1:
        k, v = (tensor[:, first_key : first_key + keys] for tensor in (one.k, one.v))
        return Part(sequence, rows, first_key, one._replace(q=one.q[:, rows.start : rows.stop], k=k, v=v))
    q = one.q[0, rows.start : rows.stop].unflatten(0, (count, step))
    length = keys + (count - 1) * step
    k, v = (tensor[0, first_key : first_key + length].unfold(0, keys, step).movedim(-1, 1) for tensor in (one.k, one.v))
    slopes = None if one.slopes is None else one.slopes.expand(count, -1)
    return Part(sequence, rows, first_key, Block(q, k, v, slopes, list(one.sequences) * count))
