"""Rotary position embeddings with gradients, and the module that keeps their tables.

The rotation itself lives in `core/rotary.py`; here it gets its autograd Functions and the packed
qkv and kv forms.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

from flash_attn_compat.core import overlap
from flash_attn_compat.core.rotary import apply_rotary


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(..., d) -> (..., d): (-x2, x1) of the two halves, or (-odd, even) pair by pair if `interleaved`."""
    if not interleaved:
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((-x2, x1), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding by ordinary differentiable tensor operations, without offsets.

    Args:
        x: (batch, seqlen, nheads, headdim).
        cos, sin: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2), seqlen exactly x's.
        interleaved: pair channels (0, 1), (2, 3), ... instead of the two halves.
    Returns:
        (batch, seqlen, nheads, headdim); computed in the operands' own dtypes with torch's promotion
        (no upcast to fp32, unlike `apply_rotary_emb`).
    """
    rotary_dim = 2 * cos.shape[-1]
    assert rotary_dim <= x.shape[-1], f"rotary_dim must be <= headdim, got {rotary_dim} and {x.shape[-1]}"
    pattern = "... d -> ... 1 (d 2)" if interleaved else "... d -> ... 1 (2 d)"
    cos, sin = repeat(cos, pattern), repeat(sin, pattern)
    rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((rotary * cos + rotate_half(rotary, interleaved) * sin, rest), dim=-1)


class ApplyRotaryEmb(torch.autograd.Function):
    """`apply_rotary` with its gradient, the conjugate rotation. cos and sin get none."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        inplace: bool = False,
        seqlen_offsets: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        conjugate: bool = False,
    ) -> Tensor:
        out = apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace, conjugate)
        _save_tables(ctx, cos, sin, seqlen_offsets, cu_seqlens)
        ctx.interleaved, ctx.max_seqlen, ctx.conjugate = interleaved, max_seqlen, conjugate
        # x is not marked dirty even if rotated in place: autograd would then refuse leaves and outputs of unbind.
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, seqlen_offsets, cu_seqlens = _saved_tables(ctx)
        # Never in place, since autograd may pass an expanded gradient, or the same gradient to other nodes.
        dx = ApplyRotaryEmb.apply(
            grad, cos, sin, ctx.interleaved, False, seqlen_offsets, cu_seqlens, ctx.max_seqlen, not ctx.conjugate
        )
        return dx, *(None,) * 8


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotary embedding of x, differentiable in x.

    Args:
        x: (batch, seqlen, nheads, headdim), or (total, nheads, headdim) with `cu_seqlens`.
        cos, sin: (seqlen_ro, rotary_dim / 2); the first rotary_dim channels are rotated.
        interleaved: pair channels (0, 1), (2, 3), ... instead of the two halves.
        inplace: overwrite x's storage; the returned tensor shares it and carries the gradient. Autograd
            does not see the write (leaves that require grad are accepted), so nothing computed from
            x earlier may need its old values in its backward.
        seqlen_offsets: int or (batch,) integers, position of each sequence's first token.
        cu_seqlens: (batch + 1,) int32, start of each sequence in a packed x.
        max_seqlen: int, required with `cu_seqlens`.
    Returns:
        Tensor of x's shape and dtype; the arithmetic is in fp32.
    Raises:
        AssertionError: as `apply_rotary`.
    """
    rotated: Tensor = ApplyRotaryEmb.apply(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)
    return rotated


# The older name of the same function.
apply_rotary_emb_func = apply_rotary_emb


def _apply_rotary_emb_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate the queries and keys of a packed tensor; no autograd. Shapes as `apply_rotary_emb_qkv_`."""
    cos_k = cos if cos_k is None else cos_k
    sin_k = sin if sin_k is None else sin_k
    if inplace and not torch.compiler.is_compiling():
        overlap.refuse("qkv", qkv)
    out = qkv if inplace else qkv.clone()
    q, k = _query_and_key(out, num_heads_q)
    apply_rotary(q, cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True, conjugate=conjugate)
    apply_rotary(k, cos_k, sin_k, seqlen_offsets, interleaved=interleaved, inplace=True, conjugate=conjugate)
    return out


class ApplyRotaryEmbQKV_(torch.autograd.Function):
    """`_apply_rotary_emb_qkv` in place, with its gradient for the packed tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cos_k: Tensor | None = None,
        sin_k: Tensor | None = None,
        interleaved: bool = False,
        seqlen_offsets: int | Tensor = 0,
        num_heads_q: int | None = None,
        conjugate: bool = False,
    ) -> Tensor:
        _apply_rotary_emb_qkv(
            qkv.data, cos, sin, cos_k, sin_k, interleaved, True, conjugate, seqlen_offsets, num_heads_q
        )
        _save_tables(ctx, cos, sin, seqlen_offsets, cos_k, sin_k)
        ctx.interleaved, ctx.num_heads_q, ctx.conjugate = interleaved, num_heads_q, conjugate
        return qkv

    @staticmethod
    def backward(ctx: Any, dqkv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, seqlen_offsets, cos_k, sin_k = _saved_tables(ctx)
        dx = ApplyRotaryEmbQKV_.apply(
            dqkv.clone(), cos, sin, cos_k, sin_k, ctx.interleaved, seqlen_offsets, ctx.num_heads_q, not ctx.conjugate
        )
        return dx, *(None,) * 8


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotary embedding of the queries and keys of a packed tensor, in place and differentiable.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, nheads_q + 2 nheads_k, headdim) with
            `num_heads_q`. Values are left alone.
        cos, sin: (seqlen_ro, rotary_dim / 2), for queries and, without cos_k and sin_k, for keys.
        cos_k, sin_k: tables of the same shape for the keys (xPos scales the two differently).
        interleaved: pair channels (0, 1), (2, 3), ... instead of the two halves.
        seqlen_offsets: int or (batch,) integers.
        num_heads_q: number of query heads, required for a 4-D qkv (grouped-query attention).
    Returns:
        qkv itself, carrying the gradient.
    """
    rotated: Tensor = ApplyRotaryEmbQKV_.apply(qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)
    return rotated


class ApplyRotaryEmbKV_(torch.autograd.Function):
    """Rotation of `kv[:, :, 0]` in place, with its gradient for the packed tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        kv: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        seqlen_offsets: int | Tensor = 0,
        conjugate: bool = False,
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            overlap.refuse("kv", kv)
        key = _key_of_kv(kv.data)
        apply_rotary(key, cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True, conjugate=conjugate)
        _save_tables(ctx, cos, sin, seqlen_offsets)
        ctx.interleaved, ctx.conjugate = interleaved, conjugate
        return kv

    @staticmethod
    def backward(ctx: Any, dkv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, seqlen_offsets = _saved_tables(ctx)
        dx = ApplyRotaryEmbKV_.apply(dkv.clone(), cos, sin, ctx.interleaved, seqlen_offsets, not ctx.conjugate)
        return dx, *(None,) * 5


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotary embedding of the keys of a packed kv, in place and differentiable.

    Args:
        kv: (batch, seqlen, 2, nheads_k, headdim), index 0 the keys.
        cos, sin: (seqlen_ro, rotary_dim / 2).
        interleaved: pair channels (0, 1), (2, 3), ... instead of the two halves.
        seqlen_offsets: int or (batch,) integers.
    Returns:
        kv itself, carrying the gradient.
    """
    rotated: Tensor = ApplyRotaryEmbKV_.apply(kv, cos, sin, interleaved, seqlen_offsets)
    return rotated


class RotaryEmbedding(torch.nn.Module):
    """Rotary position embedding (Su et al. 2021), with xPos scaling (Sun et al. 2022) if `scale_base` is set.

    Args:
        dim: rotated channels per head.
        base: base of the geometric series of frequencies.
        interleaved: pair channels (0, 1), (2, 3), ... instead of the two halves.
        scale_base: xPos scale base (the paper uses 512), None for none. The scale is centred on the
            middle of the cached table, as in flash-attn 2.8.
        device: where the buffers live.
        pos_idx_in_fp32: kept for callers written for flash-attn < 2.8. Angles are always computed from
            fp32 positions, as True meant and as 2.8 does.

    Tables are rebuilt on demand in fp32 and stored in the dtype asked for, `(seqlen, dim / 2)`, as
    `_cos_cached` and `_sin_cached` (and `_cos_k_cached`, `_sin_k_cached` for xPos keys).
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
        pos_idx_in_fp32: bool = True,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._compute_scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        """Return base^(-2i / dim), (dim / 2,) fp32."""
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        return 1.0 / (self.base**exponents)

    def _compute_scale(self, device: torch.device | str | None = None) -> Tensor:
        """Return (dim / 2,) fp32, the base that xPos raises to the power of the position."""
        channels = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return (channels + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(
        self,
        seqlen: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Rebuild the tables if they are too short, elsewhere, in another dtype, or unusable for training."""
        dtype = torch.float32 if dtype is None else dtype
        cached = self._cos_cached
        usable = (
            cached is not None
            and seqlen <= self._seq_len_cached
            and cached.device == torch.empty(0, dtype=dtype, device=device).device
            and cached.dtype == dtype
            # Autograd cannot save inference tensors. torch.compile cannot check for them, and makes none.
            and (torch.compiler.is_compiling() or not (self.training and cached.is_inference()))
        )
        if usable:
            return
        self._seq_len_cached = seqlen
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        # A module cast to half precision has rounded frequencies and scales: start again from fp32.
        exact = self.inv_freq.dtype == torch.float32
        inv_freq = self.inv_freq.to(positions.device) if exact else self._compute_inv_freq(positions.device)
        angles = torch.outer(positions, inv_freq)
        cos, sin = torch.cos(angles), torch.sin(angles)
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        assert self.scale_base is not None
        power = (positions - seqlen // 2) / self.scale_base
        base = self.scale.to(positions.device) if exact else self._compute_scale(positions.device)
        scale = base ** rearrange(power, "s -> s 1")
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place.

        Args:
            qkv: without kv: (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, nheads_q + 2 nheads_k,
                headdim) with `num_heads_q`. With kv: the queries (batch, seqlen, nheads, headdim).
            kv: (batch, seqlen, 2, nheads_k, headdim).
            seqlen_offset: int or (batch,) integers, for instance the tokens already in a cache.
            max_seqlen: table length to prepare; needed the first time with a tensor `seqlen_offset`.
        Returns:
            qkv, or (q, kv) if kv was given; the same storage as the arguments.
        """
        seqlen = qkv.shape[1]
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        elif not isinstance(seqlen_offset, Tensor):
            self._update_cos_sin_cache(seqlen + seqlen_offset, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError(
                "RotaryEmbedding: seqlen_offset is a tensor and no table exists yet; "
                "pass max_seqlen so that one long enough can be built"
            )
        cos_k, sin_k = self._cos_k_cached, self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv,
                cos,
                sin,
                cos_k,
                sin_k,
                interleaved=self.interleaved,
                seqlen_offsets=seqlen_offset,
                num_heads_q=num_heads_q,
            )
        q = apply_rotary_emb_func(
            qkv, cos, sin, interleaved=self.interleaved, inplace=True, seqlen_offsets=seqlen_offset
        )
        kv = apply_rotary_emb_kv_(
            kv,
            cos if cos_k is None else cos_k,
            sin if sin_k is None else sin_k,
            interleaved=self.interleaved,
            seqlen_offsets=seqlen_offset,
        )
        return q, kv


def _query_and_key(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    shape = tuple(qkv.shape)
    if qkv.ndim == 5:
        assert shape[2] == 3, f"qkv has shape {shape}, expected (batch, seqlen, 3, nheads, headdim)"
        return qkv[:, :, 0], qkv[:, :, 1]
    assert qkv.ndim == 4, f"qkv has shape {shape}, expected 4 or 5 dimensions"
    assert num_heads_q is not None, (
        f"qkv has shape {shape}, num_heads_q must be passed with (batch, seqlen, nheads_q + 2 nheads_k, headdim)"
    )
    num_heads_k, rest = divmod(shape[2] - num_heads_q, 2)
    assert rest == 0 and num_heads_k >= 0, (
        f"qkv has shape {shape} and num_heads_q is {num_heads_q}, expected nheads_q + 2 nheads_k heads"
    )
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_heads_k]


def _key_of_kv(kv: Tensor) -> Tensor:
    assert kv.ndim == 5 and kv.shape[2] == 2, (
        f"kv has shape {tuple(kv.shape)}, expected (batch, seqlen, 2, nheads_k, headdim)"
    )
    return kv[:, :, 0]


def _save_tables(ctx: Any, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, *more: Tensor | None) -> None:
    offsets = seqlen_offsets if isinstance(seqlen_offsets, Tensor) else None
    ctx.save_for_backward(cos, sin, offsets, *more)
    ctx.seqlen_offsets = seqlen_offsets if offsets is None else None


def _saved_tables(ctx: Any) -> tuple[Any, ...]:
    """Return cos, sin, seqlen_offsets and the other saved tensors, in order."""
    cos, sin, offsets, *more = ctx.saved_tensors
    return (cos, sin, ctx.seqlen_offsets if offsets is None else offsets, *more)
