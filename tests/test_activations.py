"""Activations and their hand-written gradients against PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.ops import activations as A
from tests.plain import check_function
from tests.support import randn

# name: (function, the same by torch, what it takes)
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
    "swiglu": (A.swiglu, lambda x, y: F.silu(x) * y, [2 * randn(4, 3, 8), 2 * randn(4, 3, 8, seed=1)]),
    "bias_gelu_impl": (
        A.bias_gelu_impl, lambda x, b: F.gelu(x + b, approximate="tanh"), [2 * randn(4, 3, 8), 2 * randn(8)]
    ),
    "fast_gelu_impl": (A.fast_gelu_impl, lambda x: F.gelu(x, approximate="tanh"), [2 * randn(4, 3, 8)]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_torchs(name: str, dtype: torch.dtype) -> None:
    function, plain, given = FUNCTIONS[name]

    def upcast(*values: Tensor) -> Tensor:
        """Rounded once."""
        wide = torch.promote_types(values[0].dtype, torch.float32)
        return plain(*(value.to(wide) for value in values)).to(values[0].dtype)

    check_function(function, upcast, *(value.to(dtype) for value in given))


def test_half_precision_does_not_overflow_inside() -> None:
    x = torch.tensor([200.0, -200.0, 1000.0], dtype=torch.float16)
    assert torch.equal(A.gelu_fwd(x), torch.tensor([200.0, 0.0, 1000.0], dtype=torch.float16))
    assert torch.equal(A.gelu_bwd(torch.ones_like(x), x), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float16))


def test_the_plain_forward_and_backward_functions_agree_with_the_differentiable_ones() -> None:
    x, y = (value.clone().requires_grad_() for value in FUNCTIONS["swiglu"][2])
    g = torch.ones_like(x)
    assert torch.equal(A.swiglu_fwd(x, y), A.swiglu(x, y))
    for found, right in zip(A.swiglu_bwd(x, y, g), torch.autograd.grad(A.swiglu(x, y).sum(), (x, y)), strict=True):
        assert torch.equal(found, right)
    assert torch.equal(A.gelu_bwd(g, x), *torch.autograd.grad(A.fast_gelu_impl(x).sum(), x))


def test_relus_and_their_gradients() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.bfloat16)
    g = torch.tensor([1.0, 1.0, 0.5])
    out, grad = A.sqrelu_fwd(x), A.sqrelu_bwd(g, x)
    assert out.dtype == grad.dtype == torch.bfloat16
    assert out.tolist() == [0, 0, 9] and grad.tolist() == [0, 0, 3]
    grad = A.relu_bwd(torch.full((3,), 2.0), x)  # which passes at 0
    assert grad.dtype == torch.bfloat16 and grad.tolist() == [0, 2, 2]
