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
    TRANSFORMED,
    AttentionCall,
    DenseInputs,
    Inputs,
    PackedInputs,
)
from flash_attn_compat.core.mask import MOST_TOKENS, Mask
from flash_attn_compat.core.prepared import Prepared, checked


def dense(x: Inputs, scalars: tuple[Any, ...], flags: int, length: int | None) -> Prepared:
    """Check a dense call and return it without a backend. Raises RuntimeError or IndexError for malformed arguments.

    length: not used, since no dense call has a cache
    """
    checks.dense(x.q, x.k, x.v)
    lengths = x.q.shape[0], x.q.shape[1], x.k.shape[1], x.k.shape[1]
    call = make_call(x, scalars, flags, *lengths)
    return checked(DenseInputs, scalars, flags, call)


def packed(x: Inputs, scalars: tuple[Any, ...], flags: int, length: int | None) -> Prepared:
    """Check a packed or paged call and return it without a backend. x: as dispatch's ``settled`` returns them"""
    q, k, v, starts_q, used, leftpad, table = x.q, x.k, x.v, x.cu_seqlens_q, x.seqused_k, x.leftpad_k, x.block_table
    *_, longest_q, longest_k, k_factor, v_factor = scalars
    if table is None:
        checks.packed(q, k, v, starts_q, x.cu_seqlens_k)
    else:
        checks.packed_over_pages(q, k, v, starts_q, x.cu_seqlens_k, table)
    batch = starts_q.shape[0] - 1
    checks.descales(k, x.k_descale, x.v_descale, k_factor, v_factor, batch)
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
    others = {"is_dense": False, "equal_lengths": bool(flags & EQUAL_LENGTHS)}
    call = make_call(x, scalars, flags, batch, longest_q, longest_k, longest_k, **others)
    check = functools.partial(_check_numbers, longest_q, longest_k, bool(flags & TRANSFORMED))
    return checked(PackedInputs, scalars, flags, call, check if checks.may_read(starts_q) else None)


def _check_numbers(longest_q: int, longest_k: int, may_be_hidden: bool, x: Inputs, length: int | None) -> None:
    starts_q, used, leftpad, table = x.cu_seqlens_q, x.seqused_k, x.leftpad_k, x.block_table
    lengths = starts_q, x.cu_seqlens_k, used, leftpad, table
    if may_be_hidden and any(isinstance(x, Tensor) and torch_state.is_hidden(x) for x in lengths):
        return
    if not checks.may_read(starts_q):  # which a capture forbids
        return
    total_k = x.k.shape[0]
    if table is not None:
        total_k, longest_k = None, MOST_TOKENS  # nothing is launched by it: the table says how many keys there may be
    checks.values_of_starts(starts_q, x.cu_seqlens_k, x.q.shape[0], total_k, longest_q, longest_k, used)
    if table is not None and checks.may_read(table):
        checks.values_of_pages(x.k, table, used)
    if leftpad is not None and checks.may_read(leftpad):
        checks.values_of_leftpad("leftpad_k", leftpad)


def make_call(
    x: Inputs, scalars: tuple[Any, ...], flags: int, batch: int, max_seqlen_q: int, max_seqlen_k: int, capacity: int,
    **others: Any,
) -> AttentionCall:  # fmt: skip
    """Return the call of checked tensors.

    scalars: as ``hashable`` returns them; capacity: the number of keys that windows are measured against
    others: further fields of AttentionCall
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
    if x.alibi_slopes is not None:
        checks.alibi(x.alibi_slopes, x.q, batch)
    scale = x.q.shape[-1] ** -0.5 if softmax_scale is None else checks.number("softmax_scale", softmax_scale)
    others |= {field: bool(flags & flag) for field, flag in _FIELDS.items()}
    return AttentionCall(
        x.q, x.k, x.v, scale, mask, max_seqlen_q, max_seqlen_k, checks.softcap(softcap), dropout_p,
        deterministic=bool(deterministic), k_factor=k_factor, v_factor=v_factor, **others,
    ).over(x)  # fmt: skip


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
