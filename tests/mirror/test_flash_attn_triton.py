"""Attention with a bias against the softmax of scores plus bias written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_triton
from flash_attn_compat.flash_attn_triton import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from tests.forms.inputs import randn
from tests.forms.plain import attention, check_function, pairwise

B, H, D = 2, 3, 16


def plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False, scale: Any = None
) -> Tensor:
    """Causal from the first row and key on."""
    above = torch.full((q.shape[1], k.shape[1]), -torch.inf if causal else 0.0, dtype=torch.float64).triu(1)
    return attention(q, k, v, scale=scale, bias=above.to(q.dtype) if bias is None else bias + above.to(bias.dtype))


@pytest.mark.parametrize(
    ("dtype", "causal", "rows", "shape", "bias_dtype", "block"),
    pairwise(
        (torch.float32, torch.float16, torch.bfloat16), (False, True), (False, True),
        (None, (1, H), (B, 1), (B, H)), (None, torch.float32), (256, 3),
    ),
)  # fmt: skip
def test_the_bias_is_added_to_the_scores(
    dtype: torch.dtype, causal: bool, rows: bool, shape: Any, bias_dtype: Any, block: int, monkeypatch: Any
) -> None:
    """All gradients, the bias's too; a fp32 bias of half inputs is used as it is. Blocks that hold all and that cut."""
    monkeypatch.setattr(flash_attn_triton, "_ROWS", block)
    for seqlen_q, seqlen_k in ((7, 7), (4, 9), (9, 4), (1, 6)):
        q, k, v = (randn(B, n, H, D, seed=s, dtype=dtype) for s, n in enumerate((seqlen_q, seqlen_k, seqlen_k)))
        bias = None
        if shape is not None:
            bias = 3 * randn(*shape, seqlen_q if rows else 1, seqlen_k, seed=5, dtype=bias_dtype or dtype)
        check_function(
            lambda *given: flash_attn_func(*given, causal), lambda *given: plain(*given, causal), q, k, v, bias
        )


def test_a_large_fp32_bias_is_not_rounded_to_half() -> None:
    q, k, v = (torch.zeros(1, 4, 1, D, dtype=torch.float16) for _ in range(3))
    v[0, :, 0, 0] = torch.arange(4.0)
    bias = torch.tensor([4096.0, 4096.5, 4097.0, 4097.5]).view(1, 1, 1, 4)  # fp16 has steps of 4 there
    expected = (bias.flatten().double().softmax(-1) * torch.arange(4.0)).sum()
    torch.testing.assert_close(
        flash_attn_func(q, k, v, bias)[0, :, 0, 0].double(), expected.expand(4), rtol=1e-3, atol=0
    )


def test_packed_forms_take_q_k_and_v_from_their_places() -> None:
    q, k, v = (randn(B, 5, H, D, seed=s) for s in range(3))
    bias = randn(1, H, 1, 5)
    expected = flash_attn_func(q, k, v, bias, True, 0.3)
    torch.testing.assert_close(expected, plain(q, k, v, bias, True, 0.3), rtol=1e-5, atol=1e-6)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack((k, v), dim=2), bias, True, 0.3), expected)
    assert torch.equal(flash_attn_qkvpacked_func(torch.stack((q, k, v), dim=2), bias, True, 0.3), expected)


def test_autocast_rounds_nothing() -> None:
    q, k, v = (randn(B, 5, H, D, seed=s).requires_grad_() for s in range(3))
    expected = flash_attn_func(q, k, v)
    expected_grads = torch.autograd.grad(expected.sum(), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(q, k, v)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    for ours, right in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert torch.equal(ours, right)
