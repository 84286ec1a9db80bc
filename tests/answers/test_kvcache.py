"""Caches and pages in calls that are no verify problems, such as sinks; refusals are in test_rejections.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_compat.core.append import Append, by_operators
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.features import Feature
from tests.forms.inputs import STEP, cumulative, ints, qkv, randn
from tests.forms.plain import attention, attention_and_lse
from tests.forms.support import RecordingReference, close, on_backend, on_general_backends

# Of 3 rows and 3 new keys over caches of 32 keys.
ROTATED = replace(STEP, rotary_dim=16, poison="").build().args
PLAIN = replace(STEP, poison="").build().args


@on_general_backends
def test_more_cache_rows_than_queries_use_the_first_ones(backend: str) -> None:
    q, k, v = randn(2, 3, 4, 16), randn(4, 32, 2, 16, seed=1), randn(4, 32, 2, 16, seed=2)
    close(on_backend(backend, flash_attn_with_kvcache, q, k, v), flash_attn_func(q, k[:2], v[:2]))


def test_the_result_never_requires_grad() -> None:
    q, k, v = (x.requires_grad_(index == 0) for index, x in enumerate(qkv()))
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=5, return_softmax_lse=True)
    assert not out.requires_grad and not lse.requires_grad


# ---------------------------------------------------------------- new keys behind an int length


@pytest.mark.parametrize("appends", [False, True])
def test_an_int_length_is_a_dense_slice_of_the_cache_and_needs_no_tensor(
    asked: RecordingReference, appends: bool
) -> None:
    args = {**PLAIN, "cache_seqlens": 4, **({} if appends else {"k": None, "v": None})}
    flash_attn_with_kvcache(**args)
    (call,) = asked.computed
    assert call.is_dense and call.seqused_k is None and bool(call.use & Feature.APPEND) == appends
    assert call.k.data_ptr() == args["k_cache"].data_ptr()
    assert call.k.shape[1] == call.max_seqlen_k == (7 if appends else 4)
    assert [new and new.cache_seqlens for new in asked.appended] == [4 if appends else None]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("length", [30, 33, -1])
@pytest.mark.parametrize("page_size", [0, 8])
def test_an_int_length_that_does_not_fit_raises_on_every_device_before_anything_is_written(
    device: str, length: int, page_size: int
) -> None:
    call = replace(STEP, seqlens_k=(9, 9), lengths_as="int", page_size=page_size, poison="").build().to(device)
    before = [call.args[name].clone() for name in call.caches]
    with pytest.raises(RuntimeError, match=f"exceeds the capacity .* cache_seqlens is {length}"):
        flash_attn_with_kvcache(**call.args | {"cache_seqlens": length})
    if device == "cpu":
        assert all(torch.equal(call.args[name], x) for name, x in zip(call.caches, before))


def test_query_rows_beyond_the_rotary_table_are_not_rotated() -> None:
    """Three rows from position 31 on, of which the table of 32 holds one."""
    q, k_cache, v_cache, k, v = (ROTATED[name] for name in ("q", "k_cache", "v_cache", "k", "v"))
    call = AttentionCall(q, k_cache, v_cache, 1.0, mask=None, max_seqlen_q=3, max_seqlen_k=32)  # type: ignore[arg-type]
    turned = by_operators(call, Append(k[:, :1], v[:, :1], randn(32, 8).cos(), randn(32, 8).sin(), False, 31, True))
    assert torch.equal(turned[:, 1:], q[:, 1:]) and not torch.equal(turned[:, :1], q[:, :1])


# ---------------------------------------------------------------- attention sinks

SINKS = torch.tensor([-2.0, 0.0, 1.5, 6.0])
Q, K, V = qkv(sq=9, sk=5, h=4, hk=2)


def test_a_cache_row_without_keys_has_the_sink_as_its_lse() -> None:
    out, lse = flash_attn_with_kvcache(Q, K, V, cache_seqlens=ints(0, 5), return_softmax_lse=True, s_aux=SINKS)
    assert not out[0].any() and torch.equal(lse[0], SINKS[:, None].expand(-1, 9)) and out[1].any()


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
