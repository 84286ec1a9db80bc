"""The norms of `ops/triton/layer_norm.py` in plain PyTorch, each step in its operands' dtypes, for tests to compare."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`layer_norm_fn` step by step, in plain PyTorch; further arguments than `layer_norm_fn` has:

    Args:
        dropout_mask, dropout_mask1: bool, x's shape, True = kept; drawn by torch if None.
        upcast: compute in fp32. Otherwise h is rounded to x's dtype.
    Returns:
        y, or (y[, y1][, h]): y1 with weight1, h with prenorm.
    """

    def norm(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.layer_norm(h.to(weight.dtype), h.shape[-1:], weight, bias, eps)

    masks = dropout_mask, dropout_mask1
    return _compute_reference(
        norm, x, weight, bias, residual, x1, weight1, bias1, dropout_p, rowscale, prenorm, zero_centered_weight, masks,
        upcast,
    )  # fmt: skip


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`rms_norm_fn` step by step; arguments and results as `layer_norm_ref`."""

    def norm(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps) * weight
        return y if bias is None else y + bias

    masks = dropout_mask, dropout_mask1
    return _compute_reference(
        norm, x, weight, bias, residual, x1, weight1, bias1, dropout_p, rowscale, prenorm, zero_centered_weight, masks,
        upcast,
    )  # fmt: skip


def _compute_reference(
    norm: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None,
    residual: Tensor | None, x1: Tensor | None, weight1: Tensor | None, bias1: Tensor | None, dropout_p: float,
    rowscale: Tensor | None, prenorm: bool, zero_centered_weight: bool, masks: tuple[Tensor | None, Tensor | None],
    upcast: bool,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    assert x1 is None or rowscale is None, "rowscale is not supported with parallel LayerNorm"
    dtype = x.dtype

    def operand(t: Tensor) -> Tensor:
        return t.float() if upcast else t

    h = operand(x) if rowscale is None else operand(x) * rowscale[..., None]
    h = _drop(h, masks[0], dropout_p)
    if x1 is not None:
        h = h + _drop(operand(x1), masks[1], dropout_p)
    if residual is not None:
        h = (h + operand(residual)).to(h.dtype)
    results = []
    for own_weight, own_bias in ((weight, bias), (weight1, bias1)):
        if own_weight is not None:
            full = operand(own_weight) + 1.0 if zero_centered_weight else operand(own_weight)
            results.append(norm(h, full, None if own_bias is None else operand(own_bias)).to(dtype))
    results += [h] if prenorm else []
    return tuple(results) if len(results) > 1 else results[0]


def _drop(x: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    if dropout_p <= 0.0:
        return x
    return F.dropout(x, dropout_p) if mask is None else x.masked_fill(~mask, 0.0) / (1.0 - dropout_p)
