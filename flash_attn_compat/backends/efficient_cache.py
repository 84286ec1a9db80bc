"""Forward calls over a KV cache on the memory-efficient kernel: the cache is read where it lies.

With ``seqlen_k`` the kernel takes any start and length of keys per sequence. So a page, or a share of a
long cache, is a sequence of its own over which the rows are repeated, and the shares are merged by LSE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends import efficient_decode, efficient_launch, efficient_shares
from flash_attn_compat.backends.efficient_launch import NO_MASK, Launch
from flash_attn_compat.engine import alignment
from flash_attn_compat.engine.call import AttentionCall, Result
from flash_attn_compat.engine.features import DESCRIPTIONS, Feature, Traits


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


def serves(call: AttentionCall) -> bool:
    """Whether a call is over a cache, or gains from being served like one.

    That is a dense call of one query per sequence whose heads share key heads or whose keys are worth cutting, with
    tensors that can be read where they lie.
    """
    if not call.is_dense:
        return call.cu_seqlens_k is None
    if call.q.shape[1] != 1 or call.alibi_slopes is not None or call.dropout_p or call.needs_grad:
        return False
    batch, seqlen_k, nheads_k, head_dim = call.k.shape
    if call.nheads == nheads_k and not efficient_shares.is_worth_cutting(batch, nheads_k, seqlen_k):
        return False
    whole = head_dim % 8 == 0 and call.head_dim_v % 8 == 0
    return whole and alignment.is_ready(call.k) and alignment.is_ready(call.v)


def forward(call: AttentionCall) -> Result:
    """Rows that all see the same keys, query heads folded into rows, one launch."""
    batch, seqlen_q, nheads, _ = call.q.shape
    nheads_k, head_dim_v = call.v.shape[2:]
    group = nheads // nheads_k
    k, v, pitch = _flattened(call.k, call.v)
    cut = efficient_shares.cut(call, pitch)
    steps = efficient_decode if efficient_decode.serves(call.q, v, cut.shares) else efficient_shares
    rows, cu_seqlens_q, starts, lengths = steps.prepare(call.q, nheads_k, cut)
    launch = Launch(
        rows, k, v, call.softmax_scale, NO_MASK, None, cu_seqlens_q, starts, seqlen_q * group,
        max(1, cut.size), lengths,
    )  # fmt: skip
    out, native = efficient_launch.forward(launch, keep_lse=cut.shares > 1 or call.return_lse)
    lse = _whole_lse(native.lse, lengths, batch, seqlen_q, group) if call.return_lse else None
    if cut.shares > 1:
        return Result(steps.merge(out, native.lse, lengths, call.out_shape), lse)
    if efficient_launch.skips_empty_rows(launch):
        out.view(batch, -1).masked_fill_((lengths <= 0).unsqueeze(1), 0.0)
    # Heads that share a key head lie side by side.
    out = out.view(batch, seqlen_q, group, nheads_k, head_dim_v).transpose(2, 3)
    return Result(out.reshape(call.out_shape), lse)


def _flattened(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Cache rows or pages end to end, (1, slots, nheads_k, d), and how many slots one starts after the other.

    A cache whose rows are part of longer ones is read where it lies; any other that is no such view is copied.
    """
    pages, page = k.shape[:2]
    if pages == 1:
        return k, v, page
    pitch, rest = divmod(k.stride(0), k.stride(1)) if k.stride(1) else (0, 1)
    if rest == 0 and pitch >= page and v.stride(0) == pitch * v.stride(1):
        slots = (pages - 1) * pitch + page
        k, v = (x.as_strided((1, slots, *x.shape[2:]), (slots * x.stride(1), *x.stride()[1:])) for x in (k, v))
        return k, v, pitch
    return k.flatten(0, 1).unsqueeze(0), v.flatten(0, 1).unsqueeze(0), page


def _whole_lse(lse: Tensor, lengths: Tensor, batch: int, seqlen_q: int, group: int) -> Tensor:
    """(batch, nheads, seqlen_q), +inf for rows without keys."""
    total = efficient_shares.by_share(lse, lengths, batch, seqlen_q * group).logsumexp(1)
    by_head = torch.unflatten(total, 2, (seqlen_q, group)).transpose(2, 3).flatten(1, 2)
    return by_head.masked_fill(by_head == -torch.inf, torch.inf)
