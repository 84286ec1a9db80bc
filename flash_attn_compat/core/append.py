"""New keys and values that a call appends to its KV cache, and how PyTorch operators append them.

Nothing is checked here: core/arguments/ checks a call first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.core import eight_bit
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.rotary import apply_rotary


class Append(NamedTuple):
    """The new keys and values that a call writes into its cache before it attends, and their rotary embedding.

    k, v: (batch, seqlen_new, nheads_k, head_dim), v with its own head_dim. Key i of a sequence goes to slot
        cache_seqlens + i of that sequence
    rotary_cos, rotary_sin: (at least the cache's capacity, rotary_dim / 2) in q's dtype, or None for no rotation. A
        key's position is its slot
    rotary_interleaved: rotate channel pairs (0, 1), (2, 3), ...; else pairs (c, c + rotary_dim / 2)
    cache_seqlens: an int for all sequences, or (batch,) int32
    rows_have_own_position: rotate row i of q at position cache_seqlens + i; else every row at cache_seqlens
    """

    k: Tensor
    v: Tensor
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    cache_seqlens: int | Tensor
    rows_have_own_position: bool


def by_operators(call: AttentionCall, new: Append) -> Tensor:
    """Write ``new`` into the cache, call.k and call.v, in place. Return q, or a rotated copy if cos and sin exist."""
    q, k = call.q, new.k
    if new.rotary_cos is not None:
        k = _rotated(k, new)
        if new.rows_have_own_position:
            q = _rotated(q, new)
        else:
            # All rows stand at the same position: rotate them as further heads of one row.
            q = _rotated(q.flatten(1, 2).unsqueeze(1), new).view(q.shape)
    _write(call, new, k)
    return q


def _rotated(x: Tensor, new: Append) -> Tensor:
    starts, cos = new.cache_seqlens, new.rotary_cos
    assert cos is not None and new.rotary_sin is not None
    if isinstance(starts, int) and starts + x.shape[1] > cos.shape[0]:
        # Rows beyond the table stay unrotated. apply_rotary does that for offsets in a tensor; for an int it raises.
        starts = torch.full((x.shape[0],), starts, dtype=torch.int32, device=x.device)
    return apply_rotary(x, cos, new.rotary_sin, starts, interleaved=new.rotary_interleaved)


def _write(call: AttentionCall, new: Append, k: Tensor) -> None:
    """Write ``k``, which is new.k after any rotation, and new.v into the cache of ``call``."""
    starts, table, (batch, seqlen_new) = new.cache_seqlens, call.block_table, k.shape[:2]
    if not seqlen_new:
        return
    v, k_cache, v_cache = new.v, call.k, call.v
    if eight_bit.is_eight_bit(k_cache):
        k = eight_bit.as_bytes(eight_bit.quantize(k, call.k_descale, call.k_factor, k_cache.dtype))
        v = eight_bit.as_bytes(eight_bit.quantize(v, call.v_descale, call.v_factor, v_cache.dtype))
        k_cache, v_cache = eight_bit.as_bytes(k_cache), eight_bit.as_bytes(v_cache)
    if isinstance(starts, int) and table is None:
        k_cache[:, starts : starts + seqlen_new] = k
        v_cache[:, starts : starts + seqlen_new] = v
        return
    if isinstance(starts, int):
        slots = torch.arange(starts, starts + seqlen_new, device=k.device).expand(batch, seqlen_new)
    else:
        slots = starts.long().unsqueeze(1) + torch.arange(seqlen_new, device=k.device)
    if table is None:
        rows = torch.arange(batch, device=k.device).unsqueeze(1)
    else:
        page = call.k.shape[1]
        rows, slots = table.long().gather(1, slots // page), slots % page
    k_cache.index_put_((rows, slots), k)
    v_cache.index_put_((rows, slots), v)
