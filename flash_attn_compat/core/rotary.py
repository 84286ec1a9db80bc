"""The rotation of rotary embeddings (Su et al. 2021, RoFormer): the one place that computes it.

Pure PyTorch on every device, no autograd (see `layers/rotary.py` for that) and no host synchronisation
when the offsets are tensors. It builds no cos and sin tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.core import overlap


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, interleaved: bool = False, inplace: bool = False, conjugate: bool = False,
) -> Tensor:  # fmt: skip
    """Rotate pairs of channels of `x` by the angle of their position. Not differentiable.

    The token at place t of sequence b has position t + seqlen_offsets[b]. The pair (a, b) becomes
    (a cos - b sin, a sin + b cos), in fp32 (fp64 if an operand is fp64), rounded once to x.dtype.

    Args:
        x: (batch, seqlen, nheads, headdim), or (total, nheads, headdim) with `cu_seqlens`; any
            floating dtype, any strides. Unlike flash-attn, headdim may exceed 256.
        cos, sin: (seqlen_ro, rotary_dim / 2) with rotary_dim <= headdim; channels from rotary_dim on
            are copied through.
        seqlen_offsets: int, or (batch,) int32 or int64. A position outside the table is an error with
            an int (as far as shapes tell) and leaves the token unrotated with a tensor, as in flash-attn 2.8.
        cu_seqlens: (batch + 1,) int32 or int64; tokens outside [cu_seqlens[0], cu_seqlens[-1]) are unrotated.
        max_seqlen: required with `cu_seqlens`; the longest sequence, checked against the table.
        interleaved: pair channels (0, 1), (2, 3), ... instead of (c, c + rotary_dim / 2).
        inplace: write into `x`'s storage, whatever its strides, and return `x`. Autograd does not notice:
            it works on leaves that require grad and does not raise the version counter.
        conjugate: rotate backwards (negate sin).
    Returns:
        Tensor of x's shape and dtype; `x` itself if `inplace`.
    Raises:
        AssertionError: shapes, table length or offsets do not fit.
        RuntimeError: `inplace`, and `x` overlaps itself.
    """
    batch, seqlen = _check_shapes(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    if inplace and not torch.compiler.is_compiling():
        overlap.refuse("x", x)
    with torch.no_grad():
        if cu_seqlens is not None:
            cos_t, sin_t = _look_up(cos, sin, _find_positions(x.shape[0], cu_seqlens, batch, seqlen_offsets))
        elif isinstance(seqlen_offsets, Tensor):
            # (batch, seqlen)
            positions = torch.arange(seqlen, device=x.device) + seqlen_offsets[:, None]
            cos_t, sin_t = _look_up(cos, sin, positions)
        else:
            rows = slice(seqlen_offsets, seqlen_offsets + seqlen)
            cos_t, sin_t = cos[rows], sin[rows]
        # (..., seqlen, 1, rotary_dim / 2): the heads axis is broadcast.
        cos_t, sin_t = cos_t.unsqueeze(-2), sin_t.unsqueeze(-2)
        return _rotate(x, cos_t, -sin_t if conjugate else sin_t, interleaved, inplace)


def _check_shapes(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[int, int]:  # fmt: skip
    if cu_seqlens is None:
        assert x.ndim == 4, f"x has shape {tuple(x.shape)}, expected (batch, seqlen, nheads, headdim)"
        batch, seqlen = x.shape[0], x.shape[1]
    else:
        assert max_seqlen is not None, "If cu_seqlens is passed in, then max_seqlen must be passed"
        assert x.ndim == 3, f"x has shape {tuple(x.shape)}, expected (total, nheads, headdim) with cu_seqlens"
        batch, seqlen = cu_seqlens.shape[0] - 1, int(max_seqlen)
    assert sin.shape == cos.shape, f"sin has shape {tuple(sin.shape)}, expected cos's shape {tuple(cos.shape)}"
    assert cos.ndim == 2, f"cos has shape {tuple(cos.shape)}, expected (seqlen_ro, rotary_dim / 2)"
    seqlen_ro, rotary_dim = cos.shape[0], 2 * cos.shape[1]
    assert rotary_dim <= x.shape[-1], f"rotary_dim must be <= headdim, got {rotary_dim} and {x.shape[-1]}"
    assert seqlen_ro >= seqlen, f"seqlen_ro must be >= seqlen, got {seqlen_ro} and {seqlen}"
    if isinstance(seqlen_offsets, Tensor):
        shape, dtype = tuple(seqlen_offsets.shape), seqlen_offsets.dtype
        assert shape == (batch,), f"seqlen_offsets has shape {shape}, expected (batch,) = ({batch},)"
        assert dtype in (torch.int32, torch.int64), f"seqlen_offsets has dtype {dtype}, expected int32 or int64"
    else:
        assert 0 <= seqlen_offsets <= seqlen_ro - seqlen, (
            f"seqlen_offsets + seqlen must be <= seqlen_ro and seqlen_offsets >= 0, "
            f"got {seqlen_offsets} + {seqlen} and {seqlen_ro}"
        )
    return batch, seqlen


def _find_positions(total: int, cu_seqlens: Tensor, batch: int, offsets: int | Tensor) -> Tensor:
    """Return each token's position, (total,), -1 for tokens outside of all sequences."""
    tokens = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    inside = (sequence >= 0) & (sequence < batch)
    sequence = sequence.clamp(0, max(batch - 1, 0))
    positions = tokens - cu_seqlens[sequence]
    positions = positions + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)
    return torch.where(inside, positions, -1)


def _look_up(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tables' rows at `positions`; outside of the tables cos = 1 and sin = 0, the identity."""
    if cos.shape[0] == 0:
        shape = (*positions.shape, cos.shape[1])
        return cos.new_ones(shape), sin.new_zeros(shape)
    rows = positions.clamp(0, cos.shape[0] - 1)
    in_table = ((positions >= 0) & (positions < cos.shape[0])).unsqueeze(-1)
    return torch.where(in_table, cos[rows], 1.0), torch.where(in_table, sin[rows], 0.0)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool) -> Tensor:
    compute_dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    cos, sin = cos.to(compute_dtype), sin.to(compute_dtype)
    half = cos.shape[-1]
    # `.data`, not `detach()`: the write must be invisible to autograd's version counter.
    target = x.data if inplace else x
    if interleaved:
        first, second = target[..., 0 : 2 * half : 2], target[..., 1 : 2 * half : 2]
    else:
        first, second = target[..., :half], target[..., half : 2 * half]
    # The tables promote the products to compute_dtype; both are complete before anything is written.
    new_first = torch.mul(first, cos).sub_(torch.mul(second, sin))
    new_second = torch.mul(first, sin).add_(torch.mul(second, cos))
    if inplace:
        first.copy_(new_first)
        second.copy_(new_second)
        return x
    # Not by torch.cat, which raises for fp16 tensors under CPU autocast to bf16.
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned = (
        (out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2]) if interleaved else out[..., : 2 * half].chunk(2, -1)
    )
    turned[0].copy_(new_first)
    turned[1].copy_(new_second)
    out[..., 2 * half :].copy_(x[..., 2 * half :])
    return out
