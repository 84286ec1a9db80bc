"""Activations and their hand-written gradients against PyTorch's, and the layers of a squared relu."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flash_attn_compat.ops import activations as A
from flash_attn_compat.ops.triton.mlp import FusedDenseSqreluDense
from tests import plain
from tests.plain import check_function, check_module, rounded_once
from tests.support import randn

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("checkpoint_lvl", "dtype"), list(zip((0, 1, 2), DTYPES)))
def test_the_squared_relu_mlp_is_two_layers(checkpoint_lvl: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = FusedDenseSqreluDense(8, 12, 5, checkpoint_lvl=checkpoint_lvl, dtype=dtype)
    check_module(module, plain.two_layers(plain.squared_relu), randn(3, 8, dtype=dtype))
    assert FusedDenseSqreluDense(8).fc1.out_features == 32


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
def test_mixed_dtypes_follow_autocast_as_linear_layers_do(weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = FusedDenseSqreluDense(8, 12, 5, dtype=weight_dtype)
    x = randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module.fc2(F.relu(module.fc1(x)).square())
        assert torch.equal(module(x), expected) and expected.dtype == torch.bfloat16


# ops.activations


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_and_its_gradients_are_torchs(dtype: torch.dtype) -> None:
    x, y = 2 * randn(4, 3, 8, dtype=dtype), 2 * randn(4, 3, 8, seed=1, dtype=dtype)
    check_function(A.swiglu, rounded_once(lambda x, y: F.silu(x) * y), x, y, rounds_once=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_gelu_is_torchs_and_does_not_overflow_inside(dtype: torch.dtype) -> None:
    x, g = torch.tensor([-200.0, -3.0, -0.7, 0.0, 0.3, 2.0, 1000.0], dtype=dtype), randn(7, dtype=dtype)
    leaf = x.double().requires_grad_()
    (exact,) = torch.autograd.grad(plain.gelu_approx(leaf), leaf, g.double())
    torch.testing.assert_close(A.gelu_bwd(g, x).double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_relus_and_their_gradients() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.bfloat16)
    g = torch.tensor([1.0, 1.0, 0.5])
    out, grad = A.sqrelu_fwd(x), A.sqrelu_bwd(g, x)
    assert out.dtype == grad.dtype == torch.bfloat16
    assert out.tolist() == [0, 0, 9] and grad.tolist() == [0, 0, 3]
    grad = A.relu_bwd(torch.full((3,), 2.0), x)  # which passes at 0
    assert grad.dtype == torch.bfloat16 and grad.tolist() == [0, 2, 2]
