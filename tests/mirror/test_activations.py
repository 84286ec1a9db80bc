"""Activations and their hand-written gradients against PyTorch's, and functions with the names of Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.ops import activations as A
from flash_attn_compat.ops.triton import k_activations as K
from flash_attn_compat.ops.triton.linear import triton_dgrad_act, triton_linear_act
from flash_attn_compat.ops.triton.mlp import FusedDenseSqreluDense
from tests.forms import plain
from tests.forms.inputs import randn
from tests.forms.plain import assert_as_good_as_plain, check_function, pairwise, rounded_once

PLAIN: dict[str, Any] = {
    "id": lambda x: x,
    "gelu": F.gelu,
    "gelu_approx": plain.gelu_approx,
    "squared_relu": plain.squared_relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "relu": F.relu,
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def derivative(name: str, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(PLAIN[name](leaf).sum(), leaf)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(K.Activation))
def test_activations_and_derivatives_are_pytorchs(activation: K.Activation, dtype: torch.dtype) -> None:
    x, name = 3 * randn(200, dtype=dtype), activation.value
    act, slope = K.get_triton_activation_kernel(activation), K.get_triton_activation_bwd_kernel(activation)
    assert act is not None and slope is not None
    assert_as_good_as_plain(act(x), PLAIN[name](x), PLAIN[name](x.double()))
    assert_as_good_as_plain(slope(x), derivative(name, x), derivative(name, x.double()))


def test_gelu_keeps_its_tail() -> None:
    """1 + erf cancels there."""
    x = torch.tensor([-6.0, -9.0])
    exact = torch.tensor([value * math.erfc(-value / 2**0.5) / 2 for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(K.gelu(x).double(), exact, rtol=1e-5, atol=0)


def test_names_lead_to_functions_and_nothing_to_none() -> None:
    assert K.get_triton_activation_kernel(None) is None and K.get_triton_activation_bwd_kernel(None) is None
    assert K.get_triton_activation_kernel("gelu") is K.gelu  # type: ignore[arg-type]
    x, zero = randn(50), torch.zeros(1)
    torch.testing.assert_close(K.tanh(x), torch.tanh(x))
    torch.testing.assert_close(K.cosh(x), torch.cosh(x))
    assert K.relu_grad(zero) == 1 and K.leaky_relu_grad(zero) == 1


@pytest.mark.parametrize(
    ("activation", "bias", "dtype"), pairwise(("id", "gelu", "gelu_approx", "squared_relu"), (False, True), DTYPES)
)
def test_linear_with_an_activation_and_the_gradient_through_it(activation: str, bias: bool, dtype: torch.dtype) -> None:
    x, weight, b = randn(2, 5, 8, dtype=dtype), randn(6, 8, seed=1, dtype=dtype), randn(6, dtype=dtype)
    act, given = PLAIN[activation], b if bias else None
    rounded, exact = (F.linear(x.to(d), weight.to(d), b.to(d) * bias) for d in (dtype, torch.float64))
    out, act_input = triton_linear_act(x, weight, given, activation, save_act_input=True)
    assert_as_good_as_plain(act_input, rounded, exact)
    assert_as_good_as_plain(out, act(rounded), act(exact))
    outside = triton_linear_act(x, weight.requires_grad_(), given, activation)
    assert torch.equal(outside, out) and not outside.requires_grad  # type: ignore[arg-type, union-attr]

    weight, grad, hidden = weight.detach(), randn(2, 5, 6, seed=3, dtype=dtype), 2 * randn(2, 5, 8, seed=4, dtype=dtype)
    expected = [(grad.to(d) @ weight.to(d)) * derivative(activation, hidden.to(d)) for d in (dtype, torch.float64)]
    assert_as_good_as_plain(triton_dgrad_act(grad, weight, activation, hidden), *expected)


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
def test_mixed_dtypes_follow_autocast_as_linear_layers_do(weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = FusedDenseSqreluDense(8, 12, 5, dtype=weight_dtype)
    x = randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module.fc2(F.relu(module.fc1(x)).square())
        assert torch.equal(module(x), expected) and expected.dtype == torch.bfloat16


# ops.activations

# name: (function, the same by torch, what it takes)
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
    "swiglu": (A.swiglu, lambda x, y: F.silu(x) * y, [2 * randn(4, 3, 8), 2 * randn(4, 3, 8, seed=1)]),
    "bias_gelu_impl": (A.bias_gelu_impl, lambda x, b: plain.gelu_approx(x + b), [2 * randn(4, 3, 8), 2 * randn(8)]),
    "fast_gelu_impl": (A.fast_gelu_impl, plain.gelu_approx, [2 * randn(4, 3, 8)]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_torchs(name: str, dtype: torch.dtype) -> None:
    function, of_torch, given = FUNCTIONS[name]
    check_function(function, rounded_once(of_torch), *(value.to(dtype) for value in given), rounds_once=True)


def test_half_precision_does_not_overflow_inside() -> None:
    x = torch.tensor([200.0, -200.0, 1000.0], dtype=torch.float16)
    assert torch.equal(A.gelu_fwd(x), torch.tensor([200.0, 0.0, 1000.0], dtype=torch.float16))
    assert torch.equal(A.gelu_bwd(torch.ones_like(x), x), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float16))


def test_relus_and_their_gradients() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.bfloat16)
    g = torch.tensor([1.0, 1.0, 0.5])
    out, grad = A.sqrelu_fwd(x), A.sqrelu_bwd(g, x)
    assert out.dtype == grad.dtype == torch.bfloat16
    assert out.tolist() == [0, 0, 9] and grad.tolist() == [0, 0, 3]
    grad = A.relu_bwd(torch.full((3,), 2.0), x)  # which passes at 0
    assert grad.dtype == torch.bfloat16 and grad.tolist() == [0, 2, 2]
