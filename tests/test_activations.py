"""Activations and their hand-written gradients against fp64 autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.ops import activations as A

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# name: (function, the same by torch, number of arguments)
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "swiglu": (A.swiglu, lambda x, y: F.silu(x) * y, 2),
    "bias_gelu_impl": (A.bias_gelu_impl, lambda x, b: F.gelu(x + b, approximate="tanh"), 2),
    "fast_gelu_impl": (A.fast_gelu_impl, lambda x: F.gelu(x, approximate="tanh"), 1),
}


def arguments(name: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"swiglu": [(4, 3, 8), (4, 3, 8)], "bias_gelu_impl": [(4, 3, 8), (8,)], "fast_gelu_impl": [(4, 3, 8)]}
    return [torch.randn(s, generator=generator, dtype=torch.float64).mul(2).to(dtype) for s in shapes[name]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_agree_with_fp64(name: str, dtype: torch.dtype) -> None:
    function, plain, _ = FUNCTIONS[name]
    given = [t.requires_grad_() for t in arguments(name, dtype)]
    exact = [t.detach().double().requires_grad_() for t in given]
    out, expected = function(*given), plain(*exact)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out.backward(weight)
    expected.backward(weight.double())
    eps = torch.finfo(dtype).eps
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=2 * eps, atol=1e-6)
    for actual, wanted in zip(given, exact, strict=True):
        assert actual.grad is not None and actual.grad.dtype == dtype and wanted.grad is not None
        torch.testing.assert_close(actual.grad.double(), wanted.grad, rtol=2 * eps, atol=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_match_finite_differences(name: str) -> None:
    given = tuple(t.requires_grad_() for t in arguments(name, torch.float64))
    assert torch.autograd.gradcheck(FUNCTIONS[name][0], given)


def test_half_precision_does_not_overflow_inside() -> None:
    x = torch.tensor([200.0, -200.0, 1000.0], dtype=torch.float16)
    assert torch.equal(A.gelu_fwd(x), torch.tensor([200.0, 0.0, 1000.0], dtype=torch.float16))
    assert torch.equal(A.gelu_bwd(torch.ones_like(x), x), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float16))


def test_the_plain_forward_and_backward_functions_agree_with_the_differentiable_ones() -> None:
    x, y = arguments("swiglu", torch.float32)
    g = torch.ones_like(x)
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    A.swiglu(*leaves).sum().backward()
    assert torch.equal(A.swiglu_fwd(x, y), A.swiglu(x, y))
    for actual, leaf in zip(A.swiglu_bwd(x, y, g), leaves, strict=True):
        assert leaf.grad is not None and torch.equal(actual, leaf.grad)
    leaf = x.clone().requires_grad_()
    A.fast_gelu_impl(leaf).sum().backward()
    assert leaf.grad is not None and torch.equal(A.gelu_bwd(g, x), leaf.grad)


def test_squared_relu_and_its_gradient() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.bfloat16)
    g = torch.tensor([1.0, 1.0, 0.5])
    out, grad = A.sqrelu_fwd(x), A.sqrelu_bwd(g, x)
    assert out.dtype == grad.dtype == torch.bfloat16
    assert out.tolist() == [0, 0, 9] and grad.tolist() == [0, 0, 3]


def test_relu_bwd_passes_at_zero() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float16)
    grad = A.relu_bwd(torch.full((3,), 2.0), x)
    assert grad.dtype == torch.float16 and grad.tolist() == [0, 2, 2]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_compile_in_one_graph(name: str) -> None:
    function: Any = FUNCTIONS[name][0]
    eager = [t.requires_grad_() for t in arguments(name, torch.float32)]
    compiled = [t.detach().clone().requires_grad_() for t in eager]
    torch._dynamo.reset()
    function(*eager).sum().backward()
    torch.compile(function, backend="aot_eager", fullgraph=True)(*compiled).sum().backward()
    for actual, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)
