"""Forward calls over a KV cache on the memory-efficient kernel: the cache is read where it lies.

With ``seqlen_k`` the kernel takes any start and length of keys per sequence. So a page, or a share of a
long cache, is a sequence of its own over which the rows are repeated, and the shares are merged by LSE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends import efficient_launch, efficient_shares
from flash_attn_compat.backends.efficient_launch import NO_MASK, Launch
from flash_attn_compat.backends.efficient_shares import NOTHING, Shares
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
    rows = seqlen_q * group
    k, v, pitch = _flattened(call.k, call.v)
    shares = efficient_shares.cut(call, pitch)
    count = shares.count
    launch = Launch(
        q=_repeated(call.q, nheads_k, count),
        k=k,
        v=v,
        scale=call.softmax_scale,
        mask=NO_MASK,
        cu_seqlens_q=shares.cu_seqlens_q,
        cu_seqlens_k=shares.starts,
        max_seqlen_q=rows,
        max_seqlen_k=max(1, shares.longest),
        seqlen_k=shares.lengths,
    )
    out, native = efficient_launch.forward(launch, keep_lse=count > 1 or call.return_lse)
    if efficient_launch.skips_empty_rows(launch) and not shares.full:
        out.view(batch, count, -1).masked_fill_(shares.lengths.view(batch, count, 1) <= 0, 0.0)
    lse = _by_row(native.lse, rows, shares) if call.return_lse or (count > 1 and not shares.alike) else None
    if count > 1:
        weights = _even_weights(native.lse, rows, shares) if lse is None else torch.softmax(lse, -1)
        out = _merged(out, weights, shares)
        if seqlen_q > 1:
            out = out.view(batch, nheads_k, seqlen_q, group, head_dim_v).transpose(1, 2)
    else:
        out = out.view(batch, seqlen_q, group, nheads_k, head_dim_v).transpose(2, 3)
    # Heads that share a key head lie side by side.
    return Result(out.reshape(call.out_shape), _whole_lse(lse, seqlen_q) if call.return_lse else None)


def _merged(out: Tensor, weights: Tensor, shares: Shares) -> Tensor:
    """(batch * nheads_k * rows, d): a bag holds the shares of one row and head, summed in fp32 in one operation.

    weights: (batch, nheads_k, rows, count)
    """
    members, bags, _ = shares.merging
    weights = weights.to(out.dtype, memory_format=torch.contiguous_format).reshape(-1)
    return torch.embedding_bag(out.view(-1, out.shape[-1]), members, bags, per_sample_weights=weights)[0]


def _even_weights(lse: Tensor, rows: int, shares: Shares) -> Tensor:
    """The weights of shares that all have keys, or all none: softmax where they lie, the padding left behind then."""
    count = shares.count
    weights = torch.softmax(lse, 0) if lse.shape[0] == count else torch.softmax(lse.unflatten(0, (-1, count)), 1)
    return _rows_first(weights, lse.shape, rows, count)


def _by_row(lse: Tensor, rows: int, shares: Shares) -> Tensor:
    """(batch, nheads_k, rows, count), finite for a share without keys, so that a sequence of only such stays 0.

    The kernel reports 0 for them. With the shares side by side, a softmax over them runs along memory.
    """
    ordered = _rows_first(lse, lse.shape, rows, shares.count)
    empty = shares.lengths.view(-1, 1, 1, shares.count) <= 0
    return torch.where(empty, shares.merging.nothing, ordered, out=lse.new_empty(ordered.shape))


def _rows_first(tensor: Tensor, lse_shape: torch.Size, rows: int, count: int) -> Tensor:
    """A view (batch, nheads_k, rows, count) of what lies like an LSE (batch * count, nheads_k, padded rows)."""
    sequences, nheads_k, padded = lse_shape
    share = nheads_k * padded
    return tensor.as_strided((sequences // count, nheads_k, rows, count), (count * share, padded, 1, share))


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
        return tuple(x.as_strided((1, slots, *x.shape[2:]), (slots * x.stride(1), *x.stride()[1:])) for x in (k, v)) + (
            pitch,
        )
    return k.flatten(0, 1).unsqueeze(0), v.flatten(0, 1).unsqueeze(0), page


def _repeated(q: Tensor, nheads_k: int, count: int) -> Tensor:
    """(batch, seqlen_q, nheads, d) as rows of (nheads_k, d), all rows of a sequence once for each of its shares."""
    batch, seqlen_q, nheads, head_dim = q.shape
    group = nheads // nheads_k
    by_batch, by_row, by_head, by_channel = q.stride()
    spread = q.as_strided(
        (batch, count, seqlen_q, group, nheads_k, head_dim),
        (by_batch, 0, by_row, by_head, group * by_head, by_channel),
    )
    return alignment.ready(spread.reshape(1, batch * count * seqlen_q * group, nheads_k, head_dim))


def _whole_lse(lse: Tensor, seqlen_q: int) -> Tensor:
    """(batch, nheads_k, seqlen_q * group, shares) -> (batch, nheads, seqlen_q), +inf for rows without keys."""
    total = torch.logsumexp(lse, dim=-1)
    by_head = total.unflatten(2, (seqlen_q, -1)).transpose(2, 3).flatten(1, 2)
    return by_head.masked_fill(by_head < NOTHING / 2, torch.inf)
