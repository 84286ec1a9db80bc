"""Tokens of packed tensors outside of all sequences: the kernels leave them as they find the memory, here they are 0.

Setting them costs a pass over the tensor, and hardly any call has such tokens. So the bounds of each cu_seqlens
tensor are copied to the host in the background when it is first seen, and the pass is left out once they are known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ATTRIBUTE = "_flash_attn_compat_bounds"


class _Bounds(NamedTuple):
    """The first and last number of a cu_seqlens tensor as of ``version``, on the host after ``event``."""

    version: int
    values: Tensor
    event: torch.cuda.Event


class _KnownBounds(NamedTuple):
    """The same, once they have arrived."""

    version: int
    first: int
    last: int


def may_exist(cu_seqlens: Tensor, total: int) -> bool:
    """Whether some of ``total`` tokens may lie outside; False only where the host knows better. Never waits."""
    if not cu_seqlens.is_cuda:
        return bool(cu_seqlens[0] != 0 or cu_seqlens[-1] != total)
    # A captured graph may be replayed with other lengths, and inference tensors tell nobody when they change.
    if cu_seqlens.is_inference() or torch.cuda.is_current_stream_capturing():
        return True
    known: _Bounds | _KnownBounds | None = getattr(cu_seqlens, _ATTRIBUTE, None)
    if known is None or known.version != cu_seqlens._version:
        setattr(cu_seqlens, _ATTRIBUTE, _look(cu_seqlens))
        return True
    if type(known) is _Bounds:
        if not known.event.query():
            return True
        known = _KnownBounds(known.version, *known.values.tolist())
        setattr(cu_seqlens, _ATTRIBUTE, known)
    return known.first != 0 or known.last != total


def mask(cu_seqlens: Tensor, total: int) -> Tensor:
    """(total,) bool, True for tokens that lie outside."""
    # Half a token more than its index tells the token at a sequence's end from the last one within.
    tokens = torch.arange(0.5, total, dtype=torch.float64, device=cu_seqlens.device)
    return tokens.clamp(cu_seqlens[0], cu_seqlens[-1]) != tokens


def set_to_zero(tensor: Tensor, cu_seqlens: Tensor) -> None:
    """Set the tokens of (total, heads, head_dim) that lie outside to 0, in place."""
    whole_words = tensor.shape[-1] * tensor.element_size() % 8 == 0
    # Eight bytes at a time, for speed.
    words = tensor.view(torch.int64) if whole_words else tensor
    words.masked_fill_(mask(cu_seqlens, tensor.shape[0])[:, None, None], 0)


def clear(tensor: Tensor, cu_seqlens: Tensor) -> None:
    """set_to_zero where it may be needed."""
    if may_exist(cu_seqlens, tensor.shape[0]):
        set_to_zero(tensor, cu_seqlens)


def cleared(tensor: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(total, heads, head_dim) with 0 outside: a copy where something may lie there, which may be NaN."""
    total = tensor.shape[0]
    if not may_exist(cu_seqlens, total):
        return tensor
    return tensor.masked_fill(mask(cu_seqlens, total)[:, None, None], 0)


def _look(cu_seqlens: Tensor) -> _Bounds:
    values = torch.empty(2, dtype=cu_seqlens.dtype, pin_memory=True)
    values.copy_(cu_seqlens[:: cu_seqlens.shape[0] - 1], non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return _Bounds(cu_seqlens._version, values, event)
