"""Dropout, add and layer norm in the signatures of flash-attn's `dropout_layer_norm` extension.

The arithmetic is in `ops/_add_norm.py`; `ops/rms_norm.py` is the same without centring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flash_attn_compat.ops._add_norm import NormInputs, NormOptions, add_norm, dropout_mask

Results = Tensor | tuple[Tensor | None, ...]


class NormArguments(NamedTuple):
    """The arguments of this module's functions that are no tensors; see `dropout_add_layer_norm`."""

    dropout_p: float
    epsilon: float
    prenorm: bool
    residual_in_fp32: bool
    return_dropout_mask: bool
    is_rms_norm: bool

    def options(self, inputs: NormInputs) -> NormOptions:
        """Return the options of `add_norm` for the dtypes of these inputs."""
        residual_dtype = torch.float32 if self.residual_in_fp32 else inputs.x.dtype
        if inputs.residual is not None:
            residual_dtype = inputs.residual.dtype
        return NormOptions(
            eps=self.epsilon,
            is_rms_norm=self.is_rms_norm,
            out_dtype=inputs.x.dtype,
            residual_dtype=residual_dtype if self.prenorm else None,
            dropout_p=self.dropout_p,
        )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Layer norm over the last axis: x (..., n), weight and bias (n,), computed in fp32, result in x's dtype."""
    return _norm(x, weight, bias, epsilon, is_rms_norm=False)


def dropout_add_layer_norm(
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
    """z = norm(x) with x = dropout(x0 * rowscale * layerscale) + residual.

    Args:
        x0: (..., n).
        residual: (..., n) or None.
        weight, bias: (n,); bias may be None.
        dropout_p: applied whenever positive (also in evaluation).
        rowscale: (...), layerscale: (n,), or None.
        prenorm: also return x, in residual's dtype, else fp32 if `residual_in_fp32`, else x0's dtype.
        return_dropout_mask: also return the mask, uint8, x0's shape, 1 = kept (all ones without dropout).
    Returns:
        z in x0's dtype, or (z[, x][, mask]).
    """
    how = NormArguments(dropout_p, epsilon, prenorm, residual_in_fp32, return_dropout_mask, is_rms_norm=False)
    inputs = NormInputs(x0, weight, bias, residual, rowscale=rowscale, colscale=layerscale)
    return _dropout_add_norm(inputs, how)


def dropout_add_layer_norm_parallel_residual(
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
    """Two norms of x = dropout(x0) + dropout(x1) + residual, each branch with its own mask.

    Args:
        x0, x1, residual: (..., n); x1 and residual may be None.
        weight0, bias0, weight1, bias1: (n,); the biases, and weight1, may be None.
        Others: as `dropout_add_layer_norm`.
    Returns:
        (z0, z1[, x][, mask0, mask1]); z1 is None without weight1, mask1 without x1.
    """
    how = NormArguments(dropout_p, epsilon, prenorm, residual_in_fp32, return_dropout_mask, is_rms_norm=False)
    return _dropout_add_norm_parallel(NormInputs(x0, weight0, bias0, residual, x1, weight1, bias1), how)


class DropoutAddLayerNormFn(torch.autograd.Function):
    """`dropout_add_layer_norm` (or its RMS norm) for programs that call its `apply`."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(None, *args, **kwargs)

    @staticmethod
    def forward(
        ctx: Any,
        x0: Tensor,
        residual: Tensor | None,
        gamma: Tensor,
        beta: Tensor | None,
        rowscale: Tensor | None,
        colscale: Tensor | None,
        dropout_p: float,
        epsilon: float,
        residual_in_fp32: bool = False,
        prenorm: bool = False,
        is_rms_norm: bool = False,
        return_dmask: bool = False,
    ) -> Results:
        how = NormArguments(dropout_p, epsilon, prenorm, residual_in_fp32, return_dmask, is_rms_norm)
        return _dropout_add_norm(NormInputs(x0, gamma, beta, residual, rowscale=rowscale, colscale=colscale), how)


class DropoutAddLayerNorm(nn.Module):
    """`dropout_add_layer_norm` as a module; dropout only in training.

    Args:
        hidden_size: n, the size of the last axis.
        prenorm: return (z, x) instead of z.
        p: dropout probability.
        eps: added to the variance.
        residual_in_fp32: return x in fp32 if there is no residual; otherwise the residual's dtype decides.
    """

    is_rms_norm = False

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if self.is_rms_norm:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Results:
        """x0 and residual (..., n) to z, or (z, x) with prenorm."""
        dropout_p = self.p if self.training else 0.0
        how = NormArguments(dropout_p, self.eps, self.prenorm, self.residual_in_fp32, False, self.is_rms_norm)
        return _dropout_add_norm(NormInputs(x0, self.weight, self.bias, residual), how)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, is_rms_norm: bool) -> Tensor:
    options = NormOptions(eps=epsilon, is_rms_norm=is_rms_norm, out_dtype=x.dtype)
    return add_norm(NormInputs(x, weight, bias), options)[0]


def _dropout_add_norm(inputs: NormInputs, how: NormArguments) -> Results:
    mask = dropout_mask(inputs.x, how.dropout_p)
    z, _, x = add_norm(inputs._replace(mask=mask), how.options(inputs))
    masks = (_as_uint8(mask, inputs.x),) if how.return_dropout_mask else ()
    return _results(z, *((x,) if how.prenorm else ()), *masks)


def _dropout_add_norm_parallel(inputs: NormInputs, how: NormArguments) -> tuple[Tensor | None, ...]:
    x0, x1 = inputs.x, inputs.x1
    mask0 = dropout_mask(x0, how.dropout_p)
    mask1 = None if x1 is None else dropout_mask(x1, how.dropout_p)
    z0, z1, x = add_norm(inputs._replace(mask=mask0, mask1=mask1), how.options(inputs))
    results: tuple[Tensor | None, ...] = (z0, z1)
    if how.prenorm:
        results += (x,)
    if how.return_dropout_mask:
        results += (_as_uint8(mask0, x0), None if x1 is None else _as_uint8(mask1, x1))
    return results


def _as_uint8(mask: Tensor | None, x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.uint8) if mask is None else mask.to(torch.uint8)


def _results(first: Tensor, *rest: Tensor | None) -> Results:
    return (first, *rest) if rest else first
