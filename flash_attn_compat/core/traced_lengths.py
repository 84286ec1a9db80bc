"""Sequences whose lengths nobody can read: those of fake and traced tensors, and those that vmap gives an axis.

Only differentiable operators compute such calls. They take all sequences as one block, padded to the longest lengths
that the caller states, and find rows and keys by operators on the lengths. A longest length that is too short makes
all results NaN, for no operator can raise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from flash_attn_compat.core import alibi
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.torch_state import is_hidden
from flash_attn_compat.core.varlen import Block, BlockPlan, Layout, Places, Spans, lse_dtype


def has_hidden_lengths(call: AttentionCall) -> bool:
    """Whether lengths or pages of a call, which differentiable operators compute, cannot be read."""
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.leftpad_k, call.block_table
    return call.use & Feature.TRANSFORMS != 0 and any(tensor is not None and is_hidden(tensor) for tensor in lengths)


class HiddenLayout(Layout):
    """As Layout, of packed queries, without reading a length."""

    def __init__(self, call: AttentionCall) -> None:
        assert call.cu_seqlens_q is not None  # a cache is never differentiated
        self.call = call
        starts, lengths = _spans(call.cu_seqlens_q)
        self._rows = _HiddenPlaces(starts, lengths, call.max_seqlen_q, call.q.shape[0])
        table, size = call.block_table, None if call.block_table is None else call.k.shape[1]
        if call.cu_seqlens_k is not None and table is None:
            starts, lengths = _spans(call.cu_seqlens_k)
        else:
            starts = torch.zeros_like(starts)
        if call.seqused_k is not None:
            lengths = call.seqused_k
        if call.leftpad_k is not None:
            leftpad = call.leftpad_k.clamp(min=0)
            starts, lengths = starts + leftpad, (lengths - leftpad).clamp(min=0)
        total_k = call.k.shape[0] if table is None else call.k.shape[1] * table.shape[1]
        self._keys = _HiddenPlaces(starts, lengths, call.max_seqlen_k, total_k, size, table)

    def plans(self) -> list[BlockPlan]:
        return [BlockPlan(list(range(self.call.batch)), self._rows.seqlen, self._keys.seqlen)]

    def blocks(self, plans: list[BlockPlan]) -> Iterator[tuple[Block, Places, Places]]:
        call, rows, keys = self.call, self._rows, self._keys
        for plan in plans:
            slopes = call.alibi_slopes
            slopes = None if slopes is None else alibi.slopes_per_sequence(slopes, call.batch)
            q, k, v = rows.gather(call.q), keys.gather(call.k), keys.gather(call.v)
            yield Block(q, k, v, slopes, plan.sequences, rows.missing, keys.missing), rows, keys

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, *others: Tensor) -> Tensor:
        """With the axes that vmap hides in any tensor of the call, or of ``others``; NaN if a sequence is too long."""
        is_too_long = self._rows.is_too_long | self._keys.is_too_long
        return super().zeros(shape, dtype, *others).masked_fill(is_too_long, torch.nan)

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Zeros to scatter into; the block's own LSE is +inf where a sequence has no keys."""
        call = self.call
        return self.zeros(call.out_shape, call.q.dtype), self.zeros(call.lse_shape, lse_dtype(call.q.dtype))


def _spans(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) int64 each: where sequences start, and how long they are."""
    return cu_seqlens[:-1].long(), cu_seqlens.diff().long()


class _HiddenPlaces(Places):
    """As Places, of all sequences at once.

    starts, lengths: (n,), the first slot and the length of each; with pages, slots count from the first page on
    longest: what the caller says; total: slots of the tensor, or of all pages of a sequence, which no length exceeds
    size, table: as Spans has them
    """

    def __init__(
        self, starts: Tensor, lengths: Tensor, longest: int, total: int, size: int | None = None,
        table: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.spans, self.sequences = Spans([], [], size, table), []
        self.seqlen, self.device, self._are_even = min(longest, total), starts.device, False
        self._starts, self._most = starts, total
        self.missing: Tensor = self.seqlen - lengths.long()
        self.is_too_long = (self.missing < 0).any()

    def gather(self, tensor: Tensor) -> Tensor:
        """0 in padding: what lies there may be another sequence's infinity."""
        return self.with_padding(super().gather(tensor), 0.0)

    def scatter(self, target: Tensor, values: Tensor) -> None:
        """Sequences may share pages, and padding adds 0 to the slot that it repeats."""
        slots, size = self._slots, self.spans.size
        where = (slots,) if size is None else (slots // size, slots % size)
        target.index_put_(where, self.with_padding(values, 0.0).to(target.dtype), accumulate=True)

    @functools.cached_property
    def _slots(self) -> Tensor:
        indices = torch.arange(self.seqlen, device=self.device) - self.missing[:, None]
        slots = (self._starts[:, None] + indices.clamp(min=0)).clamp(min=0, max=max(self._most - 1, 0))
        size, table = self.spans.size, self.spans.table
        if size is None or table is None:
            return slots
        pages = table.long().gather(1, slots // size).clamp(min=0)
        return pages * size + slots % size
