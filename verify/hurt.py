"""Problems in which one sequence or head could hurt another: numbers of very different size, and some not finite.

Every token has a reader: the sequence that reads it, or -1 where the call must not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# What q, k, v and dout are multiplied by, one entry after another for each (sequence, key head); fp16 has less room.
SIZES = ((1.0, 1.0, 1.0, 1.0), (1e-6, 1e4, 1e-6, 1.0), (1e4, 1e-4, 1e4, 1e-6), (1.0, 1e-8, 1e-8, 1e4))
SIZES_FP16 = ((1.0, 1.0, 1.0, 1.0), (1e-2, 1e2, 1e-3, 1.0), (1.0, 1.0, 1e3, 1e-3), (1e-3, 1.0, 1.0, 1e-4))


@dataclass(frozen=True)
class Hurt:
    """What must hurt no other sequence or head than its own.

    sizes: every (sequence, key head) gets numbers of its own size
    stray: (quantity, sequence, number), one number that is not finite, in that sequence's first head
    outside: what lies in memory that the call must not read
    """

    sizes: bool = False
    stray: tuple[str, int, float] | None = None
    outside: float = 0.0

    def put(self, quantity: str, x: Tensor, readers: Tensor, nheads_k: int) -> Tensor:
        """x (*readers.shape, heads, dim) with all that; readers: which sequence reads a token, -1 for none."""
        x = x.clone()
        sequences, heads = int(readers.max()) + 1, x.shape[-2]
        if self.sizes:
            table = SIZES_FP16 if x.dtype == torch.float16 else SIZES
            column = ("q", "k", "v", "dout").index(quantity)
            chosen = torch.tensor([table[i % len(table)][column] for i in range(sequences * nheads_k)])
            factors = chosen.view(sequences, nheads_k).repeat_interleave(heads // nheads_k, dim=1)
            x *= torch.cat((factors, torch.ones(1, heads)))[readers][..., None].to(x.dtype)
        if self.stray is not None and self.stray[0] == quantity:
            tokens = (readers == self.stray[1]).nonzero()
            place = tuple(tokens[len(tokens) // 2].tolist())
            x[place][0, 0] = self.stray[2]
        if self.outside:
            x[readers < 0] = self.outside
        return x


UNHURT = Hurt()


def packed_readers(lengths: Sequence[int], gap: tuple[int, int]) -> Tensor:
    """(tokens,): the sequence of each token, -1 before the first and behind the last one."""
    return torch.cat([torch.full((n,), b) for b, n in zip((-1, *range(len(lengths)), -1), (gap[0], *lengths, gap[1]))])


def cache_readers(
    shape: tuple[int, int], lengths: Sequence[int], leftpad: Sequence[int] | None, block_table: Tensor | None
) -> Tensor:
    """(rows, capacity), or (pages, page size): who reads each place of a cache."""
    readers = torch.full(shape, -1)
    for sequence, length in enumerate(lengths):
        if block_table is None:
            readers[sequence, 0 if leftpad is None else leftpad[sequence] : length] = sequence
            continue
        pages = block_table[sequence].long()
        places = torch.arange(len(pages) * shape[1]).view(-1, shape[1])
        readers[pages] = torch.where(places < length, sequence, -1)
    return readers
