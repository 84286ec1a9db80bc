"""Check the arguments of dense and packed calls, and build the AttentionCall of checked arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.core import checks, torch_state
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.entry import Check
from flash_attn_compat.core.features import DMASK, Feature
from flash_attn_compat.core.inputs import Inputs, Options
from flash_attn_compat.core.mask import MOST_TOKENS, Mask

_DERIVED = Feature.BACKWARD | Feature.GIVEN_LSE | Feature.TRANSFORMS


def check_dense(x: Inputs, options: Options, length: int | None) -> Check | None:
    """Raise RuntimeError or IndexError for malformed inputs of a dense call. length: not used"""
    checks.dense(x.q, x.k, x.v)
    return None


def dense_call(x: Inputs, options: Options, length: int | None) -> tuple[AttentionCall, Append | None]:
    q_shape, keys = x.q.shape, x.k.shape[1]
    return make_call(x, options, q_shape[0], q_shape[1], keys, keys), None


def check_packed(x: Inputs, options: Options, length: int | None) -> Check | None:
    """Raise RuntimeError for malformed inputs of a packed or paged call; return the check of values in its tensors."""
    q, k, v, starts_q, used, leftpad, table = x.q, x.k, x.v, x.cu_seqlens_q, x.seqused_k, x.leftpad_k, x.block_table
    if table is None:
        checks.packed(q, k, v, starts_q, x.cu_seqlens_k)
    else:
        checks.packed_over_pages(q, k, v, starts_q, x.cu_seqlens_k, table)
    batch = starts_q.shape[0] - 1
    checks.descales(k, x.k_descale, x.v_descale, options.k_factor, options.v_factor, batch)
    if options.use & _DERIVED:
        checks.no_gradients(k)
    if used is not None:
        checks.per_sequence("seqused_k", used, batch, q.device)
    if leftpad is not None:
        if table is not None:
            raise RuntimeError("We don't support Paged KV and leftpad_k running at the same time yet")
        checks.per_sequence("leftpad_k", leftpad, batch, q.device)
    longest_q, longest_k = options.max_seqlen_q, options.max_seqlen_k
    for name, longest in (("max_seqlen_q", longest_q), ("max_seqlen_k", longest_k)):
        if longest > MOST_TOKENS:
            raise RuntimeError(f"{name} must be the longest sequence's length, at most {MOST_TOKENS}, got {longest}")
    has_check = options.use & Feature.TRANSFORMS or checks.may_read(starts_q)
    return functools.partial(_check_numbers, options) if has_check else None


def packed_call(x: Inputs, options: Options, length: int | None) -> tuple[AttentionCall, Append | None]:
    longest_q, longest_k, batch = options.max_seqlen_q, options.max_seqlen_k, x.cu_seqlens_q.shape[0] - 1
    equal = have_equal_lengths(x, may_read=not options.use & Feature.TRANSFORMS)
    return make_call(x, options, batch, longest_q, longest_k, longest_k, is_dense=False, equal_lengths=equal), None


def have_equal_lengths(x: Inputs, may_read: bool = True) -> bool:
    """Whether every packed sequence has as many queries as keys, as far as the host knows without waiting for a GPU."""
    starts_q, starts_k = x.cu_seqlens_q, x.cu_seqlens_k
    if x.block_table is not None or x.seqused_k is not None or x.leftpad_k is not None:
        return False
    return starts_q is starts_k or (may_read and _hold_the_same(starts_q, starts_k))


def _hold_the_same(cu_seqlens_q: object, cu_seqlens_k: object) -> bool:
    if not isinstance(cu_seqlens_q, Tensor) or not isinstance(cu_seqlens_k, Tensor):
        return False
    if cu_seqlens_q.is_nested or cu_seqlens_k.is_nested:
        return False  # a later check raises an error that names the nested tensor
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.device != cu_seqlens_k.device:
        return False
    if cu_seqlens_q.device.type == "cpu":
        return torch.equal(cu_seqlens_q, cu_seqlens_k)
    return cu_seqlens_q.is_cuda and cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr()


def with_page_lengths(x: Any) -> Any:
    """Return paged inputs with seqused_k computed from cu_seqlens_k, which gives only lengths; any others unchanged.

    The tensors are not checked here.
    """
    starts_k = x.cu_seqlens_k
    if x.block_table is None or x.seqused_k is not None or not isinstance(starts_k, Tensor) or starts_k.dim() != 1:
        return x
    return x._replace(seqused_k=starts_k[1:] - starts_k[:-1])


def _check_numbers(options: Options, x: Inputs, length: int | None) -> None:
    starts_q, used, leftpad, table = x.cu_seqlens_q, x.seqused_k, x.leftpad_k, x.block_table
    if options.use & Feature.TRANSFORMS:
        _refuse_hidden_lengths(x)
    if not checks.may_read(starts_q):  # such as during a CUDA graph's capture
        return
    longest_q, longest_k, total_k = int(options.max_seqlen_q), int(options.max_seqlen_k), x.k.shape[0]
    if table is not None:
        total_k, longest_k = None, MOST_TOKENS  # over pages block_table limits the number of keys, not max_seqlen_k
    checks.values_of_starts(starts_q, x.cu_seqlens_k, x.q.shape[0], total_k, longest_q, longest_k, used)
    if table is not None and checks.may_read(table):
        checks.values_of_pages(x.k, table, used)
    if leftpad is not None and checks.may_read(leftpad):
        checks.values_of_leftpad("leftpad_k", leftpad)


def _refuse_hidden_lengths(x: Inputs) -> None:
    """Raise RuntimeError if lengths or pages are fake, traced or batched: differentiable operators must read them."""
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table"):
        value = getattr(x, name)
        if isinstance(value, Tensor) and torch_state.is_hidden(value):
            raise RuntimeError(
                f"{name} must hold numbers that can be read: they are fake, traced, or have an axis of vmap. "
                "torch.func transforms, forward-mode and second derivatives compute each packed sequence by its own "
                "length: call them outside of traces and fake modes, and vmap over q, k and v alone"
            )


def make_call(
    x: Inputs, options: Options, batch: int, max_seqlen_q: Any, max_seqlen_k: Any, capacity: Any,
    is_dense: bool = True, equal_lengths: bool = False, appends: bool = False,
) -> AttentionCall:  # fmt: skip
    """Return the AttentionCall of checked inputs.

    options: as ``checked`` returns them; capacity: a window bound of at least as many keys counts as unbounded
    appends: whether the backend itself writes new keys into the cache; the others are fields of AttentionCall
    """
    dropout_p, use, scale = checks.dropout(options.dropout_p), options.use, options.softmax_scale
    if not dropout_p:
        use &= ~(DMASK | Feature.SHARED_DROPOUT_MASK)
    if appends:
        use |= Feature.APPEND
    if x.alibi_slopes is not None:
        checks.alibi(x.alibi_slopes, x.q, batch)
    scale = x.q.shape[-1] ** -0.5 if scale is None else checks.number("softmax_scale", scale)
    mask, softcap = Mask.of(options, max_seqlen_q, capacity), checks.softcap(options.softcap)
    return AttentionCall(
        x.q, x.k, x.v, scale, mask, max_seqlen_q, max_seqlen_k, softcap, dropout_p, is_dense=is_dense,
        equal_lengths=equal_lengths, deterministic=options.deterministic, use=use, k_factor=options.k_factor,
        v_factor=options.v_factor,
    ).over(x)  # fmt: skip
