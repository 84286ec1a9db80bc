"""flash_attn_with_kvcache: what it refuses, before anything is written, and what is not a problem for the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_with_kvcache
from tests.support import close, on_backend, on_general_backends, randn


def cache(rows: int = 2, capacity: int = 32, hk: int = 2, d: int = 16) -> tuple[Tensor, Tensor]:
    return randn(rows, capacity, hk, d, seed=11), randn(rows, capacity, hk, d, seed=12)


def new(batch: int = 2, snew: int = 3, hk: int = 2, d: int = 16) -> tuple[Tensor, Tensor]:
    return randn(batch, snew, hk, d, seed=13), randn(batch, snew, hk, d, seed=14)


def queries(batch: int = 2, sq: int = 3, h: int = 4, d: int = 16) -> Tensor:
    return randn(batch, sq, h, d, seed=15)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@on_general_backends
def test_more_cache_rows_than_queries_use_the_first_ones(backend: str) -> None:
    q, (k, v) = queries(), cache(rows=4)
    close(on_backend(backend, flash_attn_with_kvcache, q, k, v), flash_attn_func(q, k[:2], v[:2]))


def test_an_append_beyond_the_capacity_raises_before_anything_is_written() -> None:
    q, (k, v) = queries(), cache()
    k_was = k.clone()
    with pytest.raises(RuntimeError):
        flash_attn_with_kvcache(q, k, v, *new(), cache_seqlens=ints(7, 30))
    assert torch.equal(k, k_was)


def test_a_paged_append_beyond_the_table_names_block_table_and_writes_nothing() -> None:
    q, (k, v) = queries(), cache()
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    k_pool, v_pool = (x.reshape(8, 8, 2, 16) for x in (k, v))
    was = k_pool.clone()
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn_with_kvcache(q, k_pool, v_pool, *new(), cache_seqlens=ints(7, 30), block_table=table)
    assert torch.equal(k_pool, was)


def tables(positions: int = 40, dim: int = 16) -> tuple[Tensor, Tensor]:
    angles = randn(positions, dim // 2, seed=16) * 3
    return angles.cos(), angles.sin()


def test_rotary_is_interleaved_by_default() -> None:
    cos, sin = tables()
    caches = []
    for kwargs in ({}, dict(rotary_interleaved=True)):
        k, v = cache()
        flash_attn_with_kvcache(queries(), k, v, *new(), rotary_cos=cos, rotary_sin=sin, cache_seqlens=7, **kwargs)
        caches.append(k)
    assert torch.equal(*caches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=None, v=None), "new key / value to be appended to KV cache must also be provided"),
        (dict(v=None), "If key is supplied, value must also be passed in"),
        (dict(cache_seqlens=None), "If key is supplied, seqlens_k must also be passed in"),
        (dict(rotary_sin=None), "If rotary cos is provided, rotary sin must also be provided"),
        (dict(rotary_cos=randn(40, 6), rotary_sin=randn(40, 6)), "rotary dimensions divisible by 16"),
        (dict(rotary_cos=randn(40, 16), rotary_sin=randn(40, 16)), "rotary_dim must be <= headdim"),
        (
            dict(rotary_cos=randn(31, 8), rotary_sin=randn(31, 8)),
            "cos/sin seqlen must be at least the seqlen of KV cache",
        ),
        (dict(rotary_cos=randn(40, 8).half(), rotary_sin=randn(40, 8).half()), "must have the same dtype as query"),
        (dict(cache_seqlens=torch.tensor([7, 20])), "seqlens_k must have dtype int32"),
        (dict(cache_leftpad=torch.tensor([1, 2])), "leftpad_k must have dtype int32"),
        (dict(cache_batch_idx=torch.tensor([1, 0])), "cache_batch_idx must have dtype int32"),
        (dict(k=new()[0].half()), "Key must have the same dtype as query"),
        (dict(v=new()[1].half()), "Value must have the same dtype as query"),
        (dict(num_splits=129), "num_splits > 128 not supported"),
    ],
)
def test_a_malformed_call_is_rejected_before_anything_is_written(change: dict[str, Any], message: str) -> None:
    (k_cache, v_cache), (k, v), (cos, sin) = cache(), new(), tables()
    before = k_cache.clone(), v_cache.clone()
    given = dict(q=queries(), k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=cos, rotary_sin=sin)
    call = given | dict(cache_seqlens=ints(7, 20))
    with pytest.raises(RuntimeError, match=message):
        flash_attn_with_kvcache(**call | change)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_with_a_strided_last_dimension_is_an_assertion_error(name: str) -> None:
    k, v = cache()
    caches = dict(k_cache=k, v_cache=v)
    caches[name] = torch.stack([k, k], -1)[..., 0]
    with pytest.raises(AssertionError, match=f"{name} must have contiguous last dimension"):
        flash_attn_with_kvcache(queries(), **caches)


def test_the_result_never_requires_grad() -> None:
    q, (k, v) = queries().requires_grad_(), cache()
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=9, return_softmax_lse=True)
    assert not out.requires_grad and not lse.requires_grad
