"""The attention modules inside MHA: some call the flash functions, others use plain matrix products.

Projections, rotary embeddings and caches are in `modules/mha.py`, from which clients import these modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from flash_attn_compat.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

Window = Sequence[int]


def get_alibi_slopes(nheads: int) -> list[float]:
    """Return ALiBi's slopes (Press et al. 2021), one per head, as Python floats.

    For a power of two n the slopes are 2^(-8 (i + 1) / n). Otherwise the list starts with the slopes of the next lower
    power of two and continues with every other slope of twice that power.
    """

    def slopes_of_power_of_two(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    below = 2 ** int(math.log2(nheads))
    return slopes_of_power_of_two(below) + slopes_of_power_of_two(2 * below)[0::2][: nheads - below]


class _Attention(nn.Module):
    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)


class _FlashAttention(_Attention):
    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: Window = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def _options(self, causal: bool | None) -> dict[str, Any]:
        """Return the keyword arguments for the attention functions."""
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "alibi_slopes": as_fp32(self.alibi_slopes),
            "window_size": self.window_size,
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_FlashAttention):
    """Attention over a packed qkv through `flash_attn_qkvpacked_func` and its varlen form.

    Args:
        causal: default for calls without `causal`.
        softmax_scale: 1 / sqrt(headdim) by default.
        attention_dropout: dropout of the probabilities, in training only.
        window_size: (left, right), -1 for unbounded.
        alibi_slopes: (nheads,), used in fp32.
        deterministic: as in `flash_attn_func`.

    Unlike flash-attn's, it accepts every dtype and device that the attention functions do.
    """

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """
        Args:
            qkv: (batch, seqlen, 3, nheads, headdim), or (total, 3, nheads, headdim) with cu_seqlens.
            causal: overrides the module's.
            cu_seqlens: (batch + 1,) int32; then max_seqlen is required.
        Returns:
            (batch, seqlen, nheads, headdim) or (total, nheads, headdim).
        """
        options = self._options(causal)
        if cu_seqlens is None:
            out: Tensor = flash_attn_qkvpacked_func(qkv, **options)
            return out
        assert max_seqlen is not None, "max_seqlen must be passed with cu_seqlens"
        packed: Tensor = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)
        return packed


class FlashCrossAttention(_FlashAttention):
    """Attention of q over a packed kv through `flash_attn_kvpacked_func` and its varlen form.

    Args as `FlashSelfAttention`; note that alibi_slopes comes before window_size here.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: Window = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """
        Args:
            q: (batch, seqlen_q, nheads, headdim), or (total_q, nheads, headdim) with cu_seqlens.
            kv: (batch, seqlen_k, 2, nheads_k, headdim), or (total_k, 2, nheads_k, headdim).
            causal: overrides the module's.
            cu_seqlens, cu_seqlens_k: (batch + 1,) int32 of q and kv; all four lengths go together.
        Returns:
            Tensor of q's shape.
        """
        options = self._options(causal)
        if cu_seqlens is None:
            out: Tensor = flash_attn_kvpacked_func(q, kv, **options)
            return out
        assert max_seqlen is not None and cu_seqlens_k is not None and max_seqlen_k is not None, (
            "max_seqlen, cu_seqlens_k and max_seqlen_k must be passed with cu_seqlens"
        )
        packed: Tensor = flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **options
        )
        return packed


class SelfAttention(_Attention):
    """Attention over a packed qkv by plain matrix products, in the input's dtype.

    Masks add -10000, as in flash-attn: a row that sees no key gets a uniform average.
    """

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """qkv (batch, seqlen, 3, nheads, headdim), key_padding_mask (batch, seqlen) bool, True = keep.

        Returns (batch, seqlen, nheads, headdim).
        """
        causal = self.causal if causal is None else causal
        q, k, v = qkv.unbind(dim=2)
        scores = _compute_scores(q, k, self.softmax_scale) + _make_padding_bias(key_padding_mask, qkv.dtype)
        if causal:
            seqlen = qkv.shape[1]
            above = torch.full((seqlen, seqlen), -10000.0, device=scores.device, dtype=scores.dtype).triu(1)
            scores = scores + above
        return _weight_values(self.drop(torch.softmax(scores, dim=-1, dtype=v.dtype)), v)


class CrossAttention(_Attention):
    """Attention of q over a packed kv by plain matrix products, in the input's dtype; masks as `SelfAttention`."""

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """q (batch, seqlen_q, nheads, headdim), kv (batch, seqlen_k, 2, nheads_k, headdim), key_padding_mask
        (batch, seqlen_k) bool, True = keep.

        A causal mask aligns the last query with the last unmasked key. Returns q's shape.
        """
        causal = self.causal if causal is None else causal
        seqlen_q, seqlen_k = q.shape[1], kv.shape[1]
        if kv.shape[3] != q.shape[2]:
            kv = repeat(kv, "... hkv d -> ... (hkv g) d", g=q.shape[2] // kv.shape[3])
        k, v = kv.unbind(dim=2)
        scores = _compute_scores(q, k, self.softmax_scale) + _make_padding_bias(key_padding_mask, q.dtype)
        if causal:
            rows = torch.arange(seqlen_q, device=q.device)[:, None]
            columns = torch.arange(seqlen_k, device=q.device)
            kept: int | Tensor = seqlen_k
            if key_padding_mask is not None:
                kept = rearrange(key_padding_mask.sum(dim=-1), "b -> b 1 1 1")
            scores = scores.masked_fill(columns > rows + kept - seqlen_q, -10000.0)
        return _weight_values(self.drop(torch.softmax(scores, dim=-1, dtype=v.dtype)), v)


def as_fp32(alibi_slopes: Tensor | None) -> Tensor | None:
    """Return slopes in fp32: a module cast to half precision has cast its buffers too."""
    return None if alibi_slopes is None else alibi_slopes.to(torch.float32)


def _compute_scores(q: Tensor, k: Tensor, softmax_scale: float | None) -> Tensor:
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    return torch.einsum("bthd,bshd->bhts", q, k * scale)


def _weight_values(probabilities: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bshd->bthd", probabilities, v)


def _make_padding_bias(key_padding_mask: Tensor | None, dtype: torch.dtype) -> Tensor | float:
    if key_padding_mask is None:
        return 0.0
    bias = torch.zeros(key_padding_mask.shape, dtype=dtype, device=key_padding_mask.device)
    return rearrange(bias.masked_fill(~key_padding_mask, -10000.0), "b s -> b 1 1 s")
