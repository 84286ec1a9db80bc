"""Dense calls that the memory-efficient kernel serves with a bias only: masks that it lacks, and two-sided ALiBi.

The bias is in q's dtype and made for some rows at a time. Softmax ignores what is added to a whole row, so
each row's bias is shifted until its largest number is 0: half precision is fine there and coarse only
where a key no longer counts. The kernel's LSE is shifted alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.efficient_launch import Launch, Place
from flash_attn_compat.engine import elementwise
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.mask import Mask, Range

# Elements of one bias: rows enough to fill a GPU, little memory beside the tensors. The backward has more tensors
# beside it, and each launch less saves adding to all of dk and dv in fp32.
_ELEMENTS = 2**24
_ELEMENTS_BACKWARD = 2**26
# Rows of a block under a window that is bounded on both sides: they see few keys more than each of them does.
_FEWEST_ROWS = 512


def launches(call: AttentionCall, whole: Launch, backward: bool) -> list[tuple[Place, Callable[[], Launch]]]:
    """Blocks of rows with the keys they see; a bias lives no longer than its launch. Query heads equal key heads.

    whole: the call's tensors as the kernel reads them, not masked yet
    backward: blocks for the backward, each of one or more of the forward's
    """
    seqlen_q, seqlen_k, mask = whole.q.shape[1], whole.k.shape[1], call.mask
    alibi = None if call.alibi_slopes is None else _Alibi.of(call, call.alibi_slopes)
    found: list[tuple[Place, Callable[[], Launch]]] = []
    for rows in _row_blocks(mask.rows_with_keys(seqlen_q, seqlen_k), mask, seqlen_k, call.alibi_slopes, backward):
        keys = mask.visible_keys(rows, seqlen_k - seqlen_q, seqlen_k)
        place = Place(rows=_slice(rows, seqlen_q), keys=_slice(keys, seqlen_k))
        found.append((place, partial(_launch, whole, mask, alibi, rows, keys)))
    return found


def _slice(part: Range, size: int) -> slice:
    return slice(None) if part.size == size else slice(*part)


def lse_shift(call: AttentionCall) -> Tensor | None:
    """By how much each row's bias, and so the kernel's LSE, is raised: (1 or batch, nheads, seqlen_q)."""
    return None if call.alibi_slopes is None else _Alibi.of(call, call.alibi_slopes).shift.squeeze(-1)


def _row_blocks(alive: Range, mask: Mask, seqlen_k: int, slopes: Tensor | None, backward: bool) -> Iterator[Range]:
    # A mask alone is one table for all heads, but made in int64.
    copies = 8 if slopes is None else slopes.numel()
    most, width = alive.size, seqlen_k
    if mask.left is not None and mask.right is not None:
        most = max(_FEWEST_ROWS, (mask.left + mask.right) // 64 * 64)
        width = min(seqlen_k, most + mask.left + mask.right)
    size = max(64, min(most, _ELEMENTS // (copies * width) // 64 * 64))
    if backward:
        size *= max(1, min(-(-most // size), _ELEMENTS_BACKWARD // (copies * width * size)))
    for start in range(alive.start, alive.stop, size):
        yield Range(start, min(start + size, alive.stop))


class _Alibi(NamedTuple):
    """What biases are made of, in fp32.

    slopes: (1 or batch, nheads, 1, 1); shift: (1 or batch, nheads, seqlen_q, 1)
    positions: (seqlen_q,), where each row stands among the keys; columns: (seqlen_k + 7,), those of the keys
    """

    slopes: Tensor
    shift: Tensor
    positions: Tensor
    columns: Tensor

    @classmethod
    def of(cls, call: AttentionCall, slopes: Tensor) -> _Alibi:
        slopes = (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None]
        left, right = call.mask
        seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
        first, offset = min(0, seqlen_k - seqlen_q), seqlen_k - seqlen_q
        axis = torch.arange(first, seqlen_k + 7, dtype=torch.float32, device=slopes.device)
        positions = axis[offset - first : seqlen_k - first]
        behind, ahead = positions, seqlen_k - 1 - positions
        farthest = torch.maximum(
            behind if left is None else behind.clamp(max=left), ahead if right is None else ahead.clamp(max=right)
        ).unsqueeze(1)
        if offset >= 0:
            shift = slopes.clamp(max=0) * farthest
        else:
            # A row that stands before the first key sees none at its own position.
            nearest = positions.neg().clamp_(min=0).unsqueeze(1)
            shift = torch.minimum(slopes * nearest, slopes * farthest)
        return cls(slopes, shift, positions, axis[-first:])

    def table(self, rows: slice, columns: Range, dtype: torch.dtype) -> Tensor:
        """(1 or batch, nheads, rows, columns), a multiple of 8 columns."""
        shift, positions = self.shift[:, :, rows], self.positions[rows]
        if elementwise.bias_is_usable(shift.device, dtype):
            return elementwise.alibi_bias(self.slopes, shift, positions, columns.start, columns.size, dtype)
        table = shift.new_empty((*shift.shape[:3], columns.size), dtype=dtype)
        distance = (self.columns[slice(*columns)] - positions.unsqueeze(1)).abs_()
        return torch.addcmul(shift, self.slopes, distance, value=-1, out=table)


def _launch(whole: Launch, mask: Mask, alibi: _Alibi | None, rows: Range, keys: Range) -> Launch:
    batch, seqlen_q, nheads = whole.q.shape[:3]
    q, k, v = whole.q[:, slice(*rows)], whole.k[:, slice(*keys)], whole.v[:, slice(*keys)]
    # Rows of the bias lie on 16 bytes: 8 numbers of half precision.
    width = keys.size + -keys.size % 8
    if alibi is None:
        table = q.new_zeros(1, 1, rows.size, width)
    else:
        table = alibi.table(slice(*rows), Range(keys.start, keys.start + width), q.dtype)
    bias = table[..., : keys.size]
    hidden = mask.hidden(rows, keys, whole.k.shape[1] - seqlen_q, q.device)
    if hidden is not None:
        bias.masked_fill_(hidden, -torch.inf)
    return whole._replace(q=q, k=k, v=v, bias=bias.expand(batch, nheads, -1, -1))
