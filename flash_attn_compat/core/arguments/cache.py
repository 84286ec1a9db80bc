"""Check the arguments of calls over a KV cache, and build their AttentionCall and the keys that they append."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.core import checks, overlap
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.arguments.build import make_call
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.entry import Check
from flash_attn_compat.core.inputs import Inputs, Options

_CACHE_SHAPE = "(batch_size_cache, seqlen_cache, num_heads_k, head_size)"


def _capacity(x: Inputs, options: Options) -> int:
    """Return how many cache slots one sequence can address."""
    page: int = x.k.shape[1]
    return page if x.block_table is None or options.has_rows else page * x.block_table.shape[1]


def _seqlen_new(x: Inputs) -> int:
    return 0 if x.k_new is None or x.k_new.is_nested else x.k_new.shape[1]  # a later check refuses nested


def cache_call(x: Inputs, options: Options, length: int | None) -> tuple[AttentionCall, Append | None]:
    """Return the AttentionCall of checked inputs over a cache, and the keys and values that it appends first, or None.

    If all sequences have one int length, the call is dense over a slice of the cache. Otherwise its seqused_k holds
    the lengths. Both count the new keys. Without any length the call covers all slots.
    """
    before = length if options.has_length else x.seqused_k
    count, capacity, batch = _seqlen_new(x), _capacity(x, options), x.q.shape[0]
    used, k, v, table = before, x.k, x.v, x.block_table
    if options.has_rows:
        table = table.unsqueeze(1)  # each row of the cache counts as one page that holds a whole sequence
    elif table is None and k.shape[0] != batch:
        k, v = k[:batch], v[:batch]
    if used is not None and count:
        used = used + count
    longest = capacity
    if isinstance(used, int):
        # With ALiBi the LSE depends on whether the window covers the cache's whole capacity: a slice would hide that.
        shows_capacity = x.alibi_slopes is not None and options.window_size_left >= 0
        if table is None and x.leftpad_k is None and not shows_capacity:
            k, v, longest, used = k[:, :used], v[:, :used], used, None
        else:
            used = torch.full((batch,), used, dtype=torch.int32, device=x.q.device)
    is_dense = used is None and x.leftpad_k is None and table is None
    own: Any = x
    own = own._replace(k=k, v=v, seqused_k=used, block_table=table)
    call = make_call(own, options, batch, x.q.shape[1], longest, capacity, is_dense, appends=count > 0)
    if x.k_new is None or before is None:  # without a length there is no slot to append at
        return call, None
    # flash-attn ignores sin without cos. It rotates row i of q at its own position only under a causal or window mask.
    sin = None if x.rotary_cos is None else x.rotary_sin
    new = Append(x.k_new, x.v_new, x.rotary_cos, sin, options.rotary_interleaved, before, not call.mask.is_full)
    return call, new


def check_cache(x: Inputs, options: Options, length: int | None) -> Check | None:
    """Raise for malformed inputs of a call over a cache. Return the check of values that all calls repeat, or None."""
    q, k_cache, v_cache = x.q, x.k, x.v
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
    if options.num_splits > 128:
        raise RuntimeError(f"num_splits > 128 not supported, got {options.num_splits}")
    _check_addressing(x, options)
    if k_shape[3] != head_dim:
        raise RuntimeError(f"kcache must have shape {_CACHE_SHAPE}, got {tuple(k_shape)} for q {tuple(q_shape)}")
    if v_shape != k_shape and (len(v_shape) != 4 or v_shape[:3] != k_shape[:3]):
        raise RuntimeError(f"vcache must have shape {_CACHE_SHAPE}, got {tuple(v_shape)}")
    checks.heads(q, k_cache, v_cache)
    if k_cache.stride(3) != 1 and k_cache.numel():
        raise AssertionError("k_cache must have contiguous last dimension")
    if v_cache.stride(3) != 1 and v_cache.numel():
        raise AssertionError("v_cache must have contiguous last dimension")
    if isinstance(x.seqused_k, Tensor):
        checks.per_sequence("seqlens_k", x.seqused_k, batch, q.device)
    if x.leftpad_k is not None:
        checks.is_tensor("cache_leftpad", x.leftpad_k)
        checks.per_sequence("leftpad_k", x.leftpad_k, batch, q.device)
    checks.descales(k_cache, x.k_descale, x.v_descale, options.k_factor, options.v_factor, batch)
    _check_new_keys(x, options)
    _check_rotary(x, options)
    return _number_check(x, options, length)


def _check_addressing(x: Inputs, options: Options) -> None:
    q, k_cache, v_cache = x.q, x.k, x.v
    batch, table = q.shape[0], x.block_table
    index = table if options.has_rows else None
    if table is not None and index is None:
        if x.leftpad_k is not None:
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


def _check_new_keys(x: Inputs, options: Options) -> None:
    q, k, v = x.q, x.k_new, x.v_new
    if k is None:
        if v is not None:
            raise RuntimeError("If value is supplied, key must also be passed in")
        return
    if v is None:
        raise RuntimeError("If key is supplied, value must also be passed in")
    if x.seqused_k is None and not options.has_length:
        raise RuntimeError("If key is supplied, seqlens_k must also be passed in")
    checks.is_tensor("k", k)
    checks.is_tensor("v", v)
    if k.dtype != q.dtype:
        raise RuntimeError(f"Key must have the same dtype as query, got {k.dtype} and {q.dtype}")
    if v.dtype != q.dtype:
        raise RuntimeError(f"Value must have the same dtype as query, got {v.dtype} and {q.dtype}")
    batch, nheads_k = q.shape[0], x.k.shape[2]
    for name, new, cache in (("k", k, x.k), ("v", v, x.v)):
        expected = (batch, k.shape[1] if k.dim() > 1 else 0, nheads_k, cache.shape[3])
        if tuple(new.shape) != expected:
            raise RuntimeError(
                f"{name} must have shape (batch_size, seqlen_knew, num_heads_k, head_size) = {expected}, "
                f"got {tuple(new.shape)}"
            )
        checks.is_on(name, new, q.device)
        if k.shape[1]:
            overlap.refuse(f"{name}_cache", cache)


def _number_check(given: Inputs, options: Options, length: int | None) -> Check | None:
    """Return a check, made at every call, that new keys fit the cache and that its pages and rows exist.

    None if the host can read none of the lengths, pages and rows.
    """
    check = functools.partial(_check_numbers, options)
    numbers = given.seqused_k, given.block_table, given.leftpad_k
    if any([x is not None and checks.may_read(x) for x in numbers]):
        return check
    if length is None:
        return None
    most = _capacity(given, options) - _seqlen_new(given)

    def check_length(x: Inputs, length: int | None) -> None:
        if length is None or not 0 <= length <= most:
            check(x, length)

    return check_length


def _check_numbers(options: Options, x: Inputs, length: int | None) -> None:
    lengths, table = length if options.has_length else x.seqused_k, x.block_table
    if lengths is not None and (isinstance(lengths, int) or checks.may_read(lengths)):
        _check_capacity(x, options, lengths)
    if x.leftpad_k is not None and checks.may_read(x.leftpad_k):
        checks.values_of_leftpad("cache_leftpad", x.leftpad_k)
    if table is None or not checks.may_read(table):
        return
    if options.has_rows:
        checks.values_of_rows(x.k, table)
    else:
        checks.values_of_pages(x.k, table, _capacity(x, options) if lengths is None else lengths + _seqlen_new(x))


def _check_capacity(x: Inputs, options: Options, lengths: int | Tensor) -> None:
    capacity = _capacity(x, options)
    if isinstance(lengths, int):
        shortest = longest = lengths
    else:
        shortest, longest = int(lengths.min()), int(lengths.max())
    longest += _seqlen_new(x)
    if shortest < 0 or longest > capacity:
        where = "the kcache" if x.block_table is None or options.has_rows else "block_table and its pages"
        given = lengths if isinstance(lengths, int) else lengths.tolist()
        raise RuntimeError(
            f"KV cache: max(seqlens_k) + seqlen_knew (= {longest}) exceeds the capacity addressable by {where} "
            f"(= {capacity}), or a length is negative: cache_seqlens is {given}"
        )


def _check_rotary(x: Inputs, options: Options) -> None:
    cos, sin, q = x.rotary_cos, x.rotary_sin, x.q
    if cos is None:
        return
    if x.k_new is None:
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
    if cos.shape[0] < _capacity(x, options):
        raise RuntimeError(
            f"cos/sin seqlen must be at least the seqlen of KV cache, got {cos.shape[0]} and {_capacity(x, options)}"
        )
    if sin.shape != cos.shape:
        raise RuntimeError(f"rotary_sin must have shape {tuple(cos.shape)}, got {tuple(sin.shape)}")
    if cos.dtype != q.dtype or sin.dtype != q.dtype:
        raise RuntimeError(f"rotary_cos must have the same dtype as query, got {cos.dtype}, {sin.dtype}, {q.dtype}")
