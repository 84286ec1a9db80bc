"""The old name of `ops/triton/layer_norm.py`, with the arguments that flash-attn 2.4 had: no second branch."""

from __future__ import annotations

from torch import Tensor

from flash_attn_compat.ops.triton import layer_norm as _current
from flash_attn_compat.ops.triton.layer_norm import Results, RMSNorm

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Results:
    """`flash_attn_compat.ops.triton.layer_norm.layer_norm_fn`; it returns one dropout mask, not two."""
    results = _current.layer_norm_fn(
        x, weight, bias, residual, eps=eps, dropout_p=dropout_p, prenorm=prenorm, residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
    return results[:-1] if isinstance(results, tuple) and return_dropout_mask else results


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Results:
    """`layer_norm_fn` with is_rms_norm=True."""
    return layer_norm_fn(
        x, weight, bias, residual, eps, dropout_p, prenorm, residual_in_fp32, is_rms_norm=True,
        return_dropout_mask=return_dropout_mask,
    )  # fmt: skip


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    dropout_mask: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_compat.ops.triton.layer_norm.layer_norm_ref`."""
    return _current.layer_norm_ref(
        x, weight, bias, residual, eps=eps, dropout_p=dropout_p, prenorm=prenorm, dropout_mask=dropout_mask,
        upcast=upcast,
    )  # fmt: skip


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    dropout_mask: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_compat.ops.triton.layer_norm.rms_norm_ref`."""
    return _current.rms_norm_ref(
        x, weight, bias, residual, eps=eps, dropout_p=dropout_p, prenorm=prenorm, dropout_mask=dropout_mask,
        upcast=upcast,
    )  # fmt: skip
