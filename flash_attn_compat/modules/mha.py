"""Multi-head attention with projections, rotary, ALiBi, windows and a KV cache.

The inner attentions are in `modules/_inner_attention.py`, rotation and cache in `modules/_cached_attention.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn

from flash_attn_compat.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn_compat.layers.rotary import RotaryEmbedding
from flash_attn_compat.modules._cached_attention import CachedAttention, _update_kv_cache
from flash_attn_compat.modules._inner_attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    Window,
    get_alibi_slopes,
)
from flash_attn_compat.ops.fused_dense import ColumnParallelLinear, FusedDense, RowParallelLinear
from flash_attn_compat.utils.distributed import get_dim_for_local_rank

__all__ = [
    "MHA",
    "ColumnParallelLinear",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "FusedDense",
    "LinearResidual",
    "ParallelMHA",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SelfAttention",
    "_update_kv_cache",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_alibi_slopes",
    "get_dim_for_local_rank",
]


class LinearResidual(nn.Linear):
    """nn.Linear that returns its input beside its output; `MHA` used it before flash-attn 2.8."""

    def forward(self, input: Tensor) -> Any:
        """Return (output (..., out_features), input (..., in_features))."""
        return super().forward(input), input


class MHA(CachedAttention):
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

        if rotary_emb_dim > 0:
            assert not cross_attn, "MHA with rotary embedding does not support cross-attention yet"
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                scale_base=rotary_emb_scale_base,
                interleaved=rotary_emb_interleaved,
                device=device,
            )

        # Plain nn.Linear, as in flash-attn 2.8, so that a pickled model needs no class of ours for them.
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **where)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **where)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **where)
        if dwconv:
            if self.num_heads_kv == num_heads and not cross_attn:
                self.dwconv_qkv = _make_depthwise(embed_dim + kv_dim, where)
            else:
                self.dwconv_q = _make_depthwise(embed_dim, where)
                self.dwconv_kv = _make_depthwise(kv_dim, where)
        inner = _inner_options(num_heads, slice(None), use_alibi, window_size, use_flash_attn, device)
        inner |= {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        self.inner_attn = FlashSelfAttention(**inner) if use_flash_attn else SelfAttention(**inner)
        self.inner_cross_attn = FlashCrossAttention(**inner) if use_flash_attn else CrossAttention(**inner)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **where)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised cache (batch_size, max_seqlen, 2, num_heads_kv, headdim)."""
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
            mixer_subset: cross-attention only, index of the tokens of x that have queries.
            inference_params: `InferenceParams`; keys and values go into its cache.
            kwargs: passed to the inner attention.
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
            if self.use_flash_attn and not self.cross_attn:
                # Keys and values come from the queries' own tokens and share their lengths.
                kwargs = {"cu_seqlens_k": kwargs["cu_seqlens"], "max_seqlen_k": kwargs["max_seqlen"], **kwargs}
            context = self._cross_context(q, kv, inference_params, max_seqlen, kwargs)
        else:
            assert x_kv is None and mixer_subset is None, "x_kv and mixer_subset are for cross-attention"
            qkv = _first_output(self.Wqkv(x))
            if self.dwconv:
                qkv = _convolve(self.dwconv_qkv, qkv)
            qkv = rearrange(qkv, "... (three h d) -> ... three h d", three=3, d=self.head_dim)
            context = self._self_context(qkv, inference_params, max_seqlen, kwargs)
        out = self.out_proj(rearrange(context, "... h d -> ... (h d)"))
        return (out, x) if self.return_residual else out

    def _query_and_kv(self, x: Tensor, x_kv: Tensor | None, mixer_subset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return q (..., nheads, headdim) and kv (..., 2, nheads_k, headdim)."""
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = _first_output(self.Wkv(x if x_kv is None else x_kv))
        else:
            assert x_kv is None and mixer_subset is None, "x_kv and mixer_subset are for cross-attention"
            qkv = _first_output(self.Wqkv(x))
            q, kv = qkv[..., : self.embed_dim], qkv[..., self.embed_dim :]
        if self.dwconv:
            q, kv = _convolve(self.dwconv_q, q), _convolve(self.dwconv_kv, kv)
        q = rearrange(q, "... (h d) -> ... h d", d=self.head_dim)
        kv = rearrange(kv, "... (two hkv d) -> ... two hkv d", two=2, d=self.head_dim)
        return q, kv


class ParallelMHA(CachedAttention):
    """Self-attention over a process group, each rank with some of the heads; arguments as `MHA`.

    A rank's Wqkv holds its heads of q, then of k, then of v. A key/value head goes to one rank, with the query heads
    that use it; if the ranks do not divide the heads, the first ranks hold one more.

    sequence_parallel: input and output are this rank's part of the first axis; otherwise every rank has all of it.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        process_group: dist.ProcessGroup,
        num_heads_kv: int | None = None,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Window = (-1, -1),
        use_flash_attn: bool = False,
        checkpointing: bool = False,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.causal = causal
        self.layer_idx = layer_idx
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.checkpointing = checkpointing
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.local_rank = dist.get_rank(process_group)
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        assert embed_dim % num_heads == 0, "embed_dim must be divisible by num_heads"
        assert self.num_heads % self.num_heads_kv == 0, "num_heads must be divisible by num_heads_kv"
        self.head_dim = embed_dim // num_heads
        group = self.num_heads // self.num_heads_kv
        shares = [get_dim_for_local_rank(self.num_heads_kv, self.world_size, rank) for rank in range(self.world_size)]
        self.num_heads_kv_per_rank = shares[self.local_rank]
        self.num_heads_per_rank = self.num_heads_kv_per_rank * group

        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                scale_base=rotary_emb_scale_base,
                interleaved=rotary_emb_interleaved,
                device=device,
            )
        where: dict[str, Any] = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        qkv_dim = self.head_dim * (self.num_heads + 2 * self.num_heads_kv)
        self.Wqkv = ColumnParallelLinear(
            embed_dim, qkv_dim, process_group, bias=qkv_proj_bias, multiple_of=self.head_dim * (group + 2), **where
        )
        first = sum(shares[: self.local_rank]) * group
        heads = slice(first, first + self.num_heads_per_rank)
        inner = _inner_options(num_heads, heads, use_alibi, window_size, use_flash_attn, device)
        inner |= {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        self.inner_attn = FlashSelfAttention(**inner) if use_flash_attn else SelfAttention(**inner)
        self.inner_cross_attn = FlashCrossAttention(**inner) if use_flash_attn else CrossAttention(**inner)
        self.out_proj = RowParallelLinear(
            embed_dim, embed_dim, process_group, bias=out_proj_bias, multiple_of=self.head_dim * group, **where
        )

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised cache (batch_size, max_seqlen, 2, num_heads_kv_per_rank, headdim)."""
        weight = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv_per_rank, self.head_dim)
        return torch.empty(shape, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def forward(self, x: Tensor, seqlen: int | None = None, inference_params: Any = None, **kwargs: Any) -> Tensor:
        """
        Args:
            x: (batch, seqlen, embed_dim), or (batch * seqlen, embed_dim) if seqlen is given, so that sequence
                parallelism can split a batch of one; with sequence_parallel this rank's part of the first axis.
            inference_params: `InferenceParams`; keys and values of this rank's heads go into its cache.
            kwargs: passed to the inner attention.
        Returns:
            Tensor of x's shape.
        """
        qkv = self.Wqkv(x)
        if seqlen is not None:
            qkv = rearrange(qkv, "(b s) ... -> b s ...", s=seqlen)
        if self.num_heads_kv == self.num_heads:
            qkv = rearrange(qkv, "b s (three h d) -> b s three h d", three=3, d=self.head_dim)
            context = self._self_context(qkv, inference_params, None, kwargs)
        else:
            q, kv = qkv.split(
                (self.num_heads_per_rank * self.head_dim, 2 * self.num_heads_kv_per_rank * self.head_dim), -1
            )
            q = rearrange(q, "... (h d) -> ... h d", d=self.head_dim)
            kv = rearrange(kv, "... (two hkv d) -> ... two hkv d", two=2, d=self.head_dim)
            context = self._cross_context(q, kv, inference_params, None, kwargs)
        context = rearrange(context, "b s h d -> b s (h d)")
        if seqlen is not None:
            context = rearrange(context, "b s d -> (b s) d")
        out: Tensor = self.out_proj(context)
        return out


def _inner_options(
    num_heads: int,
    heads: slice,
    use_alibi: bool,
    window_size: Window,
    use_flash_attn: bool,
    device: torch.device | str | None,
) -> dict[str, Any]:
    """Return the ALiBi slopes of these heads and the window, which only the flash modules take."""
    assert use_flash_attn or not use_alibi, "ALiBi code path requires flash_attn"
    assert use_flash_attn or tuple(window_size) == (-1, -1), (
        "Local (sliding window) attention code path requires flash_attn"
    )
    if not use_flash_attn:
        return {}
    slopes = torch.tensor(get_alibi_slopes(num_heads)[heads], dtype=torch.float32, device=device) if use_alibi else None
    return {"alibi_slopes": slopes, "window_size": window_size}


def _first_output(result: Any) -> Tensor:
    """Return the output of a projection that may return its input too."""
    projected: Tensor = result[0] if isinstance(result, tuple) else result
    return projected


def _make_depthwise(channels: int, where: dict[str, Any]) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, kernel_size=3, padding=2, groups=channels, **where)


def _convolve(convolution: nn.Conv1d, x: Tensor) -> Tensor:
    """(batch, seqlen, channels) convolved causally: the two rows that look ahead are cut off."""
    y: Tensor = convolution(x.transpose(1, 2))[..., :-2]
    return y.transpose(1, 2).contiguous()
