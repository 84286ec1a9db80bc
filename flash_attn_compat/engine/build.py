"""From flash-attn's arguments to an AttentionCall: checks, defaults and conversions, in one place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.engine import checks, signature
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.mask import MOST_TOKENS, Mask


class Options(NamedTuple):
    """The arguments that every attention function shares, as the caller gave them."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Sequence[int] = (-1, -1)
    softcap: float | None = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False


class Purpose(NamedTuple):
    """What a call's results are for, beyond what the options say: fields of AttentionCall."""

    needs_grad: bool = False
    return_lse: bool = False
    return_dmask: bool = False
    shares_dropout_mask: bool = False
    given_lse: bool = False


FORWARD, RECORDED = Purpose(), Purpose(needs_grad=True)


class Packing(NamedTuple):
    """How sequences are packed: starts (batch + 1,) int32 and the longest lengths the caller states.

    A length that is a tensor of one integer is read, which waits for its GPU. block_table, seqused_k and leftpad_k are
    AttentionCall's; with the first, cu_seqlens_k gives lengths only.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | Tensor
    max_seqlen_k: int | Tensor
    block_table: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None


def dense_call(q: Tensor, k: Tensor, v: Tensor, options: Options, purpose: Purpose = FORWARD) -> AttentionCall:
    """(batch, seqlen, heads, head_dim) tensors; raises as checks.dense does."""
    key = _key((q, k, v, options.alibi_slopes), options, "dense", *purpose)
    known = signature.known(key)
    if known is not None:
        return known.with_tensors(q, k, v, options.alibi_slopes)
    checks.dense(q, k, v)
    q, k, v = _as_stored(q, k, v)
    call = _call(q, k, v, options, purpose, q.shape[0], q.shape[1], k.shape[1], k.shape[1])
    return signature.remembered(key, call)


def packed_call(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: Options, purpose: Purpose = FORWARD
) -> AttentionCall:
    """(total, heads, head_dim) tensors, or paged k and v with a block table; raises as checks.packed does."""
    starts_q, starts_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k, leftpad_k = packing
    are_whole = block_table is None and seqused_k is None and leftpad_k is None
    equal_lengths = are_whole and _hold_the_same(starts_q, starts_k)
    key = None
    if type(max_seqlen_q) is int and type(max_seqlen_k) is int:
        key = _key(
            (q, k, v, options.alibi_slopes, starts_q, starts_k, seqused_k, leftpad_k, block_table), options,
            "packed", max_seqlen_q, max_seqlen_k, equal_lengths, *purpose,
        )  # fmt: skip
    known = signature.known(key)
    if known is not None:
        if block_table is not None and seqused_k is None:
            seqused_k = starts_k[1:] - starts_k[:-1]
        packed_k = starts_k if block_table is None else None
        _check_values(q, k, packing, seqused_k)
        return known.with_tensors(q, k, v, options.alibi_slopes, starts_q, packed_k, seqused_k, leftpad_k, block_table)
    if block_table is None:
        checks.packed(q, k, v, starts_q, starts_k)
    else:
        checks.packed_over_pages(q, k, v, starts_q, starts_k, block_table)
    batch = starts_q.shape[0] - 1
    if seqused_k is not None:
        checks.per_sequence("seqused_k", seqused_k, batch, q.device)
    if leftpad_k is not None:
        if block_table is not None:
            raise RuntimeError("We don't support Paged KV and leftpad_k running at the same time yet")
        checks.per_sequence("leftpad_k", leftpad_k, batch, q.device)
    if block_table is not None and seqused_k is None:
        seqused_k = starts_k[1:] - starts_k[:-1]
    _check_values(q, k, packing, seqused_k)
    longest_q, longest_k = _longest("max_seqlen_q", max_seqlen_q), _longest("max_seqlen_k", max_seqlen_k)
    q, k, v = _as_stored(q, k, v)
    call = _call(
        q, k, v, options, purpose, batch, longest_q, longest_k, longest_k,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k if block_table is None else None,
        block_table=block_table,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        is_dense=False,
        equal_lengths=equal_lengths,
    )  # fmt: skip
    return signature.remembered(key, call)


def cache_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    seqlen_new: int,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    options: Options,
) -> AttentionCall:
    """(batch, seqlen_q, nheads, head_dim) queries over a cache; kvcache.py has checked everything but the options.

    The arguments are flash_attn_with_kvcache's; seqlen_new: how many keys are written behind cache_seqlens before.
    Lengths that are known to the host and equal become dense slices of the cache, any others seqused_k, with the new
    keys in both.
    """
    used, leftpad, table = cache_seqlens, cache_leftpad, block_table
    batch, seqlen_q, slots = q.shape[0], q.shape[1], k_cache.shape[1]
    capacity = slots if table is None else slots * table.shape[1]
    appends = seqlen_new > 0
    if cache_batch_idx is not None:
        table = cache_batch_idx.unsqueeze(1)  # a cache row is a page that holds its whole sequence
    elif table is None and k_cache.shape[0] != batch:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    if used is not None and appends:
        used = used + seqlen_new
    if isinstance(used, int):
        if table is None and leftpad is None and not _shows_capacity(options):
            k, v = k_cache[:, :used], v_cache[:, :used]
            return _call(q, k, v, options, FORWARD, batch, seqlen_q, used, capacity, appends=appends)
        used = torch.full((batch,), used, dtype=torch.int32, device=q.device)
    return _call(
        q, k_cache, v_cache, options, FORWARD, batch, seqlen_q, capacity, capacity,
        seqused_k=used,
        leftpad_k=leftpad,
        block_table=table,
        is_dense=used is None and leftpad is None and table is None,
        appends=appends,
    )  # fmt: skip


def _shows_capacity(options: Options) -> bool:
    """Whether the LSE differs between a window that hides nothing in the whole cache and one that hides no used key."""
    return options.alibi_slopes is not None and options.window_size[0] >= 0


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    purpose: Purpose,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    capacity: int,
    **lengths: Any,
) -> AttentionCall:
    """The call of checked tensors: the one place that reads options.

    capacity: the keys that windows are measured against
    lengths: the call's fields that say how sequences lie in the tensors, for other than dense ones
    """
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs = options
    left, right = checks.window(window_size)
    is_causal = checks.flag("causal", causal)
    if left == -1 and right == -1:
        mask = _CAUSAL if is_causal else _FULL
    else:
        bounds = integer("window_size_left", left), integer("window_size_right", right)
        mask = Mask.from_window(is_causal, *bounds, max_seqlen_q, capacity)
    dropout_p = checks.dropout(dropout_p)
    drops = dropout_p > 0.0
    if alibi_slopes is not None:
        checks.alibi(alibi_slopes, q, batch)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else checks.number("softmax_scale", softmax_scale)
    return AttentionCall(
        q, k, v, scale, mask, max_seqlen_q, max_seqlen_k, checks.softcap(softcap), dropout_p, alibi_slopes,
        deterministic=bool(deterministic),
        return_lse=bool(return_attn_probs) or purpose.return_lse,
        return_dmask=(bool(return_attn_probs) and drops) or purpose.return_dmask,
        needs_grad=purpose.needs_grad,
        given_lse=purpose.given_lse,
        shares_dropout_mask=(bool(return_attn_probs) and drops) or purpose.shares_dropout_mask,
        **lengths,
    )  # fmt: skip


_FULL, _CAUSAL = Mask(), Mask(None, 0)


def _check_values(q: Tensor, k: Tensor, packing: Packing, seqused_k: Tensor | None) -> None:
    """Of tensors that passed the other checks; seqused_k: with pages, how many keys each sequence has."""
    table = packing.block_table
    checks.values_of_starts(
        packing.cu_seqlens_q, packing.cu_seqlens_k, q.shape[0], k.shape[0] if table is None else None
    )
    if table is not None and seqused_k is not None and checks.may_read(table):
        checks.values_of_pages(k, table, seqused_k)


def _as_stored(*tensors: Tensor) -> list[Tensor]:
    """The imaginary part of a conjugate is negated when PyTorch reads it; kernels of others read its memory."""
    return [tensor.resolve_neg() for tensor in tensors]


def integer(name: str, value: object) -> int:
    """An int, or what converts to one without loss: a 0-dim tensor of integers, a NumPy integer."""
    if type(value) is int:
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]  # or TypeError
    except TypeError:
        raise checks.wrong_type(name, "int", value) from None


def _longest(name: str, value: object) -> int:
    found = integer(name, value)
    if found > MOST_TOKENS:
        raise RuntimeError(f"{name} must be the longest sequence's length, at most {MOST_TOKENS}, got {found}")
    return found


def _hold_the_same(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    """Whether the host can see without waiting that both hold the same numbers, as two tensors of a collator may."""
    if cu_seqlens_q is cu_seqlens_k:
        return True
    if not isinstance(cu_seqlens_q, Tensor) or not isinstance(cu_seqlens_k, Tensor):
        return False
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.device != cu_seqlens_k.device:
        return False
    if cu_seqlens_q.device.type == "cpu":
        return torch.equal(cu_seqlens_q, cu_seqlens_k)
    return cu_seqlens_q.is_cuda and cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr()


def _key(tensors: tuple[Tensor | None, ...], options: Options, *others: object) -> signature.Key | None:
    """What the call's signature is found by, if it may have one."""
    dropout_p, softmax_scale, causal, window_size, softcap, _, deterministic, return_attn_probs = options
    try:
        left, right = window_size
    except (TypeError, ValueError):
        return None
    if type(left) is not int or type(right) is not int:  # 1.0 is no bound, and equals 1
        return None
    values = dropout_p, softmax_scale, causal, left, right, softcap, deterministic, return_attn_probs
    return signature.key(tensors, (*values, *others))
