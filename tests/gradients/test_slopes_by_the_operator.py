"""Gradients of ALiBi slopes by the custom operator, under compilers and dispatch modes, in every family of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func
from tests.forms.inputs import cumulative, randn
from tests.forms.kinds import Operators

SLOPES = torch.tensor([0.3, 0.1, 0.2, 0.0])
OF_OPERATORS: dict[str, Callable[..., Any]] = {
    "dense": lambda q, k, v, slopes: flash_attn_func(q[None], k[None], v[None], alibi_slopes=slopes),
    "packed": lambda q, k, v, slopes: flash_attn_varlen_func(
        q, k, v, cumulative(3, 4), cumulative(6, 5), 4, 6, alibi_slopes=slopes
    ),
    "packed, one sequence": lambda q, k, v, slopes: flash_attn_varlen_func(
        q, k, v, cumulative(7), cumulative(11), 7, 11, causal=True, alibi_slopes=slopes
    ),
    "packed, equal lengths": lambda q, k, v, slopes: flash_attn_varlen_func(
        q, k[:7], v[:7], cumulative(3, 4), cumulative(3, 4), 4, 4, alibi_slopes=slopes
    ),
    "packed, a length of 0": lambda q, k, v, slopes: flash_attn_varlen_func(
        q, k, v, cumulative(3, 0, 4), cumulative(6, 0, 5), 4, 6, window_size=(2, 1), alibi_slopes=slopes
    ),
    "packed, tokens of no sequence": lambda q, k, v, slopes: flash_attn_varlen_func(
        q, k, v, cumulative(3, 2), cumulative(6, 2), 3, 6, alibi_slopes=slopes
    ),
    "qkv in one": lambda q, k, v, slopes: flash_attn_varlen_qkvpacked_func(
        torch.stack([k, k, v], 1), cumulative(6, 5), 6, alibi_slopes=slopes[:2]
    ),
    "pages": lambda q, k, v, slopes: flash_attn_varlen_func(
        q, k[:8].view(2, 4, 2, 8), v[:8].view(2, 4, 2, 8), cumulative(3, 4), cumulative(4, 3), 4, 4,
        alibi_slopes=slopes, block_table=torch.tensor([[1], [0]], dtype=torch.int32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("by", ["a dispatch mode", "torch.compile"])
@pytest.mark.parametrize("name", OF_OPERATORS)
def test_slopes_have_the_same_gradient_by_the_operator_as_by_an_eager_call(name: str, by: str) -> None:
    """The operator differentiates inside, where PyTorch has turned autograd off."""
    attend, (q, k, v) = OF_OPERATORS[name], (randn(n, h, 8, seed=h) for n, h in ((7, 4), (11, 2), (11, 2)))

    def gradients(function: Callable[..., Any], around: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, SLOPES)]
        with around:
            return torch.autograd.grad(function(*leaves).cos().sum(), leaves, allow_unused=True)

    is_compiled, eagerly = by == "torch.compile", contextlib.nullcontext()
    expected = gradients(attend, eagerly)
    assert expected[3].any()
    compiled = torch.compile(attend, backend="aot_eager") if is_compiled else attend
    for ours, right_one in zip(gradients(compiled, eagerly if is_compiled else Operators()), expected, strict=True):
        torch.testing.assert_close(ours, right_one, rtol=1e-5, atol=1e-5)
