"""From flash-attn's arguments to an AttentionCall: checks, defaults and conversions."""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch import Tensor

from flash_attn_compat.core import checks, torch_state
from flash_attn_compat.core.call import (
    EQUAL_LENGTHS,
    GIVEN_LSE,
    NEEDS_GRAD,
    RETURN_DMASK,
    RETURN_LSE,
    RETURN_PROBS,
    SHARES_DROPOUT_MASK,
    SLOPES_GRADIENT,
    TENSORS,
    TRANSFORMED,
    AttentionCall,
)
from flash_attn_compat.core.mask import MOST_TOKENS, Mask
from flash_attn_compat.core.prepared import Prepared, Tensors, checked

_PADDING = (None,) * 8
_BIAS = TENSORS.index("bias") - 4  # behind the slopes


def dense(tensors: Tensors, scalars: tuple[Any, ...], flags: int, length: int | None) -> Prepared:
    """Check a dense call and return it without a backend. Raises RuntimeError or IndexError for malformed arguments.

    length: not used, since no dense call has a cache
    """
    q, k, v, slopes, *others = tensors
    checks.dense(q, k, v)
    lengths = q.shape[0], q.shape[1], k.shape[1], k.shape[1]
    call = make_call(q, k, v, slopes, scalars, flags, *lengths, bias=others[_BIAS] if others else None)
    return checked(dense, scalars, flags, call)


def packed(tensors: Tensors, scalars: tuple[Any, ...], flags: int, length: int | None) -> Prepared:
    """Check a packed or paged call and return it without a backend. tensors: as dispatch's ``keyed`` returns them"""
    q, k, v, slopes, starts_q, starts_k, *others = tensors
    used, leftpad, table, k_descale, v_descale, _, _, paged_starts = (*others, *_PADDING)[:8]
    *_, longest_q, longest_k, k_factor, v_factor = scalars
    if table is None:
        checks.packed(q, k, v, starts_q, starts_k)
    else:
        checks.packed_over_pages(q, k, v, starts_q, paged_starts, table)
    batch = starts_q.shape[0] - 1
    checks.descales(k, k_descale, v_descale, k_factor, v_factor, batch)
    if flags & (NEEDS_GRAD | GIVEN_LSE | TRANSFORMED):
        checks.no_gradients(k)
    if used is not None:
        checks.per_sequence("seqused_k", used, batch, q.device)
    if leftpad is not None:
        if table is not None:
            raise RuntimeError("We don't support Paged KV and leftpad_k running at the same time yet")
        checks.per_sequence("leftpad_k", leftpad, batch, q.device)
    for name, longest in (("max_seqlen_q", longest_q), ("max_seqlen_k", longest_k)):
        if longest > MOST_TOKENS:
            raise RuntimeError(f"{name} must be the longest sequence's length, at most {MOST_TOKENS}, got {longest}")
    call = make_call(
        q, k, v, slopes, scalars, flags, batch, longest_q, longest_k, longest_k,
        cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, block_table=table, seqused_k=used, leftpad_k=leftpad,
        k_descale=k_descale, v_descale=v_descale,
        is_dense=False, equal_lengths=bool(flags & EQUAL_LENGTHS),
    )  # fmt: skip
    check = functools.partial(_check_numbers, longest_q, longest_k, bool(flags & TRANSFORMED))
    return checked(packed, scalars, flags, call, check if checks.may_read(starts_q) else None)


def _check_numbers(longest_q: int, longest_k: int, may_be_hidden: bool, tensors: Tensors, length: int | None) -> None:
    q, k, _, _, starts_q, starts_k, *others = tensors
    if may_be_hidden and any(isinstance(x, Tensor) and torch_state.is_hidden(x) for x in tensors[4:]):
        return
    if not checks.may_read(starts_q):  # which a capture forbids
        return
    used, leftpad, table, _, _, _, _, paged_starts = (*others, *_PADDING)[:8]
    of_keys = (starts_k, k.shape[0]) if table is None else (paged_starts, None)
    if table is not None:
        longest_k = MOST_TOKENS  # nothing is launched by it: the table says how many keys there may be
    checks.values_of_starts(starts_q, of_keys[0], q.shape[0], of_keys[1], longest_q, longest_k, used)
    if table is not None and checks.may_read(table):
        checks.values_of_pages(k, table, used)
    if leftpad is not None and checks.may_read(leftpad):
        checks.values_of_leftpad("leftpad_k", leftpad)


def make_call(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, scalars: tuple[Any, ...], flags: int, batch: int,
    max_seqlen_q: int, max_seqlen_k: int, capacity: int, **others: Any,
) -> AttentionCall:  # fmt: skip
    """Return the call of checked tensors.

    scalars: as ``hashable`` returns them; capacity: the number of keys that windows are measured against
    others: further fields of AttentionCall: bias, or how sequences lie in the tensors
    """
    dropout_p, softmax_scale, causal, left, right, softcap, deterministic, _, _, k_factor, v_factor = scalars
    is_causal = checks.causal(causal)
    if left == -1 and right == -1:
        mask = _CAUSAL if is_causal else _FULL
    else:
        mask = Mask.from_window(is_causal, left, right, max_seqlen_q, capacity)
    dropout_p = checks.dropout(dropout_p)
    if flags & RETURN_PROBS:
        flags |= RETURN_LSE | (RETURN_DMASK | SHARES_DROPOUT_MASK if dropout_p > 0.0 else 0)
    if alibi_slopes is not None:
        checks.alibi(alibi_slopes, q, batch)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else checks.number("softmax_scale", softmax_scale)
    others |= {field: bool(flags & flag) for field, flag in _FIELDS.items()}
    return AttentionCall(
        q, k, v, scale, mask, max_seqlen_q, max_seqlen_k, checks.softcap(softcap), dropout_p, alibi_slopes,
        deterministic=bool(deterministic), k_factor=k_factor, v_factor=v_factor, **others,
    )  # fmt: skip


# The fields of AttentionCall that flags set.
_FIELDS = {
    "return_lse": RETURN_LSE, "return_dmask": RETURN_DMASK, "needs_grad": NEEDS_GRAD, "given_lse": GIVEN_LSE,
    "shares_dropout_mask": SHARES_DROPOUT_MASK, "transformed": TRANSFORMED, "slopes_gradient": SLOPES_GRADIENT,
}  # fmt: skip
_FULL, _CAUSAL = Mask(), Mask(None, 0)


def split_descales(k_descale: object, v_descale: object) -> tuple[tuple[Any, Any], tuple[float, float]]:
    """Return (k_descale, v_descale) as tensors or None, and (k_factor, v_factor), the descales that are numbers.

    Raises RuntimeError for a number that is not positive and finite, and for any other type.
    """
    if k_descale is None and v_descale is None:  # as in most calls
        return _NO_DESCALES
    tensors = [x if isinstance(x, Tensor) else None for x in (k_descale, v_descale)]
    factors = [
        1.0 if x is None or isinstance(x, Tensor) else checks.descale_factor(name, x)
        for name, x in (("k_descale", k_descale), ("v_descale", v_descale))
    ]
    return (tensors[0], tensors[1]), (factors[0], factors[1])


_NO_DESCALES = (None, None), (1.0, 1.0)


def integer(name: str, value: object) -> int:
    """Return ``value`` as an int; it may be a 0-dim tensor of integers or a NumPy integer."""
    if type(value) is int:
        return value
    if isinstance(value, Tensor) and torch_state.is_hidden(value):
        raise RuntimeError(
            f"{name} must be an int here: it is a tensor that a compiler traces, or that vmap gives another axis, so "
            "its number cannot be read"
        )
    try:
        return operator.index(value)  # type: ignore[arg-type]  # or TypeError
    except TypeError:
        raise checks.wrong_type(name, "int", value) from None
