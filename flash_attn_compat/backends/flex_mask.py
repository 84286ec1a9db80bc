"""Which keys each row of a call sees, as FlexAttention wants it: two bounds per row, and the blocks they touch.

Causality, windows and packed sequences all make the keys of a row one range of consecutive tokens, so a
single mask function serves every call. Everything is computed on the device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.mask import Mask

BLOCK = 128


class Geometry(NamedTuple):
    """Per row: the half-open range of keys it sees, its own place among the keys, and its sequence (packed calls).

    first, stop, place: (rows,) int32, in tokens of k; sequence: (rows,) int64 or None
    block_mask: torch.nn.attention.flex_attention.BlockMask
    """

    first: Tensor
    stop: Tensor
    place: Tensor
    sequence: Tensor | None
    block_mask: Any

    @property
    def sees_nothing(self) -> Tensor:
        return self.first >= self.stop


def geometry(call: AttentionCall) -> Geometry:
    """The geometry of a dense or packed call; that of a dense one is remembered."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return _dense(call.q.shape[1], call.k.shape[1], call.mask, call.q.device)
    return _packed(call, call.cu_seqlens_q, call.cu_seqlens_k)


@functools.lru_cache(maxsize=8)
def _dense(seqlen_q: int, seqlen_k: int, mask: Mask, device: torch.device) -> Geometry:
    # A later call may need gradients, which inference tensors refuse to take part in.
    with torch.inference_mode(False):
        place = torch.arange(seqlen_k - seqlen_q, seqlen_k, dtype=torch.int32, device=device)
        first, stop = _bounds(mask, place, 0, seqlen_k)
        return Geometry(first, stop, place, None, _block_mask(first, stop, seqlen_k))


def _packed(call: AttentionCall, starts_q: Tensor, starts_k: Tensor) -> Geometry:
    tokens = torch.arange(call.q.shape[0], dtype=torch.int32, device=call.q.device)
    sequence = torch.searchsorted(starts_q[1:], tokens, right=True).clamp_(max=call.batch - 1)
    begin, end = starts_k[sequence], starts_k[sequence + 1]
    # The last row stands at the last key.
    place = tokens - starts_q[sequence + 1] + end
    first, stop = _bounds(call.mask, place, begin, end)
    outside = (tokens < starts_q[0]) | (tokens >= starts_q[-1])
    stop = stop.masked_fill(outside, 0)
    return Geometry(first, stop, place, sequence, _block_mask(first, stop, call.k.shape[0]))


def _bounds(mask: Mask, place: Tensor, begin: Tensor | int, end: Tensor | int) -> tuple[Tensor, Tensor]:
    first = torch.zeros_like(place) + begin
    stop = torch.zeros_like(place) + end
    if mask.left is not None:
        first = torch.maximum(first, place - mask.left)
    if mask.right is not None:
        stop = torch.minimum(stop, place + mask.right + 1)
    return first, stop


def _block_mask(first: Tensor, stop: Tensor, keys: int) -> Any:
    """The blocks of keys that a block of rows must visit, and which of them it sees entirely."""
    from torch.nn.attention.flex_attention import BlockMask

    rows = first.shape[0]
    low, high, full_low, full_high = _block_ranges(first, stop, keys)
    columns = torch.arange(-(-keys // BLOCK), dtype=torch.int32, device=first.device)
    full = full_high - full_low
    partial = high - low - full
    # Partial blocks are those before the full ones and those behind.
    indices = columns + low[:, None]
    indices = indices + torch.where(indices >= full_low[:, None], full[:, None], 0)
    last = columns.shape[0] - 1

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key >= first[row]) & (key < stop[row])

    return BlockMask.from_kv_blocks(
        partial[None, None],
        indices.clamp(max=last).to(torch.int32)[None, None],
        full[None, None],
        (columns + full_low[:, None]).clamp(max=last).to(torch.int32)[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(rows, keys),
    )


def _block_ranges(first: Tensor, stop: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per block of rows the range of key blocks that any row sees, and that every row sees: 4 x (blocks,) int32.

    Rows that see nothing, and the padding of the last block, touch nothing and so leave no block entirely seen.
    """
    missing = -first.shape[0] % BLOCK
    first, stop = (torch.nn.functional.pad(bound, (0, missing)).unflatten(0, (-1, BLOCK)) for bound in (first, stop))
    dead = first >= stop
    low = first.masked_fill(dead, keys).amin(1) // BLOCK
    high = -(-stop.masked_fill(dead, 0).amax(1) // BLOCK)
    low = torch.minimum(low, high)
    full_low = -(-first.masked_fill(dead, keys + BLOCK).amax(1) // BLOCK)
    full_high = stop.masked_fill(dead, 0).amin(1) // BLOCK
    full_high = torch.minimum(full_high, high)
    full_low = torch.where(full_high > full_low, full_low, high)
    full_high = torch.maximum(full_high, full_low)
    return low.int(), high.int(), full_low.int(), full_high.int()
