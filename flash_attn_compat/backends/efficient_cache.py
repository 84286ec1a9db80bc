"""Forward calls over a KV cache on the memory-efficient kernel: the cache is read where it lies.

With ``seqlen_k`` the kernel takes any start and length of keys per sequence. So a page, or a share of a
long cache, is a sequence of its own over which the rows are repeated, and the shares are merged by LSE.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.backends import efficient_launch
from flash_attn_compat.backends.efficient_launch import NO_MASK, Launch
from flash_attn_compat.engine import alignment
from flash_attn_compat.engine.call import AttentionCall, Result
from flash_attn_compat.engine.features import DESCRIPTIONS, Feature, Traits

# Below this many (sequence, key head) pairs a cache is cut into shares until the GPU has that many.
_ENOUGH_WORK = 128
_SHORTEST_SHARE = 256
_NOTHING = -1e30


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
        found.append(
            "would have to copy a cache whose rows don't lie on 16 bytes or whose head_dim is no multiple of 8"
        )
    masked = features & (Feature.CAUSAL | Feature.WINDOW_LEFT | Feature.WINDOW_RIGHT)
    if masked and not traits.one_query:
        found.append("a mask over a cache for more than one query")
    return found


class _Shares(NamedTuple):
    """Where the keys of each share start in the flattened cache, and how many are used: (batch, count) int32."""

    starts: Tensor
    lengths: Tensor
    longest: int

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
    # (batch, seqlen_q, nheads_k, group, d) -> rows of (nheads_k, d), once for every share
    folded = call.q.view(batch, 1, seqlen_q, nheads_k, group, head_dim).transpose(3, 4)
    queries = folded.expand(-1, count, -1, -1, -1, -1).reshape(1, batch * count * rows, nheads_k, head_dim)
    launch = Launch(
        q=alignment.ready(queries),
        k=call.k.flatten(0, 1).unsqueeze(0),
        v=call.v.flatten(0, 1).unsqueeze(0),
        scale=call.softmax_scale,
        mask=NO_MASK,
        cu_seqlens_q=torch.arange(0, (batch * count + 1) * rows, rows, dtype=torch.int32, device=call.q.device),
        cu_seqlens_k=F.pad(shares.starts.flatten(), (0, 1)),
        max_seqlen_q=rows,
        max_seqlen_k=max(1, shares.longest),
        seqlen_k=shares.lengths.flatten(),
    )
    out, native = efficient_launch.forward(launch, keep_lse=count > 1 or call.return_lse)
    out = out.view(batch, count, rows, nheads_k, -1)
    if efficient_launch.skips_empty_rows(launch):
        out.masked_fill_((shares.lengths <= 0)[:, :, None, None, None], 0.0)
    lse = native.lse[:, :, :rows].unflatten(0, (batch, count)) if count > 1 or call.return_lse else None
    if lse is not None:
        # The kernel reports 0 for a share without keys; finite, so that a sequence without any stays 0.
        lse = lse.masked_fill((shares.lengths <= 0)[:, :, None, None], _NOTHING)
    if count > 1:
        weights = torch.softmax(lse, dim=1).transpose(2, 3).unsqueeze(-1)
        out = (out * weights).sum(1).to(call.q.dtype)
    unfolded = out.view(batch, seqlen_q, group, nheads_k, -1).transpose(2, 3).reshape(batch, seqlen_q, nheads, -1)
    return Result(unfolded, _whole_lse(lse, seqlen_q, group) if call.return_lse else None)


def _whole_lse(lse: Tensor, seqlen_q: int, group: int) -> Tensor:
    """(batch, shares, nheads_k, seqlen_q * group) -> (batch, nheads, seqlen_q), +inf for rows without keys."""
    total = torch.logsumexp(lse, dim=1)
    by_head = total.unflatten(2, (seqlen_q, group)).transpose(2, 3).flatten(1, 2)
    return by_head.masked_fill(by_head < _NOTHING / 2, torch.inf)


def _shares(call: AttentionCall) -> _Shares:
    """Pages are shares; a cache row is cut into equal ones, as many as fill the GPU."""
    device, page, table = call.q.device, call.k.shape[1], call.block_table
    rows = torch.arange(call.batch, dtype=torch.int32, device=device).unsqueeze(1) if table is None else table
    slots = page * rows.shape[1]
    size = page
    if rows.shape[1] == 1:
        count = max(1, min(-(-_ENOUGH_WORK // (call.batch * call.nheads_k)), slots // _SHORTEST_SHARE))
        size = -(-slots // count)
    offsets = torch.arange(0, slots, size, dtype=torch.int32, device=device)
    stop = (
        torch.full((call.batch,), slots, dtype=torch.int32, device=device) if call.seqused_k is None else call.seqused_k
    )
    starts = rows * page if rows.shape[1] > 1 else rows * page + offsets
    lengths = (stop.unsqueeze(1) - offsets).clamp_(0, size)
    first = call.leftpad_k
    if call.mask.left is not None:
        # The only row stands at the last key.
        edge = stop - 1 - call.mask.left
        first = edge if first is None else torch.maximum(first, edge)
    if first is not None:
        skipped = (first.unsqueeze(1) - offsets).clamp_(min=0)
        skipped = torch.minimum(skipped, lengths)
        starts, lengths = starts + skipped, lengths - skipped
    return _Shares(starts, lengths, size)
