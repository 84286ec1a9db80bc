"""Attention with a bias on the scores, with the signatures of flash-attn's first Triton kernel (used by MPT).

Causal here means that row i sees keys 0 to i for any lengths; see flash_attn_interface for the other alignment. Scores,
softmax and bias are in fp32, one block of rows at a time; the backward computes them again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_attn_compat.core.torch_state import without_autocast
from flash_attn_compat.ops._casting import cast, upcast

_ROWS = 256  # rows of q that are computed at once


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """Return softmax(q @ k.T * softmax_scale + bias) @ v.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k, v: (batch, seqlen_k, nheads, headdim).
        bias: (1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k), of q's dtype or fp32. Unlike flash-attn's, it may
            require gradients.
        softmax_scale: 1 / sqrt(headdim) by default.
    Returns:
        Tensor of q's shape and dtype.
    Raises:
        AssertionError or RuntimeError: shapes or dtypes do not fit.
    """
    _check(q, k, v, bias)
    scale = softmax_scale or 1.0 / math.sqrt(q.shape[-1])
    out: Tensor = _Attention.apply(q, k, v, bias, causal, scale)
    return out


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, bias: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """`flash_attn_func` of kv (batch, seqlen_k, 2, nheads, headdim)."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], bias, causal, softmax_scale)


def flash_attn_qkvpacked_func(
    qkv: Tensor, bias: Tensor | None = None, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """`flash_attn_func` of qkv (batch, seqlen, 3, nheads, headdim)."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], bias, causal, softmax_scale)


class _Attention(torch.autograd.Function):
    """Attention by blocks of rows; the backward computes the scores again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        ctx.options = causal, scale
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        wide = upcast(k), upcast(v)
        with without_autocast(q.device):
            for rows in _split_rows(q.shape[1]):
                out[:, rows] = _attend(upcast(q[:, rows]), *wide, _slice_bias(bias, rows), rows, causal, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        # Gradients are summed over the blocks in fp32 and rounded once.
        inputs = [None if t is None else upcast(t.detach()) for t in (q, k, v, bias)]
        grads = [None if t is None else torch.zeros_like(t) for t in inputs]
        with without_autocast(q.device):
            for rows in _split_rows(q.shape[1]):
                _add_gradients(grads, inputs, dout, rows, *ctx.options)
        results = [None if grad is None else cast(grad, t.dtype) for grad, t in zip(grads, (q, k, v, bias))]
        return (*results, None, None)


def _add_gradients(
    grads: list[Tensor | None], inputs: list[Tensor | None], dout: Tensor, rows: slice, causal: bool, scale: float
) -> None:
    q, k, v, bias = inputs
    dq, dk, dv, dbias = grads
    assert q is not None and k is not None and v is not None
    assert dq is not None and dk is not None and dv is not None
    leaves = [t.detach().requires_grad_() for t in (q[:, rows], k, v)]
    bias_rows = _slice_bias(bias, rows)
    if bias_rows is not None:
        leaves.append(bias_rows.detach().requires_grad_())
    with torch.enable_grad():
        out = _attend(leaves[0], leaves[1], leaves[2], leaves[3] if bias is not None else None, rows, causal, scale)
    targets = (dq[:, rows], dk, dv, _slice_bias(dbias, rows))
    for target, grad in zip(targets, torch.autograd.grad(out, leaves, upcast(dout[:, rows]))):
        assert target is not None
        target += grad


def _split_rows(seqlen_q: int) -> list[slice]:
    return [slice(first, min(first + _ROWS, seqlen_q)) for first in range(0, seqlen_q, _ROWS)]


def _slice_bias(bias: Tensor | None, rows: slice) -> Tensor | None:
    return bias if bias is None or bias.shape[2] == 1 else bias[:, :, rows]


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: slice, causal: bool, scale: float) -> Tensor:
    """Compute a block of rows in fp32: q (batch, rows, nheads, headdim); k, v and bias with all keys."""
    if causal:
        # No row of this block sees a later key.
        seen = min(rows.stop, k.shape[1])
        k, v, bias = k[:, :seen], v[:, :seen], None if bias is None else bias[..., :seen]
    scores = torch.einsum("bthd,bshd->bhts", q * scale, k)
    if bias is not None:
        scores = scores + bias
    if causal:
        indices = torch.arange(rows.start, rows.stop, device=q.device)
        hidden = torch.arange(k.shape[1], device=q.device) > indices[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("bhts,bshd->bthd", torch.softmax(scores, dim=-1), v)


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    batch, seqlen_q, nheads, headdim = q.shape
    seqlen_k = k.shape[1]
    for name, tensor in (("k", k), ("v", v)):
        assert tuple(tensor.shape) == (batch, seqlen_k, nheads, headdim), (
            f"q has shape {tuple(q.shape)}, {name} has shape {tuple(tensor.shape)}, "
            f"expected {name} of shape {(batch, seqlen_k, nheads, headdim)}"
        )
    assert q.dtype == k.dtype == v.dtype, (
        f"All tensors must have the same type, got q {q.dtype}, k {k.dtype} and v {v.dtype}"
    )
    if bias is None:
        return
    assert bias.dtype in (q.dtype, torch.float32), f"bias has dtype {bias.dtype}, expected {q.dtype} or torch.float32"
    expected = f"(1 or {batch}, 1 or {nheads}, 1 or {seqlen_q}, {seqlen_k})"
    fits = bias.dim() == 4 and all(size in (1, full) for size, full in zip(bias.shape[:3], (batch, nheads, seqlen_q)))
    if not fits or bias.shape[3] != seqlen_k:
        raise RuntimeError(f"bias has shape {tuple(bias.shape)}, expected {expected}")
