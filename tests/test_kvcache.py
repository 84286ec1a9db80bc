"""flash_attn_with_kvcache: what it refuses, before anything is written, and what is not a problem for the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_with_kvcache
from flash_attn_compat.engine.append import Append, by_operators
from flash_attn_compat.engine.call import AttentionCall
from tests.support import Asked, close, on_backend, on_general_backends, qkv, randn


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


def tables(positions: int = 40, dim: int = 16) -> tuple[Tensor, Tensor]:
    angles = randn(positions, dim // 2, seed=16) * 3
    return angles.cos(), angles.sin()


def strided(tensor: Tensor) -> Tensor:
    """The same with channels apart."""
    return torch.stack([tensor, tensor], -1)[..., 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rotary_sin=None), "If rotary cos is provided, rotary sin must also be provided"),
        (dict(rotary_cos=randn(40, 6), rotary_sin=randn(40, 6)), "rotary dimensions divisible by 16"),
        (dict(rotary_cos=randn(40, 16), rotary_sin=randn(40, 16)), "rotary_dim must be <= headdim"),
        (dict(rotary_cos=randn(40, 8).half(), rotary_sin=randn(40, 8).half()), "must have the same dtype as query"),
        (dict(cache_leftpad=torch.tensor([1, 2])), "leftpad_k must have dtype int32"),
        (dict(cache_batch_idx=torch.tensor([1, 0])), "cache_batch_idx must have dtype int32"),
        (dict(k=new()[0].half()), "Key must have the same dtype as query"),
        (dict(v=new()[1].half()), "Value must have the same dtype as query"),
        (dict(num_splits=129), "num_splits > 128 not supported"),
        (dict(cache_seqlens=ints(7, 30)), "exceeds the capacity"),
        (dict(cache_seqlens=ints(7, 30), block_table=ints(0, 1).view(2, 1)), "capacity addressable by block_table"),
        (dict(k_cache=strided(cache()[0])), "k_cache must have contiguous last dimension"),
        (dict(v_cache=strided(cache()[1])), "v_cache must have contiguous last dimension"),
    ],
)
def test_a_malformed_call_is_rejected_before_anything_is_written(change: dict[str, Any], message: str) -> None:
    (k_cache, v_cache), (k, v), (cos, sin) = cache(), new(), tables()
    given = dict(q=queries(), k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=cos, rotary_sin=sin)
    call = given | dict(cache_seqlens=ints(7, 20)) | change
    before = call["k_cache"].clone(), call["v_cache"].clone()
    # flash-attn asserts what its Python function looks at itself.
    with pytest.raises(AssertionError if "contiguous" in message else RuntimeError, match=message):
        flash_attn_with_kvcache(**call)
    assert torch.equal(call["k_cache"], before[0]) and torch.equal(call["v_cache"], before[1])


def test_the_result_never_requires_grad() -> None:
    q, (k, v) = queries().requires_grad_(), cache()
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=9, return_softmax_lse=True)
    assert not out.requires_grad and not lse.requires_grad


# ---------------------------------------------------------------- new keys behind an int length

CAPACITY = 20


def caches() -> tuple[Tensor, Tensor]:
    return randn(2, CAPACITY, 2, 16, seed=5), randn(2, CAPACITY, 2, 16, seed=6)


@pytest.mark.parametrize("seqlen_new", [0, 3])
def test_an_int_length_is_a_dense_slice_of_the_cache_and_needs_no_tensor(asked: Asked, seqlen_new: int) -> None:
    (q, k, v), (k_cache, v_cache) = qkv(sq=3, sk=3), caches()
    new = (k, v) if seqlen_new else ()
    flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=4, causal=True)
    (call,) = asked.computed
    assert call.is_dense and call.seqused_k is None and call.appends == bool(seqlen_new)
    assert call.k.data_ptr() == k_cache.data_ptr() and call.k.shape[1] == call.max_seqlen_k == 4 + seqlen_new
    assert [new and new.cache_seqlens for new in asked.appended] == [4 if seqlen_new else None]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("length", [18, 21, -1])
@pytest.mark.parametrize("paged", [False, True])
def test_an_int_length_that_does_not_fit_raises_on_every_device_before_anything_is_written(
    device: str, length: int, paged: bool
) -> None:
    (q, k, v), cached = qkv(sq=3, sk=3), caches()
    table = dict(block_table=torch.arange(8, dtype=torch.int32, device=device).view(2, 4)) if paged else {}
    if paged:
        cached = tuple(cache.view(8, 5, 2, 16) for cache in cached)
    before = [cache.clone() for cache in cached]
    q, k, v, k_cache, v_cache = (x.to(device) for x in (q, k, v, *cached))
    with pytest.raises(RuntimeError, match=f"exceeds the capacity .* cache_seqlens is {length}"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=length, **table)
    if device == "cpu":
        assert all(map(torch.equal, (k_cache, v_cache), before))


def test_rows_of_q_behind_the_rotary_table_stay_as_they_are() -> None:
    """Five rows from position 17 on, of which the table of 20 holds three."""
    q, k, v = qkv(sq=5, sk=3)
    angles, (k_cache, v_cache) = randn(CAPACITY, 8), caches()
    call = AttentionCall(q, k_cache, v_cache, 1.0, mask=None, max_seqlen_q=5, max_seqlen_k=CAPACITY)  # type: ignore[arg-type]
    turned = by_operators(call, Append(k, v, angles.cos(), angles.sin(), False, 17, True))
    assert torch.equal(turned[:, 3:], q[:, 3:]) and not torch.equal(turned[:, :3], q[:, :3])
