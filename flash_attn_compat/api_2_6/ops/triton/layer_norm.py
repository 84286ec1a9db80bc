"""ops.triton.layer_norm of flash-attn 2.6: no zero_centered_weight before is_rms_norm."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.ops.triton import layer_norm as _current
from flash_attn_compat.ops.triton.layer_norm import Results

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]


def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, x1: Tensor | None = None,
    weight1: Tensor | None = None, bias1: Tensor | None = None, eps: float = 1e-6, dropout_p: float = 0.0,
    rowscale: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Results:  # fmt: skip
    """`flash_attn_compat.ops.triton.layer_norm.layer_norm_fn` with the arguments in the order of 2.6."""
    return _current.layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        is_rms_norm=is_rms_norm, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip


def rms_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, x1: Tensor | None = None,
    weight1: Tensor | None = None, bias1: Tensor | None = None, eps: float = 1e-6, dropout_p: float = 0.0,
    rowscale: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Results:  # fmt: skip
    """`layer_norm_fn` with is_rms_norm=True."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        is_rms_norm=True, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip


def layer_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, x1: Tensor | None = None,
    weight1: Tensor | None = None, bias1: Tensor | None = None, eps: float = 1e-6, dropout_p: float = 0.0,
    rowscale: Tensor | None = None, prenorm: bool = False, dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None, upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`flash_attn_compat.ops.triton.layer_norm.layer_norm_ref` with the arguments in the order of 2.6."""
    return _current.layer_norm_ref(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, dropout_mask=dropout_mask,
        dropout_mask1=dropout_mask1, upcast=upcast,
    )  # fmt: skip


def rms_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, x1: Tensor | None = None,
    weight1: Tensor | None = None, bias1: Tensor | None = None, eps: float = 1e-6, dropout_p: float = 0.0,
    rowscale: Tensor | None = None, prenorm: bool = False, dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None, upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`flash_attn_compat.ops.triton.layer_norm.rms_norm_ref` with the arguments in the order of 2.6."""
    return _current.rms_norm_ref(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, dropout_mask=dropout_mask,
        dropout_mask1=dropout_mask1, upcast=upcast,
    )  # fmt: skip


class RMSNorm(_current.RMSNorm):
    """`flash_attn_compat.ops.triton.layer_norm.RMSNorm` with the arguments in the order of 2.6."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, dropout_p, device=device, dtype=dtype)
