"""Activations and their derivatives by name, in fp32 (fp64 for fp64 inputs), rounded once to the input's dtype.

In flash-attn these are device functions for use inside Triton kernels; here they take tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from flash_attn_compat.ops import activations
from flash_attn_compat.ops._casting import cast, upcast

_LEAK = 0.01


class Activation(str, Enum):
    """The names of activations for `triton_linear_act` and the two functions below."""

    SquaredReLU = "squared_relu"
    GeLU = "gelu"
    GeLUApprox = "gelu_approx"
    LeakyReLU = "leaky_relu"
    ReLU = "relu"


def get_triton_activation_kernel(activation: Activation | None) -> Callable[[Tensor], Tensor] | None:
    """The activation of that name; None for None."""
    return _ACTIVATIONS[Activation(activation)][0] if activation else None


def get_triton_activation_bwd_kernel(activation: Activation | None) -> Callable[[Tensor], Tensor] | None:
    """The derivative of the activation of that name; None for None."""
    return _ACTIVATIONS[Activation(activation)][1] if activation else None


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return cast(torch.tanh(upcast(x)), x.dtype)


def cosh(x: Tensor) -> Tensor:
    """Hyperbolic cosine."""
    return cast(torch.cosh(upcast(x)), x.dtype)


def relu(x: Tensor) -> Tensor:
    """x where it is positive, else 0."""
    return x.clamp(min=0)


def relu_grad(x: Tensor) -> Tensor:
    """1 where x >= 0, else 0."""
    return cast(x >= 0, x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) squared (So et al. 2021)."""
    return activations.sqrelu_fwd(x)


def squared_relu_grad(x: Tensor) -> Tensor:
    """2 x where x is positive, else 0."""
    return 2 * relu(x)


def leaky_relu(x: Tensor) -> Tensor:
    """x where it is not negative, else 0.01 x."""
    return cast(torch.where(x >= 0, upcast(x), _LEAK * upcast(x)), x.dtype)


def leaky_relu_grad(x: Tensor) -> Tensor:
    """1 where x >= 0, else 0.01."""
    return torch.ones_like(x).masked_fill_(x < 0, _LEAK)


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016)."""
    return cast(upcast(x) * _normal_cdf(upcast(x)), x.dtype)


def gelu_grad(x: Tensor) -> Tensor:
    """Derivative of `gelu`."""
    x32 = upcast(x)
    density = torch.exp(-0.5 * x32 * x32) / math.sqrt(2 * math.pi)
    return cast(_normal_cdf(x32) + x32 * density, x.dtype)


def gelu_approx(x: Tensor) -> Tensor:
    """`gelu` by a hyperbolic tangent."""
    return activations.gelu_fwd(x)


def gelu_approx_grad(x: Tensor) -> Tensor:
    """Derivative of `gelu_approx`."""
    return activations.gelu_bwd(torch.ones_like(x), x)


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x * math.sqrt(0.5))


_ACTIVATIONS: dict[Activation, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    Activation.SquaredReLU: (squared_relu, squared_relu_grad),
    Activation.GeLU: (gelu, gelu_grad),
    Activation.GeLUApprox: (gelu_approx, gelu_approx_grad),
    Activation.LeakyReLU: (leaky_relu, leaky_relu_grad),
    Activation.ReLU: (relu, relu_grad),
}
