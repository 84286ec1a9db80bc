"""Multi-head attention with projections, rotary, ALiBi, windows and a KV cache.

The inner attentions are in `modules/_inner_attention.py`; tensor-parallel attention is absent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn_compat.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn_compat.layers.rotary import RotaryEmbedding
from flash_attn_compat.modules._inner_attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    Window,
    as_fp32,
    get_alibi_slopes,
)
from flash_attn_compat.ops.fused_dense import FusedDense
from flash_attn_compat.utils.distributed import get_dim_for_local_rank

__all__ = [
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "FusedDense",
    "LinearResidual",
    "MHA",
    "RotaryEmbedding",
    "SelfAttention",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_alibi_slopes",
    "get_dim_for_local_rank",
]


class LinearResidual(nn.Linear):
    """nn.Linear that returns its input beside its output."""

    def forward(self, input: Tensor) -> Any:
        """(..., in_features) to ((..., out_features), input)."""
        return super().forward(input), input


def _update_kv_cache(kv: Tensor, inference_params: Any, layer_idx: int) -> Tensor:
    """Write kv into the layer's cache at the current offsets, allocating it on first use.

    Args:
        kv: (batch, seqlen, 2, nheads_k, headdim).
        inference_params: see `flash_attn_compat.utils.generation.InferenceParams`.
    Returns:
        (batch, seqlen_offset + seqlen, 2, nheads_k, headdim), a view of what the cache holds now.
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


class MHA(nn.Module):
    """Multi-head attention with its projections; self- or cross-attention, grouped heads, KV cache.

    Args:
        embed_dim, num_heads: headdim is their quotient.
        num_heads_kv: fewer key/value heads (grouped-query attention).
        cross_attn: queries and keys come from different inputs.
        qkv_proj_bias, out_proj_bias: whether the projections have biases.
        dropout: of the attention probabilities, in training.
        softmax_scale, causal: as in `flash_attn_func`.
        layer_idx: names this layer's cache; needed for inference.
        dwconv: depthwise causal convolution of width 3 over the projected q, k and v.
        rotary_emb_dim: rotated channels per head, 0 for none; with base, xPos scale base and interleaving.
        use_alibi, window_size: need use_flash_attn.
        use_flash_attn: through the flash functions rather than plain matrix products.
        return_residual: forward returns (out, x).
        checkpointing: recompute the inner attention in the backward.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Window = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        assert self.num_heads % self.num_heads_kv == 0, "num_heads must be divisible by num_heads_kv"
        assert embed_dim % num_heads == 0, "embed_dim must be divisible by num_heads"
        self.head_dim = embed_dim // num_heads
        kv_dim = 2 * self.head_dim * self.num_heads_kv
        where: dict[str, Any] = {"device": device, "dtype": dtype}

        alibi_slopes = None
        if use_alibi:
            assert use_flash_attn, "ALiBi code path requires flash_attn"
            alibi_slopes = torch.tensor(get_alibi_slopes(num_heads), device=device)
        if tuple(window_size) != (-1, -1):
            assert use_flash_attn, "Local (sliding window) attention code path requires flash_attn"
        if rotary_emb_dim > 0:
            assert not cross_attn, "MHA with rotary embedding does not support cross-attention yet"
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                scale_base=rotary_emb_scale_base,
                interleaved=rotary_emb_interleaved,
                device=device,
            )

        linear: Any = FusedDense if fused_bias_fc else nn.Linear
        returning: Any = partial(FusedDense, return_residual=True) if fused_bias_fc else LinearResidual
        first: Any = returning if return_residual else linear
        if cross_attn:
            self.Wq = linear(embed_dim, embed_dim, bias=qkv_proj_bias, **where)
            self.Wkv = first(embed_dim, kv_dim, bias=qkv_proj_bias, **where)
        else:
            self.Wqkv = first(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **where)
        if dwconv:
            if self.num_heads_kv == num_heads and not cross_attn:
                self.dwconv_qkv = _depthwise(embed_dim + kv_dim, where)
            else:
                self.dwconv_q = _depthwise(embed_dim, where)
                self.dwconv_kv = _depthwise(kv_dim, where)
        inner: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        if use_flash_attn:
            inner |= {"alibi_slopes": alibi_slopes, "window_size": window_size}
        self.inner_attn = FlashSelfAttention(**inner) if use_flash_attn else SelfAttention(**inner)
        self.inner_cross_attn = FlashCrossAttention(**inner) if use_flash_attn else CrossAttention(**inner)
        self.out_proj = linear(embed_dim, embed_dim, bias=out_proj_bias, **where)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised cache (batch_size, max_seqlen, 2, num_heads_kv, headdim)."""
        weight = self.out_proj.weight
        dtype = weight.dtype if dtype is None else dtype
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(shape, dtype=dtype, device=weight.device)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Tensor | None = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            x: (batch, seqlen, embed_dim), or (total, embed_dim) with cu_seqlens.
            x_kv: (batch, seqlen_k, embed_dim), cross-attention only; x by default.
            key_padding_mask: (batch, seqlen) bool, True = keep; without use_flash_attn.
            cu_seqlens: (batch + 1,) int32, with max_seqlen; with use_flash_attn, no rotary, no dwconv.
            mixer_subset: cross-attention only, index of the tokens of x that ask.
            inference_params: `InferenceParams`; keys and values go into its cache.
            kwargs: handed to the inner attention.
        Returns:
            (batch, seqlen, embed_dim) or (total, embed_dim); with return_residual (out, x).
        """
        if cu_seqlens is not None:
            assert max_seqlen is not None and key_padding_mask is None and self.use_flash_attn, (
                "cu_seqlens needs max_seqlen and use_flash_attn, and excludes key_padding_mask"
            )
            assert not self.dwconv and self.rotary_emb_dim == 0, "cu_seqlens excludes dwconv and rotary_emb_dim"
        if key_padding_mask is not None:
            assert max_seqlen is None and not self.use_flash_attn, "key_padding_mask excludes use_flash_attn"
        if inference_params is not None:
            assert key_padding_mask is None and cu_seqlens is None and max_seqlen is None and not self.dwconv, (
                "inference_params excludes key_padding_mask, cu_seqlens, max_seqlen and dwconv"
            )
        if self.use_flash_attn:
            kwargs = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **kwargs}
        else:
            kwargs = {"key_padding_mask": key_padding_mask, **kwargs}

        if self.cross_attn or self.num_heads_kv != self.num_heads:
            q, kv = self._query_and_kv(x, x_kv, mixer_subset)
            if self._decodes_in_one_call(inference_params):
                context = self._apply_rotary_update_kvcache_attention(q, kv, inference_params)
            else:
                if self.rotary_emb_dim > 0:
                    q, kv = self.rotary_emb(q, kv, **_rotary_position(inference_params, max_seqlen, q.shape[0]))
                context = self._cross_attention(q, kv, inference_params, kwargs)
        else:
            assert x_kv is None and mixer_subset is None, "x_kv and mixer_subset are for cross-attention"
            qkv = _projected(self.Wqkv(x))
            if self.dwconv:
                qkv = _convolved(self.dwconv_qkv, qkv)
            qkv = rearrange(qkv, "... (three h d) -> ... three h d", three=3, d=self.head_dim)
            if self._decodes_in_one_call(inference_params):
                context = self._apply_rotary_update_kvcache_attention(qkv[:, :, 0], qkv[:, :, 1:], inference_params)
            else:
                if self.rotary_emb_dim > 0:
                    qkv = self.rotary_emb(qkv, **_rotary_position(inference_params, max_seqlen, qkv.shape[0]))
                if inference_params is None:
                    context = self._maybe_checkpointed(self.inner_attn, qkv, **kwargs)
                else:
                    context = self._update_kvcache_attention(qkv[:, :, 0], qkv[:, :, 1:], inference_params)
        out = self.out_proj(rearrange(context, "... h d -> ... (h d)"))
        return (out, x) if self.return_residual else out

    def _query_and_kv(self, x: Tensor, x_kv: Tensor | None, mixer_subset: Tensor | None) -> tuple[Tensor, Tensor]:
        """q (..., nheads, headdim) and kv (..., 2, nheads_k, headdim)."""
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = _projected(self.Wkv(x if x_kv is None else x_kv))
        else:
            assert x_kv is None and mixer_subset is None, "x_kv and mixer_subset are for cross-attention"
            qkv = _projected(self.Wqkv(x))
            q, kv = qkv[..., : self.embed_dim], qkv[..., self.embed_dim :]
        if self.dwconv:
            q, kv = _convolved(self.dwconv_q, q), _convolved(self.dwconv_kv, kv)
        q = rearrange(q, "... (h d) -> ... h d", d=self.head_dim)
        kv = rearrange(kv, "... (two hkv d) -> ... two hkv d", two=2, d=self.head_dim)
        return q, kv

    def _cross_attention(self, q: Tensor, kv: Tensor, inference_params: Any, kwargs: dict[str, Any]) -> Tensor:
        if inference_params is not None:
            return self._update_kvcache_attention(q, kv, inference_params)
        if self.use_flash_attn and not self.cross_attn:
            # Keys and values come from the queries' own tokens and share their lengths.
            kwargs = {"cu_seqlens_k": kwargs["cu_seqlens"], "max_seqlen_k": kwargs["max_seqlen"], **kwargs}
        context: Tensor = self._maybe_checkpointed(self.inner_cross_attn, q, kv, **kwargs)
        return context

    def _maybe_checkpointed(self, attention: nn.Module, *tensors: Tensor, **kwargs: Any) -> Any:
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
        """kv (batch, seqlen, 2, nheads_k, headdim) into this layer's cache; see the function of the same name."""
        assert self.layer_idx is not None, "Generation requires layer_idx in the constructor"
        return _update_kv_cache(kv, inference_params, self.layer_idx)

    def _apply_rotary_update_kvcache_attention(self, q: Tensor, kv: Tensor, inference_params: Any) -> Tensor:
        """A decoding step: rotate q (batch, seqlen, nheads, headdim) and kv (batch, seqlen, 2, nheads_k, headdim)."""
        self.rotary_emb._update_cos_sin_cache(inference_params.max_seqlen, device=q.device, dtype=q.dtype)
        return self._attend_to_cache(
            q,
            kv,
            inference_params,
            rotary_cos=self.rotary_emb._cos_cached,
            rotary_sin=self.rotary_emb._sin_cached,
            rotary_interleaved=self.rotary_emb.interleaved,
        )

    def _update_kvcache_attention(self, q: Tensor, kv: Tensor, inference_params: Any) -> Tensor:
        """Append kv to the cache, then attend; shapes as `_apply_rotary_update_kvcache_attention`."""
        if inference_params.seqlen_offset == 0 or not self.use_flash_attn:
            context: Tensor = self.inner_cross_attn(q, self._update_kv_cache(kv, inference_params))
            return context
        return self._attend_to_cache(q, kv, inference_params)

    def _attend_to_cache(self, q: Tensor, kv: Tensor, inference_params: Any, **rotary: Any) -> Tensor:
        assert self.layer_idx is not None, "Generation requires layer_idx in the constructor"
        attention = self.inner_cross_attn
        assert isinstance(attention, FlashCrossAttention)
        cache = inference_params.key_value_memory_dict[self.layer_idx][_batch_rows(inference_params, q.shape[0])]
        return flash_attn_with_kvcache(  # type: ignore[return-value]
            q,
            cache[:, :, 0],
            cache[:, :, 1],
            kv[:, :, 0],
            kv[:, :, 1],
            cache_seqlens=_cached_lengths(inference_params, q.shape[0]),
            softmax_scale=attention.softmax_scale,
            causal=attention.causal,
            # flash-attn drops the window here; then a step would see more than the same token in a full pass.
            window_size=attention.window_size,
            alibi_slopes=as_fp32(attention.alibi_slopes),
            **rotary,
        )


def _projected(result: Any) -> Tensor:
    """Of a projection that may return its input too."""
    projected: Tensor = result[0] if isinstance(result, tuple) else result
    return projected


def _depthwise(channels: int, where: dict[str, Any]) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, kernel_size=3, padding=2, groups=channels, **where)


def _convolved(convolution: nn.Conv1d, x: Tensor) -> Tensor:
    """(batch, seqlen, channels) convolved causally: the two rows that look ahead are cut off."""
    y: Tensor = convolution(x.transpose(1, 2))[..., :-2]
    return y.transpose(1, 2).contiguous()


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
