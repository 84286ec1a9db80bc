"""flash-attn's own Python layer, unbuilt, on our raw functions: FLASH_ATTN_SOURCE names a directory that holds it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import installed

SOURCE = os.environ.get("FLASH_ATTN_SOURCE")
pytestmark = pytest.mark.skipif(not SOURCE, reason="FLASH_ATTN_SOURCE does not name flash-attn's sources")


@pytest.fixture(autouse=True)
def official(monkeypatch):
    monkeypatch.syspath_prepend(SOURCE)
    with flash_attn_compat.patched():
        import flash_attn

        assert Path(flash_attn.__file__).is_relative_to(SOURCE) and installed.swapped()
        yield flash_attn
    assert "flash_attn" not in sys.modules


def with_gradients(function, *inputs, **options):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def assert_equal(got, expected):
    assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 0), "softcap": 3.0}], ids=str)
def test_dense_calls_and_gradients_equal_ours(official, calls, options):
    inputs = [torch.randn(2, 17, heads, 32) for heads in (4, 2, 2)]
    got = with_gradients(official.flash_attn_func, *inputs, **options)
    assert calls() > 0
    assert_equal(got, with_gradients(flash_attn_compat.flash_attn_func, *inputs, **options))


def test_packed_calls_with_an_empty_sequence_equal_ours(official):
    qkv, cu_seqlens = torch.randn(20, 3, 4, 32), torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    arguments = {"cu_seqlens": cu_seqlens, "max_seqlen": 13, "causal": True}
    got = with_gradients(official.flash_attn_varlen_qkvpacked_func, qkv, **arguments)
    assert_equal(got, with_gradients(flash_attn_compat.flash_attn_varlen_qkvpacked_func, qkv, **arguments))


def test_decoding_with_a_cache_equals_ours(official):
    q, k = torch.randn(2, 1, 4, 32), torch.randn(2, 1, 2, 32)
    cache = torch.randn(2, 32, 2, 32)
    lengths = torch.tensor([5, 7], dtype=torch.int32)

    def decode(function):
        caches = cache.clone(), cache.clone()
        return [function(q, *caches, k=k, v=k, cache_seqlens=lengths), *caches]

    assert_equal(decode(official.flash_attn_with_kvcache), decode(flash_attn_compat.flash_attn_with_kvcache))


def test_it_compiles_as_one_graph(official):
    inputs = [torch.randn(2, 17, 2, 32) for _ in range(3)]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: official.flash_attn_func(q, k, v, causal=True), fullgraph=True, backend="aot_eager"
    )
    assert_equal(
        with_gradients(compiled, *inputs), with_gradients(flash_attn_compat.flash_attn_func, *inputs, causal=True)
    )
