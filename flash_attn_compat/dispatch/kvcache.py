"""Attention over a cache: new keys and values are rotated and appended, then q attends to all of them.

Everything is checked, and the backend chosen, before the cache is touched. Positions stay on the device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.core import checks
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.arguments import integer, make_call, split_descales
from flash_attn_compat.core.call import RETURN_LSE, AttentionCall, Scalars
from flash_attn_compat.core.prepared import Check, Prepared, Tensors
from flash_attn_compat.core.varlen import lse_dtype
from flash_attn_compat.dispatch import op_derivatives, ops
from flash_attn_compat.dispatch.observers import are_strided, must_be_one_operator, refuse_private
from flash_attn_compat.dispatch.serve import find, run

_CACHE_SHAPE = "(batch_size_cache, seqlen_cache, num_heads_k, head_size)"
_COUNT = len(Scalars._fields)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, lengths: int | Tensor | None, rows: Tensor | None, leftpad: Tensor | None,
    table: Tensor | None, slopes: Tensor | None, softmax_scale: float | None, causal: bool,
    window_size: Sequence[int], softcap: float, rotary_interleaved: bool, num_splits: int,
    k_descale: float | Tensor | None, v_descale: float | Tensor | None, return_lse: bool,
    within_operator: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Return (out, softmax_lse), softmax_lse None or without elements unless return_lse.

    within_operator: called by the custom operator, which has handled compilers and modes
    The others are flash_attn_with_kvcache's; lengths, rows, leftpad and table are its cache_seqlens, cache_batch_idx,
    cache_leftpad and block_table.
    """
    length = None  # an int length is in no cache key, for it differs in each step
    if lengths is not None and not isinstance(lengths, Tensor):
        lengths, length = None, integer("cache_seqlens", lengths)
    k_factor = v_factor = 1.0
    if k_descale is not None or v_descale is not None:
        (k_descale, v_descale), (k_factor, v_factor) = split_descales(k_descale, v_descale)
    try:
        left, right = window_size
    except (TypeError, ValueError):
        left, right = checks.two_bounds(window_size)  # raises an error that describes a window
    read = (q, k_cache, v_cache) if k is None and v is None else (q, k_cache, v_cache, k, v)
    if not within_operator and must_be_one_operator(read, False):
        arguments = (
            q, k_cache, v_cache, k, v, cos, sin, lengths, rows, leftpad, table, slopes, softmax_scale, causal, left,
            right, softcap, rotary_interleaved, num_splits, k_descale, v_descale, k_factor, v_factor,
        )  # fmt: skip
        if are_strided(arguments):
            found: tuple[Tensor, Tensor] = _kvcache_op(*arguments, length, return_lse)
            return found
    if rows is not None:
        if table is not None:
            raise RuntimeError("Paged KVcache does not support cache_batch_idx")
        table = rows
    if type(num_splits) is not int:
        num_splits = integer("num_splits", num_splits)
    if k is v is cos is k_descale is v_descale is None:
        tensors: Tensors = q, k_cache, v_cache, slopes, None, None, lengths, leftpad, table
    else:
        tensors = (
            q, k_cache, v_cache, slopes, None, None, lengths, leftpad, table, k_descale, v_descale, None, None, k, v,
            cos, sin,
        )  # fmt: skip
    scalars = (
        0.0, softmax_scale, causal, left, right, softcap, False, 0, 0, k_factor, v_factor, bool(rotary_interleaved),
        num_splits, rows is not None, length is not None, None if length is None else _side_of_rows(q, k, length),
    )  # fmt: skip
    prepared = find(over_cache, tensors, scalars, RETURN_LSE if return_lse else 0, length)
    prepared, result = run(prepared, tensors, length)
    return result.out, result.lse.contiguous() if prepared.call.return_lse else None


def attend_into(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, slopes: Tensor | None, lengths: Tensor, table: Tensor,
    scalars: Scalars, return_lse: bool = False, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    k: Tensor | None = None, v: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Write the result of a call over pages to ``out``, which no input shares; return softmax_lse if asked for.

    Args:
        q, out: (batch, seqlen_q, nheads, headdim)
        lengths: (batch,) int32
        k_descale, v_descale: as in AttentionCall
        k, v: (batch, seqlen_new, nheads_k, headdim), written behind ``lengths`` before. To our kernels a length of
            -seqlen_new says that the sequence has no keys, and that nothing is written

    Nothing is recorded for autograd.
    """
    checks.is_tensor("out", out)
    tensors = (
        q, k_cache, v_cache, slopes, None, None, lengths, None, table, k_descale, v_descale, None, None, k, v, None,
        None,
    )  # fmt: skip
    flags, numbers = RETURN_LSE if return_lse else 0, (*scalars, False, 0, False, False, None)
    result = run(find(over_cache, tensors, numbers, flags), tensors, out=out)[1]
    return result.lse if return_lse else None


class _Arguments(NamedTuple):
    """The function's arguments: tensors first."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    alibi_slopes: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    rotary_interleaved: bool
    num_splits: int
    k_descale: Tensor | None
    v_descale: Tensor | None
    k_factor: float
    v_factor: float

    @property
    def capacity(self) -> int:
        """Slots that one sequence can address."""
        page = self.k_cache.shape[1]
        return page if self.block_table is None else page * self.block_table.shape[1]

    @property
    def seqlen_new(self) -> int:
        return 0 if self.k is None or self.k.is_nested else self.k.shape[1]  # the checks name what is nested


def _side_of_rows(q: Any, k: Any, length: int) -> int | None:
    """Return the sign of keys - rows, on which the backend depends; None without keys."""
    try:
        keys, rows = length + (0 if k is None else k.shape[1]), q.shape[1]
    except (AttributeError, IndexError, RuntimeError):
        return None  # the checks name the argument
    return (keys > rows) - (keys < rows) if keys > 0 else None


def _arguments(tensors: Tensors, scalars: tuple[Any, ...], length: int | None) -> _Arguments:
    q, k_cache, v_cache, slopes, _, _, lengths, leftpad, pages, *others = tensors
    k_descale, v_descale, _, _, k, v, cos, sin = others or (None,) * 8
    x, (interleaved, num_splits, has_rows, has_length, _) = Scalars._make(scalars[:_COUNT]), scalars[_COUNT:]
    rows, table = (pages, None) if has_rows else (None, pages)
    return _Arguments(
        q, k_cache, v_cache, k, v, cos, sin, length if has_length else lengths, rows, leftpad, table, slopes,
        x.softmax_scale, x.causal, x.window_size_left, x.window_size_right, x.softcap or 0.0, interleaved, num_splits,
        k_descale, v_descale, x.k_factor, x.v_factor,
    )  # fmt: skip


def over_cache(tensors: Tensors, scalars: tuple[Any, ...], flags: int, length: int | None) -> Prepared:
    """Check a call over a cache and return it without a backend.

    tensors: in the order of TENSORS, then those of Append, or as far as block_table; lengths, and rows or pages, stand
        in seqused_k's and block_table's places
    scalars: the fields of Scalars, then rotary_interleaved, num_splits, whether there are cache_batch_idx and an int
        length, and the sign of keys - rows with such a length
    """
    given = _arguments(tensors, scalars, length)
    _check(given)

    def bind(tensors: Tensors, length: int | None) -> tuple[AttentionCall, Append | None]:
        arguments = _arguments(tensors, scalars, length)
        call = _call(arguments, scalars[:_COUNT], flags)
        return call, _new_keys(arguments, call)

    call, new = bind(tensors, length)
    whole = call if length is None else bind(tensors, None)[0]
    return Prepared(over_cache, scalars, flags, call, bind, _number_check(given, scalars), True, whole, new)


def _call(arguments: _Arguments, scalars: tuple[Any, ...], flags: int) -> AttentionCall:
    """Return the call of checked arguments. scalars: the fields of Scalars

    Lengths that are known to the host and equal become dense slices of the cache, any others seqused_k, with the new
    keys in both.
    """
    x = arguments
    q, k_cache, v_cache, used, leftpad, table = (
        x.q,
        x.k_cache,
        x.v_cache,
        x.cache_seqlens,
        x.cache_leftpad,
        x.block_table,
    )
    batch, capacity = q.shape[0], x.capacity
    if x.cache_batch_idx is not None:
        table = x.cache_batch_idx.unsqueeze(1)  # a cache row is a page that holds its whole sequence
    elif table is None and k_cache.shape[0] != batch:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    if used is not None and x.seqlen_new:
        used = used + x.seqlen_new
    given = x.alibi_slopes, scalars, flags, batch, q.shape[1]
    others: dict[str, Any] = {"k_descale": x.k_descale, "v_descale": x.v_descale, "appends": x.seqlen_new > 0}
    if isinstance(used, int):
        # The LSE differs between a window that hides nothing in the whole cache and one that hides no used key.
        shows_capacity = x.alibi_slopes is not None and Scalars(*scalars).window_size_left >= 0
        if table is None and leftpad is None and not shows_capacity:
            return make_call(q, k_cache[:, :used], v_cache[:, :used], *given, used, capacity, **others)
        used = torch.full((batch,), used, dtype=torch.int32, device=q.device)
    is_dense = used is None and leftpad is None and table is None
    others |= {"seqused_k": used, "leftpad_k": leftpad, "block_table": table, "is_dense": is_dense}
    return make_call(q, k_cache, v_cache, *given, capacity, capacity, **others)


def _new_keys(arguments: _Arguments, call: AttentionCall) -> Append | None:
    if arguments.k is None or arguments.cache_seqlens is None:  # without a length: of all slots
        return None
    assert arguments.v is not None
    cos, sin = arguments.rotary_cos, arguments.rotary_sin
    # flash-attn looks at no sin without cos, and rotates row i at its own position only if the mask is banded.
    return Append(
        arguments.k, arguments.v, cos, None if cos is None else sin, arguments.rotary_interleaved,
        arguments.cache_seqlens, not call.mask.is_full,
    )  # fmt: skip


def _check(arguments: _Arguments) -> None:
    q, k_cache, v_cache = arguments.q, arguments.k_cache, arguments.v_cache
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        checks.is_tensor(name, tensor)
    checks.tensors(q, k_cache, v_cache, takes_eight_bits=True)
    q_shape, k_shape, v_shape = q.shape, k_cache.shape, v_cache.shape
    if len(q_shape) != 4 or len(k_shape) != 4:
        raise RuntimeError(
            "q must have shape (batch_size, seqlen_q, num_heads, head_size) and kcache must have shape "
            f"{_CACHE_SHAPE}, got {tuple(q_shape)} and {tuple(k_shape)}"
        )
    batch, head_dim = q_shape[0], q_shape[3]
    if batch == 0:
        raise RuntimeError(f"batch size must be positive, got q of shape {tuple(q_shape)}")
    if arguments.num_splits > 128:
        raise RuntimeError(f"num_splits > 128 not supported, got {arguments.num_splits}")
    _check_addressing(arguments)
    if k_shape[3] != head_dim:
        raise RuntimeError(f"kcache must have shape {_CACHE_SHAPE}, got {tuple(k_shape)} for q {tuple(q_shape)}")
    if v_shape != k_shape and (len(v_shape) != 4 or v_shape[:3] != k_shape[:3]):
        raise RuntimeError(f"vcache must have shape {_CACHE_SHAPE}, got {tuple(v_shape)}")
    checks.heads(q, k_cache, v_cache)
    if k_cache.stride(3) != 1 and k_cache.numel():
        raise AssertionError("k_cache must have contiguous last dimension")
    if v_cache.stride(3) != 1 and v_cache.numel():
        raise AssertionError("v_cache must have contiguous last dimension")
    if isinstance(arguments.cache_seqlens, Tensor):
        checks.per_sequence("seqlens_k", arguments.cache_seqlens, batch, q.device)
    if arguments.cache_leftpad is not None:
        checks.is_tensor("cache_leftpad", arguments.cache_leftpad)
        checks.per_sequence("leftpad_k", arguments.cache_leftpad, batch, q.device)
    factors = arguments.k_factor, arguments.v_factor
    checks.descales(k_cache, arguments.k_descale, arguments.v_descale, *factors, batch)
    _check_new_keys(arguments)
    _check_rotary(arguments)


def _check_addressing(arguments: _Arguments) -> None:
    q, k_cache, v_cache = arguments.q, arguments.k_cache, arguments.v_cache
    batch, index, table = q.shape[0], arguments.cache_batch_idx, arguments.block_table
    if table is not None:
        if arguments.cache_leftpad is not None:
            raise RuntimeError("We don't support Paged KV and leftpad_k running at the same time yet")
        checks.pages(q, k_cache, v_cache, table, batch)
    elif index is not None:
        checks.is_int32("cache_batch_idx", index, q.device)
        if index.shape != (batch,):
            raise RuntimeError(f"cache_batch_idx must have shape (batch_size), got {tuple(index.shape)}, batch {batch}")
    elif k_cache.shape[0] < batch:
        raise RuntimeError(
            f"kcache must have shape {_CACHE_SHAPE} with at least batch_size = {batch} rows, got {tuple(k_cache.shape)}"
        )


def _check_new_keys(arguments: _Arguments) -> None:
    q, k, v, lengths = arguments.q, arguments.k, arguments.v, arguments.cache_seqlens
    if k is None:
        if v is not None:
            raise RuntimeError("If value is supplied, key must also be passed in")
        return
    if v is None:
        raise RuntimeError("If key is supplied, value must also be passed in")
    if lengths is None:
        raise RuntimeError("If key is supplied, seqlens_k must also be passed in")
    checks.is_tensor("k", k)
    checks.is_tensor("v", v)
    if k.dtype != q.dtype:
        raise RuntimeError(f"Key must have the same dtype as query, got {k.dtype} and {q.dtype}")
    if v.dtype != q.dtype:
        raise RuntimeError(f"Value must have the same dtype as query, got {v.dtype} and {q.dtype}")
    batch, nheads_k = q.shape[0], arguments.k_cache.shape[2]
    for name, new, cache in (("k", k, arguments.k_cache), ("v", v, arguments.v_cache)):
        expected = (batch, k.shape[1] if k.dim() > 1 else 0, nheads_k, cache.shape[3])
        if tuple(new.shape) != expected:
            raise RuntimeError(
                f"{name} must have shape (batch_size, seqlen_knew, num_heads_k, head_size) = {expected}, "
                f"got {tuple(new.shape)}"
            )
        checks.is_on(name, new, q.device)


def _number_check(given: _Arguments, scalars: tuple[Any, ...]) -> Check | None:
    """Return the check per call that new keys fit and pages and rows exist; None if the host cannot read them."""

    def check(tensors: Tensors, length: int | None) -> None:
        _check_numbers(_arguments(tensors, scalars, length))

    numbers = given.cache_seqlens, given.cache_batch_idx, given.block_table, given.cache_leftpad
    if any([isinstance(x, Tensor) and checks.may_read(x) for x in numbers]):
        return check
    if not isinstance(given.cache_seqlens, int):
        return None
    most = given.capacity - given.seqlen_new

    def check_length(tensors: Tensors, length: int | None) -> None:
        if length is None or not 0 <= length <= most:
            check(tensors, length)

    return check_length


def _check_numbers(arguments: _Arguments) -> None:
    lengths, rows, pages = arguments.cache_seqlens, arguments.cache_batch_idx, arguments.block_table
    if lengths is not None and (isinstance(lengths, int) or checks.may_read(lengths)):
        _check_capacity(arguments, lengths)
    if rows is not None and checks.may_read(rows):
        checks.values_of_rows(arguments.k_cache, rows)
    leftpad = arguments.cache_leftpad
    if leftpad is not None and checks.may_read(leftpad):
        checks.values_of_leftpad("cache_leftpad", leftpad)
    if pages is not None and checks.may_read(pages):
        keys = arguments.capacity if lengths is None else lengths + arguments.seqlen_new
        checks.values_of_pages(arguments.k_cache, pages, keys)


def _check_capacity(arguments: _Arguments, lengths: int | Tensor) -> None:
    if isinstance(lengths, int):
        shortest = longest = lengths
    else:
        shortest, longest = int(lengths.min()), int(lengths.max())
    longest += arguments.seqlen_new
    if shortest < 0 or longest > arguments.capacity:
        where = "the kcache" if arguments.block_table is None else "block_table and its pages"
        given = lengths if isinstance(lengths, int) else lengths.tolist()
        raise RuntimeError(
            f"KV cache: max(seqlens_k) + seqlen_knew (= {longest}) exceeds the capacity addressable by {where} "
            f"(= {arguments.capacity}), or a length is negative: cache_seqlens is {given}"
        )


def _check_rotary(arguments: _Arguments) -> None:
    cos, sin, q = arguments.rotary_cos, arguments.rotary_sin, arguments.q
    if cos is None:
        return
    if arguments.k is None:
        raise RuntimeError(
            "If rotary cos/sin are provided, new key / value to be appended to KV cache must also be provided"
        )
    if sin is None:
        raise RuntimeError("If rotary cos is provided, rotary sin must also be provided")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        checks.is_tensor(name, table)
        if table.dim() != 2:
            raise RuntimeError(f"{name} must have shape (seqlen_ro, rotary_dim / 2), got {tuple(table.shape)}")
        checks.is_on(name, table, q.device)
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > q.shape[-1]:
        raise RuntimeError(f"rotary_dim must be <= headdim, got {rotary_dim} and {q.shape[-1]}")
    if rotary_dim % 16:
        raise RuntimeError(f"Only rotary dimensions divisible by 16 are currently supported, got {rotary_dim}")
    if cos.shape[0] < arguments.capacity:
        raise RuntimeError(
            f"cos/sin seqlen must be at least the seqlen of KV cache, got {cos.shape[0]} and {arguments.capacity}"
        )
    if sin.shape != cos.shape:
        raise RuntimeError(f"rotary_sin must have shape {tuple(cos.shape)}, got {tuple(sin.shape)}")
    if cos.dtype != q.dtype or sin.dtype != q.dtype:
        raise RuntimeError(f"rotary_cos must have the same dtype as query, got {cos.dtype}, {sin.dtype}, {q.dtype}")


_SCHEMA = ops.schema(_Arguments.__annotations__).replace(
    "Tensor k_cache, Tensor v_cache", "Tensor(a!) k_cache, Tensor(b!) v_cache"
)


@torch.library.custom_op(
    "flash_attn_compat::kvcache",
    mutates_args=("k_cache", "v_cache"),
    schema=f"({_SCHEMA}, SymInt? cache_seqlen, bool return_softmax_lse) -> (Tensor, Tensor)",
)
def _kvcache_op(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *rest, cache_seqlen, return_softmax_lse = others
    x = _Arguments(q, *rest)
    out, lse = attend(
        q, x.k_cache, x.v_cache, x.k, x.v, x.rotary_cos, x.rotary_sin,
        x.cache_seqlens if cache_seqlen is None else cache_seqlen, x.cache_batch_idx, x.cache_leftpad, x.block_table,
        x.alibi_slopes, x.softmax_scale, x.causal, (x.window_size_left, x.window_size_right), x.softcap,
        x.rotary_interleaved, x.num_splits, x.k_factor if x.k_descale is None else x.k_descale,
        x.v_factor if x.v_descale is None else x.v_descale, return_softmax_lse, within_operator=True,
    )  # fmt: skip
    return out.contiguous(), q.new_empty(0, dtype=lse_dtype(q.dtype)) if lse is None else lse


@_kvcache_op.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, nheads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, nheads, v_cache.shape[-1]))
    *_, return_softmax_lse = arguments
    lse_shape = (batch, nheads, seqlen_q) if return_softmax_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


op_derivatives.refuse_derivatives(_kvcache_op, refuse_private)
