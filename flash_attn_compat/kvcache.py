"""flash_attn_with_kvcache: signature, documentation and return shapes. dispatch/kvcache.py computes it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_attn_compat.dispatch import kvcache, sinks


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ``q`` over a key/value cache, after writing new keys and values into it in place.

    Not differentiable. Arguments:
        q: (batch_size, seqlen_q, nheads, headdim)
        k_cache, v_cache: (batch_size_cache, seqlen_cache, nheads_k, headdim), or (num_blocks,
            page_block_size, nheads_k, headdim) with block_table; the last dimension contiguous
        k, v: (batch_size, seqlen_new, nheads_k, headdim), written behind the cache_seqlens of each sequence
        rotary_cos, rotary_sin: (at least the cache's capacity, rotary_dim / 2) in q's dtype; rotates k at
            its positions, and q at cache_seqlens + row if causal or windowed, else at cache_seqlens
        cache_seqlens: how many cache slots are in use before the call, from slot 0 on: an int or
            (batch_size,) int32; default all of them. It is not updated. An int is passed on as a number.
        cache_batch_idx: (batch_size,) int32, the cache row of each sequence; default its own index
        cache_leftpad: (batch_size,) int32, slots to skip at the front
        block_table: (batch_size, max_num_blocks_per_seq) int32, the pages of each sequence
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in flash_attn_func, with seqlen_k the
            slots in use after the append, less the skipped ones
        rotary_interleaved: rotate channels (0, 1), (2, 3), ... rather than the two halves
        num_splits: accepted and ignored, apart from its upper limit
        return_softmax_lse: also return softmax_lse
        s_aux [not in flash-attn]: (nheads,), attention sinks, as in flash_attn_func
        k_descale, v_descale [not in flash-attn 2]: of caches of float8_e4m3fn or float8_e5m2 beside q in fp16 or bf16:
            a number or fp32 (batch_size or 1, nheads_k or 1), by which the cache's numbers are multiplied; default 1.
            New keys and values, in q's dtype, are divided by it, then rounded to the nearest 8-bit float, the largest
            one at most
    Returns:
        out: (batch_size, seqlen_q, nheads, headdim)
        softmax_lse [with return_softmax_lse]: (batch_size, nheads, seqlen_q) fp32
    Raises:
        RuntimeError: something does not fit together, the new keys do not fit into the cache, or they would go to a
            cache that overlaps itself (as after expand or unfold). The cache is unchanged then. The host does not
            read a cache_seqlens tensor on a GPU: there the fused backend leaves out keys that do not fit, and other
            backends end in a device assert.
    """
    if s_aux is not None:
        sinks.check(s_aux, q.shape[-2], q.device, alibi_slopes)
    out, lse = kvcache.attend(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes, softmax_scale, causal, window_size, softcap, rotary_interleaved, num_splits, k_descale,
        v_descale, return_softmax_lse if s_aux is None else True,
    )  # fmt: skip
    if s_aux is not None:
        out, lse = sinks.absorb(out, lse, s_aux.detach())
    return (out, lse) if return_softmax_lse else out
