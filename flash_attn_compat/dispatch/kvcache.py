"""Attention over a cache: new keys and values are rotated and appended, then q attends to all of them.

Everything is checked, and the backend chosen, before the cache is touched. Positions stay on the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.core import checks, overlap
from flash_attn_compat.core.arguments.options import integer, split_descales
from flash_attn_compat.core.call import lse_dtype
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import CacheInputs, Options, new_tuple
from flash_attn_compat.dispatch.pytorch import sharding
from flash_attn_compat.dispatch.pytorch.observers import (
    are_strided,
    must_be_one_operator,
    refuse_private,
    refuse_transforms,
)
from flash_attn_compat.dispatch.serve import find, run

_LSE = int(Feature.LSE)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, rotary_cos: Tensor | None,
    rotary_sin: Tensor | None, cache_seqlens: int | Tensor | None, cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None, block_table: Tensor | None, alibi_slopes: Tensor | None,
    softmax_scale: float | None, causal: bool,
    window_size: Sequence[int], softcap: float, rotary_interleaved: bool, num_splits: int,
    k_descale: float | Tensor | None, v_descale: float | Tensor | None, return_lse: bool,
    within_operator: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Return (out, softmax_lse), softmax_lse None or without elements unless return_lse.

    within_operator: called by the custom operator, which has handled compilers and modes
    The others are flash_attn_with_kvcache's.
    """
    length = None  # an int length is in no cache key, for it differs in each step
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        cache_seqlens, length = None, integer("cache_seqlens", cache_seqlens)
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
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table, alibi_slopes, softmax_scale, causal, left, right, softcap, rotary_interleaved, num_splits,
            k_descale, v_descale, k_factor, v_factor,
        )  # fmt: skip
        if any([sharding.is_distributed(x) for x in arguments]):
            sharding.refuse("caches")
        if are_strided(arguments):
            found: tuple[Tensor, Tensor] = _kvcache_op(*arguments, length, return_lse)
            return found
    table = block_table
    if cache_batch_idx is not None:
        if table is not None:
            raise RuntimeError("Paged KVcache does not support cache_batch_idx")
        table = cache_batch_idx
    if type(num_splits) is not int:
        num_splits = integer("num_splits", num_splits)
    x = new_tuple(CacheInputs, (
        q, k_cache, v_cache, alibi_slopes, cache_seqlens, cache_leftpad, table, k_descale, v_descale, k, v, rotary_cos,
        rotary_sin,
    ))  # fmt: skip
    options = new_tuple(Options, (
        0.0, softmax_scale, causal, left, right, softcap, False, _LSE if return_lse else 0, 0, 0, k_factor, v_factor,
        bool(rotary_interleaved), num_splits, cache_batch_idx is not None, length is not None,
        None if length is None else _side_of_rows(q, k, length),
    ))  # fmt: skip
    entry, result = run(find(x, options, length), x, length)
    return result.out, result.lse.contiguous() if entry.call.use & _LSE else None


def attend_into(out: Tensor, x: CacheInputs, options: Options) -> Tensor | None:
    """Write the result of a call over pages to ``out``, which no input shares; return softmax_lse if asked for.

    Args:
        out: as x.q
        x: q is (batch, seqlen_q, nheads, headdim); k_new and v_new are written behind seqused_k, (batch,) int32. To our
            kernels a length of -seqlen_new says that the sequence has no keys, and that nothing is written
        options: ``use`` holds Feature.LSE or nothing

    Nothing is recorded for autograd.
    """
    checks.is_tensor("out", out)
    result = run(find(x, options), x, out=out)[1]
    return result.lse if options.use & _LSE else None


def _side_of_rows(q: Any, k: Any, length: int) -> int | None:
    """Return the sign of keys - rows, on which the backend depends; None without keys."""
    try:
        keys, rows = length + (0 if k is None else k.shape[1]), q.shape[1]
    except (AttributeError, IndexError, RuntimeError):
        return None  # the checks name the argument
    return (keys > rows) - (keys < rows) if keys > 0 else None


_SCHEMA = (
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, Tensor? alibi_slopes, "
    "float? softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
    "bool rotary_interleaved, SymInt num_splits, Tensor? k_descale, Tensor? v_descale, float k_factor, float v_factor"
)
_NAMES = [argument.split()[-1] for argument in _SCHEMA.split(", ")]


@torch.library.custom_op(
    "flash_attn_compat::kvcache",
    mutates_args=("k_cache", "v_cache"),
    schema=f"({_SCHEMA}, SymInt? cache_seqlen, bool return_softmax_lse) -> (Tensor, Tensor)",
)
def _kvcache_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    x = dict(zip(_NAMES, arguments))
    *_, length, return_lse = arguments
    q = x["q"]
    window = x.pop("window_size_left"), x.pop("window_size_right")
    for name in ("k_descale", "v_descale"):
        factor = x.pop(name.replace("descale", "factor"))
        x[name] = factor if x[name] is None else x[name]
    lengths = x.pop("cache_seqlens")
    out, lse = attend(
        **x, cache_seqlens=lengths if length is None else length, window_size=window, return_lse=return_lse,
        within_operator=True,
    )  # fmt: skip
    return out.contiguous(), q.new_empty(0, dtype=lse_dtype(q.dtype)) if lse is None else lse


@_kvcache_op.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, *arguments: object) -> tuple[Tensor, Tensor]:
    if k is not None and k.shape[1]:  # a compiler may pass the operator copies of the caches, which do not overlap
        overlap.refuse("k_cache", k_cache)
        overlap.refuse("v_cache", v_cache)
    batch, seqlen_q, nheads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, nheads, v_cache.shape[-1]))
    *_, return_softmax_lse = arguments
    lse_shape = (batch, nheads, seqlen_q) if return_softmax_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


refuse_transforms(_kvcache_op, refuse_private)
