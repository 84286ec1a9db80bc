"""Activation functions with hand-written gradients that keep only their inputs.

Arithmetic is in fp32 (fp64 for fp64 inputs) and rounded once to the input's dtype.
The gelu here is the tanh approximation, with the constants flash-attn uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.ops._casting import cast, upcast

_GELU_SLOPE = 0.79788456  # sqrt(2 / pi)
_GELU_CUBIC = 0.044715


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y for x and y of one shape, in x's dtype."""
    x32, y32 = upcast(x), upcast(y)
    return cast(x32 * torch.sigmoid(x32) * y32, x.dtype)


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dy) of `swiglu_fwd` for the upstream gradient g, in the dtypes of x and y."""
    x32, y32, g32 = upcast(x), upcast(y), upcast(g)
    sigmoid = torch.sigmoid(x32)
    dx = g32 * y32 * sigmoid * (1 + x32 * (1 - sigmoid))
    return cast(dx, x.dtype), cast(g32 * x32 * sigmoid, y.dtype)


def gelu_fwd(x: Tensor) -> Tensor:
    """Tanh-approximated gelu of x, in x's dtype."""
    return cast(_gelu(upcast(x)), x.dtype)


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of `gelu_fwd` at x for the upstream gradient g, in x's dtype."""
    return cast(_gelu_slope(upcast(x)) * upcast(g), x.dtype)


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """Tanh-approximated gelu of y + bias: y (..., d), bias (d,), result in y's dtype."""
    return cast(_gelu(upcast(y) + upcast(bias)), y.dtype)


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients (dy (..., d), dbias (d,)) of `bias_gelu` for the upstream gradient g."""
    dy = _gelu_slope(upcast(y) + upcast(bias)) * upcast(g)
    return cast(dy, y.dtype), cast(dy.reshape(-1, bias.shape[-1]).sum(dim=0), bias.dtype)


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of relu at x, which passes at x == 0 too (unlike torch's), in x's dtype."""
    return cast(torch.where(x >= 0, g, 0.0), x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """relu(x) squared (Primer, So et al. 2021), in x's dtype."""
    return cast(upcast(x).clamp(min=0).square(), x.dtype)


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of `sqrelu_fwd` at x for the upstream gradient g, in x's dtype."""
    return cast(2 * upcast(g) * upcast(x).clamp(min=0), x.dtype)


class SwiGLUFunction(torch.autograd.Function):
    """`swiglu_fwd` with `swiglu_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return swiglu_fwd(x, y)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return swiglu_bwd(x, y, dout)


class GeLUFunction(torch.autograd.Function):
    """`bias_gelu` with `bias_gelu_back` as its gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(input, bias)
        return bias_gelu(input, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        input, bias = ctx.saved_tensors
        return bias_gelu_back(grad_output, input, bias)


class FastGeLUFunction(torch.autograd.Function):
    """`gelu_fwd` with `gelu_bwd` as its gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return gelu_fwd(input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (input,) = ctx.saved_tensors
        return gelu_bwd(grad_output, input)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y (Shazeer 2020), differentiable; x and y of one shape, result in x's dtype."""
    out: Tensor = SwiGLUFunction.apply(x, y)
    return out


def bias_gelu_impl(input: Tensor, bias: Tensor) -> Tensor:
    """`bias_gelu`, differentiable in input (..., d) and bias (d,)."""
    out: Tensor = GeLUFunction.apply(input, bias)
    return out


def fast_gelu_impl(x: Tensor) -> Tensor:
    """`gelu_fwd`, differentiable."""
    out: Tensor = FastGeLUFunction.apply(x)
    return out


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(_GELU_SLOPE * x * (1 + _GELU_CUBIC * x * x)))


def _gelu_slope(x: Tensor) -> Tensor:
    tanh = torch.tanh(_GELU_SLOPE * x * (1 + _GELU_CUBIC * x * x))
    inner = _GELU_SLOPE * (1 + 3 * _GELU_CUBIC * x * x)
    return 0.5 * x * (1 - tanh * tanh) * inner + 0.5 * (1 + tanh)
