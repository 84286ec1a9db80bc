"""Forward calls over a KV cache on the memory-efficient kernel: the cache is read where it lies.

With ``seqlen_k`` the kernel takes any start and length of keys per sequence. So a page, or a share of a
long cache, is a sequence of its own over which the rows are repeated, and the shares are merged by LSE.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends import efficient_launch
from flash_attn_compat.backends.efficient_launch import NO_MASK, Launch
from flash_attn_compat.engine.call import AttentionCall, Result
from flash_attn_compat.engine.features import DESCRIPTIONS, Feature, Traits

# Below this many (sequence, key head) pairs a cache is cut into shares until the GPU has that many.
_ENOUGH_WORK = 256
_SHORTEST_SHARE = 256


def reasons(traits: Traits) -> list[str]:
    """Why a call over a cache can't be served."""
    features = Feature(traits.features)
    found = [
        f"does not support {DESCRIPTIONS[feature]} over a cache or with seqused_k"
        for feature in (Feature.ALIBI, Feature.DROPOUT, Feature.BACKWARD, Feature.GIVEN_LSE, Feature.VARLEN)
        if features & feature
    ]
    if traits.dtype == torch.bfloat16 and traits.capability is not None and traits.capability < (8, 0):
        found.append("computes bfloat16 only from compute capability 8.0 on")
    if (traits.head_dim % 8 or traits.head_dim_v % 8) or not traits.aligned:
        found.append("would have to copy a cache whose rows don't lie on 16 bytes or whose head_dim is no multiple of 8")
    masked = features & (Feature.CAUSAL | Feature.WINDOW_LEFT | Feature.WINDOW_RIGHT)
    if masked and not traits.one_query:
        found.append("a mask over a cache for more than one query")
    return found


class _Shares(NamedTuple):
    """Where the keys of each share start in the flattened cache, and how many are used: (batch, count)."""

    starts: Tensor
    lengths: Tensor

    @property
    def count(self) -> int:
        return self.starts.shape[1]


def forward(call: AttentionCall) -> Result:
    """Rows that all see the same keys, query heads folded into rows, one launch."""
    batch, seqlen_q, nheads, head_dim = call.q.shape
    nheads_k = call.nheads_k
    group = nheads // nheads_k
    rows = seqlen_q * group
    shares = _shares(call)
    count = shares.count
    # (batch, seqlen_q, nheads_k, group, d) -> (batch, rows, nheads_k, d), once for every share
    folded = call.q.unflatten(2, (nheads_k, group)).transpose(2, 3).reshape(batch, 1, rows, nheads_k, head_dim)
    queries = folded.expand(-1, count, -1, -1, -1).reshape(1, batch * count * rows, nheads_k, head_dim)
    starts_q = torch.arange(0, (batch * count + 1) * rows, rows, dtype=torch.int32, device=call.q.device)
    launch = Launch(
        q=queries,
        k=call.k.flatten(0, 1).unsqueeze(0),
        v=call.v.flatten(0, 1).unsqueeze(0),
        scale=call.softmax_scale,
        mask=NO_MASK,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=_closed(shares.starts),
        max_seqlen_q=rows,
        max_seqlen_k=max(1, min(_longest_share(call, count), call.k.shape[0] * call.k.shape[1])),
        seqlen_k=shares.lengths.flatten(),
    )
    keep_lse = count > 1 or call.return_lse
    out, native = efficient_launch.forward(launch, keep_lse)
    out = out.view(batch, count, rows, nheads_k, -1)
    lse = None
    if keep_lse:
        lse = native.lse[:, :, :rows].unflatten(0, (batch, count))
        lse = lse.masked_fill(shares.lengths[:, :, None, None] <= 0, -torch.inf)
    if count == 1:
        merged, total = out.squeeze(1), None if lse is None else lse.squeeze(1)
    else:
        merged, total = _merge(out, lse)
    unfolded = merged.unflatten(1, (seqlen_q, group)).transpose(2, 3).reshape(batch, seqlen_q, nheads, -1)
    return Result(unfolded, _unfold_lse(call, total, group) if call.return_lse else None)


def _merge(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, shares, rows, heads, d) and (batch, shares, heads, rows) -> without shares."""
    total = torch.logsumexp(lse, dim=1)
    weights = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(1))
    merged = torch.einsum("bsrhd,bshr->brhd", out.float(), weights)
    return merged.to(out.dtype), total


def _unfold_lse(call: AttentionCall, total: Tensor, group: int) -> Tensor:
    """(batch, nheads_k, seqlen_q * group) -> (batch, nheads, seqlen_q), +inf for rows without keys."""
    by_head = total.unflatten(2, (-1, group)).transpose(2, 3).flatten(1, 2)
    return by_head.masked_fill(by_head == -torch.inf, torch.inf)


def _shares(call: AttentionCall) -> _Shares:
    batch, device = call.batch, call.q.device
    page = call.k.shape[1]
    slots = page if call.block_table is None else page * call.block_table.shape[1]
    first, stop = _visible_slots(call, slots)
    if call.block_table is None or call.block_table.shape[1] == 1:
        rows = torch.arange(batch, device=device) if call.block_table is None else call.block_table[:, 0]
        count = _share_count(call, slots)
        size = -(-slots // count)
        bases = (rows * page)[:, None] + torch.zeros(count, dtype=torch.int32, device=device)
        offsets = torch.arange(0, count * size, size, device=device)
    else:
        bases, size = call.block_table * page, page
        offsets = torch.arange(0, slots, page, device=device)
        bases = bases - offsets
    begin = torch.maximum(first[:, None], offsets)
    end = torch.minimum(stop[:, None], offsets + size)
    lengths = (end - begin).clamp_(min=0)
    starts = torch.where(lengths > 0, bases + begin, 0)
    return _Shares(starts.to(torch.int32), lengths.to(torch.int32))


def _visible_slots(call: AttentionCall, slots: int) -> tuple[Tensor, Tensor]:
    """First slot each sequence's rows see, and one past the last: (batch,) each."""
    device, batch = call.q.device, call.batch
    stop = call.seqused_k
    if stop is None:
        stop = torch.full((batch,), slots, dtype=torch.int32, device=device)
    first = torch.zeros_like(stop) if call.leftpad_k is None else call.leftpad_k
    if call.mask.left is not None:
        # The only row stands at the last key.
        first = torch.maximum(first, stop - 1 - call.mask.left)
    return first, stop


def _share_count(call: AttentionCall, slots: int) -> int:
    work = call.batch * call.nheads_k
    wanted = -(-_ENOUGH_WORK // work)
    return max(1, min(wanted, slots // _SHORTEST_SHARE))


def _longest_share(call: AttentionCall, count: int) -> int:
    slots = call.k.shape[1]
    return slots if call.block_table is not None and call.block_table.shape[1] > 1 else -(-slots // count)


def _closed(starts: Tensor) -> Tensor:
    """(n + 1,) starts; with seqlen_k the kernel reads no end."""
    flat = starts.flatten()
    return torch.cat((flat, flat[-1:]))
