"""Shared by MHA and ParallelMHA: rotation, the inner attention, and the KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn_compat.flash_attn_interface import flash_attn_with_kvcache
from flash_attn_compat.layers.rotary import RotaryEmbedding
from flash_attn_compat.modules._inner_attention import FlashCrossAttention, as_fp32


def _update_kv_cache(kv: Tensor, inference_params: Any, layer_idx: int) -> Tensor:
    """Write kv into the layer's cache at the current offsets, allocating it on first use.

    Args:
        kv: (batch, seqlen, 2, nheads_k, headdim).
        inference_params: see `flash_attn_compat.utils.generation.InferenceParams`.
    Returns:
        (batch, seqlen_offset + seqlen, 2, nheads_k, headdim), a view of the cache's tokens so far.
    """
    caches: dict[int, Tensor] = inference_params.key_value_memory_dict
    if layer_idx not in caches:
        shape = (inference_params.max_batch_size, inference_params.max_seqlen, 2, *kv.shape[-2:])
        caches[layer_idx] = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    cache = caches[layer_idx]
    rows = _batch_rows(inference_params, kv.shape[0])
    end = inference_params.seqlen_offset + kv.shape[1]
    assert rows.stop <= cache.shape[0] and end <= cache.shape[1], (
        f"kv of shape {tuple(kv.shape)} at batch {rows.start} and position {inference_params.seqlen_offset} "
        f"does not fit into the cache of shape {tuple(cache.shape)}"
    )
    cache[rows, inference_params.seqlen_offset : end] = kv
    return cache[rows, :end]


class CachedAttention(nn.Module):
    """Attention between projections. The subclass sets the attributes below and does the projections."""

    use_flash_attn: bool
    checkpointing: bool
    layer_idx: int | None
    rotary_emb_dim: int
    rotary_emb: RotaryEmbedding  # only if rotary_emb_dim > 0
    inner_attn: nn.Module
    inner_cross_attn: nn.Module

    def _self_context(
        self, qkv: Tensor, inference_params: Any, max_seqlen: int | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """qkv (..., 3, nheads, headdim) to (..., nheads, headdim), through the cache if there is one."""
        if self._decodes_in_one_call(inference_params):
            return self._apply_rotary_update_kvcache_attention(qkv[:, :, 0], qkv[:, :, 1:], inference_params)
        if self.rotary_emb_dim > 0:
            qkv = self.rotary_emb(qkv, **_rotary_position(inference_params, max_seqlen, qkv.shape[0]))
        if inference_params is not None:
            return self._update_kvcache_attention(qkv[:, :, 0], qkv[:, :, 1:], inference_params)
        context: Tensor = self._run_attention(self.inner_attn, qkv, **kwargs)
        return context

    def _cross_context(
        self, q: Tensor, kv: Tensor, inference_params: Any, max_seqlen: int | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """q (..., nheads, headdim) and kv (..., 2, nheads_k, headdim) to q's shape, through the cache, if any."""
        if self._decodes_in_one_call(inference_params):
            return self._apply_rotary_update_kvcache_attention(q, kv, inference_params)
        if self.rotary_emb_dim > 0:
            q, kv = self.rotary_emb(q, kv, **_rotary_position(inference_params, max_seqlen, q.shape[0]))
        if inference_params is not None:
            return self._update_kvcache_attention(q, kv, inference_params)
        context: Tensor = self._run_attention(self.inner_cross_attn, q, kv, **kwargs)
        return context

    def _run_attention(self, attention: nn.Module, *tensors: Tensor, **kwargs: Any) -> Any:
        if not self.checkpointing:
            return attention(*tensors, **kwargs)
        return checkpoint(attention, *tensors, use_reentrant=False, **kwargs)

    def _decodes_in_one_call(self, inference_params: Any) -> bool:
        """Whether rotation, append and attention of this step can be one `flash_attn_with_kvcache`."""
        if inference_params is None or inference_params.seqlen_offset == 0:
            return False
        rotates = self.rotary_emb_dim > 0 and self.rotary_emb_dim % 16 == 0 and self.rotary_emb.scale is None
        return rotates and self.use_flash_attn

    def _update_kv_cache(self, kv: Tensor, inference_params: Any) -> Tensor:
        """Write kv (batch, seqlen, 2, nheads_k, headdim) into this layer's cache; returns the cache's tokens so far."""
        assert self.layer_idx is not None, "Generation requires layer_idx in the constructor"
        return _update_kv_cache(kv, inference_params, self.layer_idx)

    def _apply_rotary_update_kvcache_attention(self, q: Tensor, kv: Tensor, inference_params: Any) -> Tensor:
        """Do a decoding step in one call: rotate q and kv, append kv to the cache, attend.

        q (batch, seqlen, nheads, headdim), kv (batch, seqlen, 2, nheads_k, headdim); returns q's shape.
        """
        assert self.layer_idx is not None, "Generation requires layer_idx in the constructor"
        # The cache may have been allocated for a longer generation: the tables must cover its whole length.
        capacity = inference_params.key_value_memory_dict[self.layer_idx].shape[1]
        self.rotary_emb._update_cos_sin_cache(
            max(inference_params.max_seqlen, capacity), device=q.device, dtype=q.dtype
        )
        return self._attend_to_cache(
            q,
            kv,
            inference_params,
            rotary_cos=self.rotary_emb._cos_cached,
            rotary_sin=self.rotary_emb._sin_cached,
            rotary_interleaved=self.rotary_emb.interleaved,
        )

    def _update_kvcache_attention(self, q: Tensor, kv: Tensor, inference_params: Any) -> Tensor:
        """Append kv to the cache, then attend to the whole cache.

        q (batch, seqlen, nheads, headdim), kv (batch, seqlen, 2, nheads_k, headdim); returns q's shape.
        """
        if inference_params.seqlen_offset == 0 or not self.use_flash_attn:
            if inference_params.seqlen_offset > 0 and q.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("decoding in a CUDA graph needs use_flash_attn=True")
            context: Tensor = self.inner_cross_attn(q, self._update_kv_cache(kv, inference_params))
            return context
        return self._attend_to_cache(q, kv, inference_params)

    def _attend_to_cache(self, q: Tensor, kv: Tensor, inference_params: Any, **rotary: Any) -> Tensor:
        assert self.layer_idx is not None, "Generation requires layer_idx in the constructor"
        attention = self.inner_cross_attn
        assert isinstance(attention, FlashCrossAttention)
        cache = inference_params.key_value_memory_dict[self.layer_idx][_batch_rows(inference_params, q.shape[0])]
        return flash_attn_with_kvcache(  # type: ignore[return-value]  # out alone
            q,
            cache[:, :, 0],
            cache[:, :, 1],
            kv[:, :, 0],
            kv[:, :, 1],
            cache_seqlens=_cached_lengths(inference_params, q.shape[0]),
            softmax_scale=attention.softmax_scale,
            causal=attention.causal,
            # flash-attn leaves the window out here, and so lets a token see more keys in a step than in a full pass.
            window_size=attention.window_size,
            alibi_slopes=as_fp32(attention.alibi_slopes),
            **rotary,
        )


def _batch_rows(inference_params: Any, batch: int) -> slice:
    return slice(inference_params.batch_size_offset, inference_params.batch_size_offset + batch)


def _cached_lengths(inference_params: Any, batch: int) -> int | Tensor:
    """Tokens already in the cache: one int for all, or (batch,)."""
    lengths: Tensor | None = inference_params.lengths_per_sample
    offset: int = inference_params.seqlen_offset
    return offset if lengths is None else lengths[_batch_rows(inference_params, batch)]


def _rotary_position(inference_params: Any, max_seqlen: int | None, batch: int) -> dict[str, Any]:
    if inference_params is None:
        return {"seqlen_offset": 0, "max_seqlen": max_seqlen}
    return {
        "seqlen_offset": _cached_lengths(inference_params, batch),
        "max_seqlen": inference_params.max_seqlen,
    }
