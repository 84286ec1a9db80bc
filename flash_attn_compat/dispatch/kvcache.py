"""Attention over a KV cache: rotate the new keys, append them and the new values, then attend to the whole cache.

All arguments are checked and the backend is chosen before the cache is written. Lengths in tensors stay on the device.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flash_attn_compat.core import checks
from flash_attn_compat.core.arguments.options import integer, split_descales
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import CacheInputs, Options, new_tuple
from flash_attn_compat.dispatch import ops
from flash_attn_compat.dispatch.pytorch import sharding
from flash_attn_compat.dispatch.pytorch.observers import (
    are_strided,
    must_be_one_operator,
)
from flash_attn_compat.dispatch.serve import compute

_LSE = int(Feature.LSE)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, rotary_cos: Tensor | None,
    rotary_sin: Tensor | None, cache_seqlens: int | Tensor | None, cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None, block_table: Tensor | None, alibi_slopes: Tensor | None,
    softmax_scale: float | None, causal: bool,
    window_size: Sequence[int], softcap: float, rotary_interleaved: bool, num_splits: int,
    k_descale: float | Tensor | None, v_descale: float | Tensor | None, return_lse: bool,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Return (out, softmax_lse). The arguments are those of flash_attn_with_kvcache.

    Without return_lse, softmax_lse is None or has no elements.
    """
    length = None  # an int length is kept out of the cache key, because it differs in each step
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        length = cache_seqlens if type(cache_seqlens) is int else integer("cache_seqlens", cache_seqlens)
        cache_seqlens = None
    k_factor = v_factor = 1.0
    if k_descale is not None or v_descale is not None:
        (k_descale, v_descale), (k_factor, v_factor) = split_descales(k_descale, v_descale)
    try:
        left, right = window_size
    except (TypeError, ValueError):
        left, right = checks.two_bounds(window_size)  # raises an error that describes a window
    table = block_table
    if cache_batch_idx is not None:
        if table is not None:
            raise RuntimeError("Paged KVcache does not support cache_batch_idx")
        table = cache_batch_idx
    if type(num_splits) is not int:
        num_splits = integer("num_splits", num_splits)
    tensors = (
        q, k_cache, v_cache, alibi_slopes, cache_seqlens, cache_leftpad, table, k_descale, v_descale, k, v, rotary_cos,
        rotary_sin,
    )  # fmt: skip
    numbers = (
        0.0, softmax_scale, causal, left, right, softcap, False, _LSE if return_lse else 0, 0, 0, k_factor, v_factor,
        bool(rotary_interleaved), num_splits, cache_batch_idx is not None, length is not None,
    )  # fmt: skip
    read = (q, k_cache, v_cache) if k is None and v is None else (q, k_cache, v_cache, k, v)
    if must_be_one_operator(read, False):
        if any([sharding.is_distributed(x) for x in tensors]):
            sharding.refuse("caches")
        if are_strided(tensors):
            return ops.attend_over_cache(CacheInputs(*tensors), Options(*numbers), length)
    entry, result = compute(new_tuple(CacheInputs, tensors), new_tuple(Options, numbers), length)
    return result.out, result.lse.contiguous() if entry.call.use & _LSE else None


def attend_into(out: Tensor, x: CacheInputs, options: Options) -> Tensor | None:
    """Write the result of a call over pages to ``out``; return softmax_lse if asked for. Autograd records nothing.

    Args:
        out: of the shape and dtype of x.q; it shares memory with no input
        x: q is (batch, seqlen_q, nheads, headdim); k_new and v_new are written behind seqused_k, (batch,) int32. For
            our kernels, seqused_k = -seqlen_new marks a sequence without keys, for which nothing is written
        options: ``use`` is Feature.LSE or 0
    """
    if not isinstance(out, Tensor):
        checks.is_tensor("out", out)  # raises, since ``out`` is no tensor
    result = compute(x, options, out=out)[1]
    return result.lse if options.use & _LSE else None
