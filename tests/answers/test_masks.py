"""The form of results, and rows without keys, which the oracle does not check."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat import flash_attn_func, use_backend
from flash_attn_compat.flash_attn_interface import _flash_attn_varlen_forward
from tests.forms.inputs import cumulative, qkv, randn
from tests.forms.support import on_backend, on_general_backends


@on_general_backends
@pytest.mark.parametrize("d", [16, 20])
def test_the_output_is_contiguous_so_that_heads_can_be_viewed_as_one_dimension(backend: str, d: int) -> None:
    q, k, v = torch.stack(qkv(d=d), 2).unbind(2)
    assert on_backend(backend, flash_attn_func, q, k, v).view(2, 7, 2 * d).shape == (2, 7, 2 * d)


def test_zero_tensors_marks_tokens_outside_every_sequence_with_minus_inf_lse() -> None:
    q, k = randn(7, 2, 16), randn(10, 2, 16)
    out, lse, _, _ = _flash_attn_varlen_forward(
        q, k, k, cumulative(3, 2), cumulative(4, 4), 3, 4, 0.0, 0.25, False, zero_tensors=True
    )
    assert not out[5:].any() and (lse[:, 5:] == -torch.inf).all() and lse[:, :5].isfinite().all()


def test_zero_tensors_finds_no_token_where_there_is_none() -> None:
    q, k = randn(0, 2, 16), randn(10, 2, 16)
    out, lse, _, _ = _flash_attn_varlen_forward(
        q, k, k, cumulative(0, 0), cumulative(4, 4), 0, 4, 0.0, 0.25, False, zero_tensors=True
    )
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0)


@on_general_backends
def test_a_scale_that_is_no_number_gives_none(backend: str) -> None:
    leaves = [tensor.requires_grad_() for tensor in qkv(sq=40, sk=40)]
    out = on_backend(backend, flash_attn_func, *leaves, softmax_scale=torch.nan)
    found = out, *torch.autograd.grad(out.sum(), leaves[:2])
    assert all(bool(x.isnan().all()) for x in found)


def test_a_row_whose_scores_are_all_minus_infinity_is_one_without_keys_to_chunked() -> None:
    q, k = torch.full((1, 3, 1, 8), 1e20), torch.full((1, 20_000, 1, 8), -1e20)  # more keys than a tile has
    leaves = [tensor.bfloat16().requires_grad_() for tensor in (q, k, torch.ones_like(k))]
    with use_backend("chunked"):
        out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True)
        gradients = torch.autograd.grad(out.sum(), leaves)
    assert not out.any() and bool((lse == torch.inf).all()) and not any(gradient.any() for gradient in gradients)
