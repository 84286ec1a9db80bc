"""From flash-attn's arguments to a request, and from that to an AttentionCall: checks, defaults and conversions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.core import checks, torch_state
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.mask import MOST_TOKENS, Mask
from flash_attn_compat.core.prepared import Alike, Request, RequestKind, shared_properties


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
    """How a call's results are used: fields of AttentionCall that follow from the caller, not from the options."""

    needs_grad: bool = False
    return_lse: bool = False
    return_dmask: bool = False
    shares_dropout_mask: bool = False
    given_lse: bool = False
    transformed: bool = False
    slopes_gradient: bool = False


FORWARD, RECORDED, TRANSFORMED = Purpose(), Purpose(needs_grad=True), Purpose(transformed=True)
# The slopes' gradient comes from another backend's operators, which draw the same dropout mask.
RECORDED_WITH_SLOPES = Purpose(needs_grad=True, shares_dropout_mask=True, slopes_gradient=True)
_VALUES = frozenset({bool, int, float, str, type(None)})


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


def request_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[Any, ...],
    purpose: Purpose = FORWARD,
    packing: tuple[Any, ...] | None = None,
    bias: Tensor | None = None,
) -> Request:
    """Return the request of a dense call, or of a packed or paged one where ``packing`` is given.

    q, k, v: (batch, seqlen, heads, head_dim); with packing (total, heads, head_dim), or paged k and v
    options, packing: the fields of Options and Packing; bias: as in AttentionCall, for dense tensors; not checked here
    """
    dropout_p, scale, causal, window_size, softcap, slopes, deterministic, return_attn_probs = options
    values = plain(dropout_p, scale, causal, window_size, softcap, deterministic, return_attn_probs)
    if packing is None:
        own = (q, k, v, slopes)
        return Request(DENSE, own if bias is None else (*own, *(None,) * 5, bias), (values, purpose))
    starts_q, starts_k, max_seqlen_q, max_seqlen_k, table, used, leftpad = packing
    if type(max_seqlen_q) is not int or type(max_seqlen_k) is not int:
        max_seqlen_q, max_seqlen_k = integer("max_seqlen_q", max_seqlen_q), integer("max_seqlen_k", max_seqlen_k)
    tensors: tuple[Any, ...] = (q, k, v, slopes, starts_q, starts_k)
    if table is None and used is None and leftpad is None:
        equal_lengths = starts_q is starts_k or (not purpose.transformed and _hold_the_same(starts_q, starts_k))
    else:
        equal_lengths = False
        if table is None:
            tensors = (*tensors, used, leftpad)
        else:
            if used is None and isinstance(starts_k, Tensor) and starts_k.dim() == 1:
                used = starts_k[1:] - starts_k[:-1]
            tensors = (*tensors[:5], None, used, leftpad, table, None, None, starts_k)
    return Request(PACKED, tensors, (values, purpose, max_seqlen_q, max_seqlen_k, equal_lengths))


def call_of(
    q: Tensor, k: Tensor, v: Tensor, options: Options, purpose: Purpose = FORWARD, packing: Packing | None = None
) -> AttentionCall:
    """Return the checked call of the same arguments. Raises as checks.dense and checks.packed do."""
    request = request_of(q, k, v, options, purpose, packing)
    return request.kind.build(request).call


def plain(
    dropout_p: Any, scale: Any, causal: Any, window_size: Any, softcap: Any, deterministic: Any, return_attn_probs: Any
) -> tuple[Any, ...]:
    """Return the options without slopes as hashable values for a cache key, with window_size as two bounds."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        left, right = checks.two_bounds(window_size)  # raises, and says what a window is
    if type(left) is not int or type(right) is not int:  # 1.0 is no bound, and equals 1
        left, right = integer("window_size_left", left), integer("window_size_right", right)
    values = dropout_p, scale, causal, left, right, softcap, deterministic, return_attn_probs
    if (
        (scale is None or type(scale) is float)
        and type(dropout_p) is type(softcap) is float
        and type(causal) is type(deterministic) is type(return_attn_probs) is bool
    ) or _VALUES.issuperset(map(type, values)):  # the usual types are known in half the time
        return values
    return (
        checks.number("dropout_p", dropout_p), None if scale is None else checks.number("softmax_scale", scale),
        checks.causal(causal), left, right, checks.softcap(softcap), bool(deterministic),
        bool(return_attn_probs),
    )  # fmt: skip


def _build_dense(request: Request) -> Alike:
    q, k, v, slopes, *others = request.tensors
    checks.dense(q, k, v)
    values, purpose = request.values
    lengths = q.shape[0], q.shape[1], k.shape[1], k.shape[1]
    return shared_properties(_call(q, k, v, slopes, values, purpose, *lengths, bias=others[5] if others else None))


def _build_packed(request: Request) -> Alike:
    q, k, v, slopes, starts_q, starts_k, *others = request.tensors
    used, leftpad, table, _, _, paged_starts = (*others, *(None,) * 6)[:6]
    values, purpose, longest_q, longest_k, equal_lengths = request.values
    if table is None:
        checks.packed(q, k, v, starts_q, starts_k)
    else:
        checks.packed_over_pages(q, k, v, starts_q, paged_starts, table)
    batch = starts_q.shape[0] - 1
    if used is not None:
        checks.per_sequence("seqused_k", used, batch, q.device)
    if leftpad is not None:
        if table is not None:
            raise RuntimeError("We don't support Paged KV and leftpad_k running at the same time yet")
        checks.per_sequence("leftpad_k", leftpad, batch, q.device)
    for name, longest in (("max_seqlen_q", longest_q), ("max_seqlen_k", longest_k)):
        if longest > MOST_TOKENS:
            raise RuntimeError(f"{name} must be the longest sequence's length, at most {MOST_TOKENS}, got {longest}")
    call = _call(
        q, k, v, slopes, values, purpose, batch, longest_q, longest_k, longest_k,
        cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, block_table=table, seqused_k=used, leftpad_k=leftpad,
        is_dense=False, equal_lengths=equal_lengths,
    )  # fmt: skip
    check = _check_packed_if_not_hidden if purpose.transformed else _check_packed
    return shared_properties(call, check if checks.may_read(starts_q) else None)


def _check_packed_if_not_hidden(request: Request) -> None:
    if not any(isinstance(x, Tensor) and torch_state.is_hidden(x) for x in request.tensors[4:]):
        _check_packed(request)


def _check_packed(request: Request) -> None:
    q, k, _, _, starts_q, starts_k, *others = request.tensors
    _, _, longest_q, longest_k, _ = request.values
    if not checks.may_read(starts_q):  # which a capture forbids
        return
    table = others[2] if len(others) > 2 else None
    of_keys = (starts_k, k.shape[0]) if table is None else (others[5], None)
    if table is not None:
        longest_k = MOST_TOKENS  # nothing is launched by it: the table says how many keys there may be
    used = others[0] if others else None
    checks.values_of_starts(starts_q, of_keys[0], q.shape[0], of_keys[1], longest_q, longest_k, used)
    if table is not None and checks.may_read(table):
        checks.values_of_pages(k, table, others[0])
    leftpad = others[1] if len(others) > 1 else None
    if leftpad is not None and checks.may_read(leftpad):
        checks.values_of_leftpad("leftpad_k", leftpad)


DENSE = RequestKind("dense", _build_dense)
PACKED = RequestKind("packed", _build_packed)


def cache_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    seqlen_new: int,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    values: tuple[Any, ...],
) -> AttentionCall:
    """(batch, seqlen_q, nheads, headdim) queries over a cache; dispatch/kvcache.py has checked all but the values.

    The tensors are flash_attn_with_kvcache's; seqlen_new: how many keys are written behind cache_seqlens before.
    Lengths that are known to the host and equal become dense slices of the cache, any others seqused_k, with the new
    keys in both. values: as ``plain`` gives them
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
    given = alibi_slopes, values, FORWARD, batch, seqlen_q
    if isinstance(used, int):
        # The LSE differs between a window that hides nothing in the whole cache and one that hides no used key.
        shows_capacity = alibi_slopes is not None and values[3] >= 0
        if table is None and leftpad is None and not shows_capacity:
            return _call(q, k_cache[:, :used], v_cache[:, :used], *given, used, capacity, appends=appends)
        used = torch.full((batch,), used, dtype=torch.int32, device=q.device)
    return _call(
        q, k_cache, v_cache, *given, capacity, capacity,
        seqused_k=used, leftpad_k=leftpad, block_table=table, appends=appends,
        is_dense=used is None and leftpad is None and table is None,
    )  # fmt: skip


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    values: tuple[Any, ...],
    purpose: Purpose,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    capacity: int,
    **others: Any,
) -> AttentionCall:
    """Return the call of checked tensors.

    values: as ``plain`` returns them; capacity: the number of keys that windows are measured against
    others: further fields of AttentionCall: bias, or how sequences lie in the tensors
    """
    dropout_p, softmax_scale, causal, left, right, softcap, deterministic, return_attn_probs = values
    is_causal = checks.causal(causal)
    if left == -1 and right == -1:
        mask = _CAUSAL if is_causal else _FULL
    else:
        mask = Mask.from_window(is_causal, left, right, max_seqlen_q, capacity)
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
        transformed=purpose.transformed,
        slopes_gradient=purpose.slopes_gradient,
        **others,
    )  # fmt: skip


_FULL, _CAUSAL = Mask(), Mask(None, 0)


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


def _hold_the_same(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    """Whether both hold the same numbers, as far as the host can read them without waiting for a GPU."""
    if not isinstance(cu_seqlens_q, Tensor) or not isinstance(cu_seqlens_k, Tensor):
        return False
    if cu_seqlens_q.is_nested or cu_seqlens_k.is_nested:
        return False  # the checks name it
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.device != cu_seqlens_k.device:
        return False
    if cu_seqlens_q.device.type == "cpu":
        return torch.equal(cu_seqlens_q, cu_seqlens_k)
    return cu_seqlens_q.is_cuda and cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr()
