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


def may_exist(cu_seqlens: Tensor, total: int) -> bool:
    """Whether some of ``total`` tokens may lie outside; False only where the host knows better. Never waits."""
    if not cu_seqlens.is_cuda:
        return bool(cu_seqlens[0] != 0 or cu_seqlens[-1] != total)
    # A captured graph may be replayed with other lengths, and inference tensors tell nobody when they change.
    if cu_seqlens.is_inference() or torch.cuda.is_current_stream_capturing():
        return True
    known: _Bounds | None = getattr(cu_seqlens, _ATTRIBUTE, None)
    if known is None or known.version != cu_seqlens._version:
        setattr(cu_seqlens, _ATTRIBUTE, _look(cu_seqlens))
        return True
    if not known.event.query():
        return True
    first, last = known.values.tolist()
    return first != 0 or last != total


def set_to_zero(tensor: Tensor, cu_seqlens: Tensor) -> None:
    """Set the tokens of (total, heads, head_dim) that lie outside to 0, in place."""
    # Half a token more than its index tells the token at a sequence's end from the last one within.
    tokens = torch.arange(0.5, tensor.shape[0], dtype=torch.float64, device=tensor.device)
    outside = tokens.clamp(cu_seqlens[0], cu_seqlens[-1]) != tokens
    # Eight bytes at a time, for speed.
    tensor.view(torch.int64).masked_fill_(outside[:, None, None], 0)


def _look(cu_seqlens: Tensor) -> _Bounds:
    values = torch.empty(2, dtype=cu_seqlens.dtype, pin_memory=True)
    values.copy_(cu_seqlens[:: cu_seqlens.shape[0] - 1], non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return _Bounds(cu_seqlens._version, values, event)
