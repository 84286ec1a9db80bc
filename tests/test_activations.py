"""Activations and their hand-written gradients against PyTorch's, and the layers of a squared relu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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
