"""A linear layer with an activation, and the gradient through both, outside of autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.ops._casting import cast, upcast
from flash_attn_compat.ops.triton.k_activations import (
    Activation,
    get_triton_activation_bwd_kernel,
    get_triton_activation_kernel,
)

_NAMES = ("id", "gelu", "gelu_approx", "squared_relu")


@torch.no_grad()
def triton_linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "id",
    save_act_input: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """activation(x @ weight.T + bias).

    Args:
        x: (..., in_features); weight (out_features, in_features); bias (out_features,); all of one dtype.
        activation: "id", "gelu", "gelu_approx" (tanh) or "squared_relu".
        save_act_input: also return the activation's input.
    Returns:
        (..., out_features), or that and the activation's input.
    """
    _check("x", x, weight, activation)
    assert bias is None or bias.dtype == x.dtype, f"x has dtype {x.dtype}, bias has dtype {bias.dtype}"
    act_input = torch.nn.functional.linear(x, weight, bias)
    act = get_triton_activation_kernel(Activation(activation)) if activation != "id" else None
    out = act_input if act is None else act(act_input)
    return (out, act_input) if save_act_input else out


@torch.no_grad()
def triton_dgrad_act(
    grad_output: Tensor, weight: Tensor, activation: str = "id", act_input: Tensor | None = None
) -> Tensor:
    """(grad_output @ weight) * activation'(act_input): the gradient of an activation's input.

    Args:
        grad_output: (..., out_features); weight (out_features, in_features), of one dtype.
        activation: as `triton_linear_act`.
        act_input: (..., in_features), unless activation is "id".
    Returns:
        (..., in_features).
    """
    _check("grad_output", grad_output, weight.t(), activation)
    grad = grad_output @ weight
    derivative = get_triton_activation_bwd_kernel(Activation(activation)) if activation != "id" else None
    if derivative is None:
        return grad
    assert act_input is not None, f"act_input is required for activation {activation}"
    return cast(upcast(grad) * derivative(upcast(act_input)), grad.dtype)


def _check(name: str, x: Tensor, weight: Tensor, activation: str) -> None:
    """Raise AssertionError unless x and weight (any, x's last axis) fit and the activation is known."""
    assert activation in _NAMES, f"activation is {activation!r}, expected one of {', '.join(_NAMES)}"
    assert x.dtype == weight.dtype, f"{name} has dtype {x.dtype}, weight has dtype {weight.dtype}"
    assert x.shape[-1] == weight.shape[1], (
        f"{name} has shape {tuple(x.shape)}, expected {weight.shape[1]} in the last axis for this weight"
    )
