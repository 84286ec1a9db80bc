"""Dropout, add and RMS norm in the signatures of flash-attn's `dropout_layer_norm` extension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_attn_compat.ops._add_norm import NormInputs
from flash_attn_compat.ops.layer_norm import (
    DropoutAddLayerNorm,
    NormArguments,
    Results,
    _dropout_add_norm,
    _dropout_add_norm_parallel,
    _norm,
)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last axis: x (..., n), weight (n,), computed in fp32, result in x's dtype."""
    return _norm(x, weight, None, epsilon, is_rms_norm=True)


def dropout_add_rms_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Results:
    """As `flash_attn_compat.ops.layer_norm.dropout_add_layer_norm`, without centring."""
    how = NormArguments(dropout_p, epsilon, prenorm, residual_in_fp32, return_dropout_mask, is_rms_norm=True)
    inputs = NormInputs(x0, weight, bias, residual, rowscale=rowscale, colscale=layerscale)
    return _dropout_add_norm(inputs, how)


def dropout_add_rms_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[Tensor | None, ...]:
    """As `flash_attn_compat.ops.layer_norm.dropout_add_layer_norm_parallel_residual`, without centring."""
    how = NormArguments(dropout_p, epsilon, prenorm, residual_in_fp32, return_dropout_mask, is_rms_norm=True)
    return _dropout_add_norm_parallel(NormInputs(x0, weight0, bias0, residual, x1, weight1, bias1), how)


class RMSNorm(nn.Module):
    """RMS norm over the last axis of size `hidden_size`; `bias` is registered as None."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., hidden_size) to the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    """`dropout_add_rms_norm` as a module; arguments as `DropoutAddLayerNorm`, `bias` is registered as None."""

    is_rms_norm = True
