"""Attention sinks against a softmax with one more column, dropped before the product with v.

What it computes, and every derivative, is in test_derivatives.py.
"""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.plain import attention, attention_and_lse
from tests.support import cumulative, ints, qkv, randn

SINKS = torch.tensor([-2.0, 0.0, 1.5, 6.0])
Q, K, V = qkv(sq=9, sk=5, h=4, hk=2)


def test_rows_without_keys_stay_zero() -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V, SINKS)]
    out, lse, _ = flash_attn_func(*leaves[:3], causal=True, return_attn_probs=True, s_aux=leaves[3])
    assert (out[:, :4] == 0).all() and torch.isposinf(lse[..., :4]).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_cache_is_read_with_sinks(return_lse: bool) -> None:
    caches = [torch.cat((x[:, :4], torch.zeros(2, 5, 2, 16)), 1) for x in (K, V)]
    found = flash_attn_with_kvcache(
        Q[:, :1], *caches, K[:, 4:], V[:, 4:], cache_seqlens=ints(4, 4), causal=True, return_softmax_lse=return_lse,
        s_aux=SINKS,
    )  # fmt: skip
    right = attention_and_lse(Q[:, :1], K, V, sinks=SINKS)
    torch.testing.assert_close(tuple(found) if return_lse else found, right if return_lse else right[0])


def test_pages_are_read_with_sinks_and_their_gradients_too() -> None:
    """Of a sequence without keys as well."""
    lengths_q, lengths_k, table = (1, 2, 1), (5, 3, 0), ints(1, 0, 1)[:, None]
    leaves = [randn(4, 4, 16).requires_grad_(), SINKS.clone().requires_grad_()]
    pages = randn(2, 256, 2, 16, seed=1), randn(2, 256, 2, 16, seed=2)
    starts = cumulative(*lengths_q), cumulative(*lengths_k)
    out = flash_attn_varlen_func(
        leaves[0], *pages, *starts, 2, 5, causal=True, block_table=table, s_aux=leaves[1]
    )  # fmt: skip
    each = [
        attention(rows[None], *(x[page, :length][None] for x in pages), window=(-1, 0), sinks=leaves[1])[0]
        for rows, page, length in zip(leaves[0].split(lengths_q), table[:, 0].tolist(), lengths_k)
    ]
    for found, right in zip(*([x, *torch.autograd.grad(x.sin().sum(), leaves)] for x in (out, torch.cat(each)))):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
