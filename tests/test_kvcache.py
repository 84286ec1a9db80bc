"""flash_attn_with_kvcache, one promise per test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_with_kvcache
from flash_attn_compat.layers.rotary import apply_rotary_emb
from tests.support import close, on_backend, on_general_backends, randn


def cache(rows: int = 2, capacity: int = 32, hk: int = 2, d: int = 16) -> tuple[Tensor, Tensor]:
    return randn(rows, capacity, hk, d, seed=11), randn(rows, capacity, hk, d, seed=12)


def new(batch: int = 2, snew: int = 3, hk: int = 2, d: int = 16) -> tuple[Tensor, Tensor]:
    return randn(batch, snew, hk, d, seed=13), randn(batch, snew, hk, d, seed=14)


def queries(batch: int = 2, sq: int = 3, h: int = 4, d: int = 16) -> Tensor:
    return randn(batch, sq, h, d, seed=15)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def row(q: Tensor, k: Tensor, v: Tensor, b: int, start: int, stop: int, **kwargs: Any) -> Tensor:
    """The dense answer of row b over keys start to stop of cache row b."""
    return flash_attn_func(q[b : b + 1], k[b : b + 1, start:stop], v[b : b + 1, start:stop], **kwargs)[0]


# ---------------------------------------------------------------- lengths


@on_general_backends
def test_each_row_attends_its_own_number_of_keys(backend: str) -> None:
    q, (k, v) = queries(), cache()
    out = on_backend(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=ints(7, 20), causal=True)
    for b, length in enumerate((7, 20)):
        close(out[b], row(q, k, v, b, 0, length, causal=True))


@on_general_backends
def test_an_int_cache_seqlens_holds_for_every_row(backend: str) -> None:
    q, (k, v) = queries(), cache()
    assert torch.equal(
        on_backend(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=9),
        on_backend(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=ints(9, 9)),
    )


@on_general_backends
def test_an_int_cache_seqlens_counts_queries_rather_than_cache_rows(backend: str) -> None:
    q, (k, v) = queries(), cache(rows=5)
    out = on_backend(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=9, cache_batch_idx=ints(3, 1))
    close(out[1], row(q[1:], k[1:], v[1:], 0, 0, 9))


@on_general_backends
def test_without_cache_seqlens_the_whole_capacity_is_attended(backend: str) -> None:
    q, (k, v) = queries(), cache()
    close(on_backend(backend, flash_attn_with_kvcache, q, k, v), flash_attn_func(q, k, v))


@on_general_backends
def test_an_empty_row_gives_zero_and_plus_inf_lse(backend: str) -> None:
    q, (k, v) = queries(), cache()
    kwargs = dict(cache_seqlens=ints(0, 4), return_softmax_lse=True)
    out, lse = on_backend(backend, flash_attn_with_kvcache, q, k, v, **kwargs)
    assert not out[0].any() and (lse[0] == torch.inf).all() and lse[1].isfinite().all()


@on_general_backends
def test_keys_beyond_the_length_are_never_read(backend: str) -> None:
    q, (k, v) = queries(), cache()
    right = on_backend(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=ints(7, 20))
    k[0, 7:], v[0, 7:], k[1, 20:], v[1, 20:] = (torch.nan,) * 4
    assert torch.equal(on_backend(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=ints(7, 20)), right)


@on_general_backends
def test_more_cache_rows_than_queries_use_the_first_ones(backend: str) -> None:
    q, (k, v) = queries(), cache(rows=4)
    close(on_backend(backend, flash_attn_with_kvcache, q, k, v), flash_attn_func(q, k[:2], v[:2]))


@on_general_backends
def test_cache_leftpad_skips_the_first_keys_and_cache_seqlens_still_counts_them(backend: str) -> None:
    q, (k, v) = queries(), cache()
    k[1, :5], v[1, :5] = torch.nan, torch.nan
    kwargs = dict(cache_seqlens=ints(7, 20), cache_leftpad=ints(0, 5), causal=True)
    out = on_backend(backend, flash_attn_with_kvcache, q, k, v, **kwargs)
    close(out[0], row(q, k, v, 0, 0, 7, causal=True))
    close(out[1], row(q, k, v, 1, 5, 20, causal=True))


@on_general_backends
def test_cache_batch_idx_picks_the_cache_rows(backend: str) -> None:
    q, (k, v) = queries(), cache(rows=4)
    out = on_backend(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=ints(7, 20), cache_batch_idx=ints(3, 0))
    close(out[0], row(q, k[3:], v[3:], 0, 0, 7))
    close(out[1], row(q[1:], k, v, 0, 0, 20))


# ---------------------------------------------------------------- appending


@on_general_backends
def test_new_keys_and_values_are_written_in_place_bit_for_bit(backend: str) -> None:
    q, (k, v), (k_new, v_new) = queries(), cache(), new()
    k_was, v_was = k.clone(), v.clone()
    out = on_backend(backend, flash_attn_with_kvcache, q, k, v, k_new, v_new, cache_seqlens=ints(7, 20), causal=True)
    for b, at in enumerate((7, 20)):
        k_was[b, at : at + 3], v_was[b, at : at + 3] = k_new[b], v_new[b]
        close(out[b], row(q, k_was, v_was, b, 0, at + 3, causal=True))
    assert torch.equal(k, k_was) and torch.equal(v, v_was)


@on_general_backends
def test_cache_seqlens_is_not_updated(backend: str) -> None:
    q, (k, v), lengths = queries(), cache(), ints(7, 20)
    on_backend(backend, flash_attn_with_kvcache, q, k, v, *new(), cache_seqlens=lengths)
    assert lengths.tolist() == [7, 20]


@on_general_backends
@pytest.mark.parametrize("snew", [1, 5])
def test_with_another_number_of_new_keys_the_mask_is_still_bottom_right(backend: str, snew: int) -> None:
    q, (k, v) = queries(sq=3), cache()
    out = on_backend(backend, flash_attn_with_kvcache, q, k, v, *new(snew=snew), cache_seqlens=ints(7, 20), causal=True)
    for b, at in enumerate((7, 20)):
        close(out[b], row(q, k, v, b, 0, at + snew, causal=True))


@on_general_backends
def test_new_keys_go_to_the_rows_of_cache_batch_idx_and_nowhere_else(backend: str) -> None:
    q, (k, v), (k_new, v_new) = queries(), cache(rows=4), new()
    k_was = k.clone()
    kwargs = dict(cache_seqlens=ints(7, 20), cache_batch_idx=ints(3, 0))
    on_backend(backend, flash_attn_with_kvcache, q, k, v, k_new, v_new, **kwargs)
    k_was[3, 7:10], k_was[0, 20:23] = k_new[0], k_new[1]
    assert torch.equal(k, k_was)


@on_general_backends
def test_new_keys_left_of_every_window_are_written_too(backend: str) -> None:
    q, (k, v), (k_new, v_new) = queries(sq=1), cache(), new(snew=12)
    on_backend(
        backend,
        flash_attn_with_kvcache,
        q,
        k,
        v,
        k_new,
        v_new,
        cache_seqlens=ints(7, 20),
        causal=True,
        window_size=(2, 0),
    )
    assert torch.equal(k[0, 7:19], k_new[0]) and torch.equal(v[1, 20:32], v_new[1])


@on_general_backends
def test_strided_caches_are_written_through_their_strides(backend: str) -> None:
    both = torch.stack(cache(), 2)
    q, (k_new, v_new) = queries(), new()
    on_backend(
        backend, flash_attn_with_kvcache, q, both[:, :, 0], both[:, :, 1], k_new, v_new, cache_seqlens=ints(7, 20)
    )
    assert torch.equal(both[0, 7:10, 0], k_new[0]) and torch.equal(both[1, 20:23, 1], v_new[1])


def test_an_append_beyond_the_capacity_raises_before_anything_is_written() -> None:
    q, (k, v) = queries(), cache()
    k_was = k.clone()
    with pytest.raises(RuntimeError):
        flash_attn_with_kvcache(q, k, v, *new(), cache_seqlens=ints(7, 30))
    assert torch.equal(k, k_was)


# ---------------------------------------------------------------- pages


def pages(k: Tensor, v: Tensor, page: int, spare: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Page pools with the rows of contiguous caches in shuffled pages, and the table that finds them."""
    rows, capacity = k.shape[:2]
    columns = capacity // page
    order = torch.randperm(rows * columns + spare, generator=torch.Generator().manual_seed(0))[: rows * columns]
    pools = []
    for x in (k, v):
        pool = x.new_full((rows * columns + spare, page, *x.shape[2:]), torch.nan)
        pool[order] = x.unflatten(1, (columns, page)).flatten(0, 1)
        pools.append(pool)
    return pools[0], pools[1], order.view(rows, columns).to(torch.int32)


@on_general_backends
@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_paged_cache_answers_and_appends_like_a_contiguous_one(backend: str, page: int) -> None:
    q, (k, v), fresh = queries(), cache(), new(snew=6)
    k_pool, v_pool, table = pages(k, v, page)
    kwargs = dict(cache_seqlens=ints(7, 20), causal=True)
    right = on_backend(backend, flash_attn_with_kvcache, q, k, v, *fresh, **kwargs)
    close(on_backend(backend, flash_attn_with_kvcache, q, k_pool, v_pool, *fresh, block_table=table, **kwargs), right)
    for pool, contiguous in ((k_pool, k), (v_pool, v)):
        assert torch.equal(pool[table.long()].flatten(1, 2), contiguous)


@on_general_backends
def test_without_cache_seqlens_all_pages_of_the_table_are_attended(backend: str) -> None:
    q, (k, v) = queries(), cache()
    k_pool, v_pool, table = pages(k, v, 8)
    close(on_backend(backend, flash_attn_with_kvcache, q, k_pool, v_pool, block_table=table), flash_attn_func(q, k, v))


def test_a_paged_append_beyond_the_table_names_block_table_and_writes_nothing() -> None:
    q, (k, v) = queries(), cache()
    k_pool, v_pool, table = pages(k, v, 8)
    was = k_pool.clone()
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn_with_kvcache(q, k_pool, v_pool, *new(), cache_seqlens=ints(7, 30), block_table=table)
    assert torch.equal(k_pool.nan_to_num(), was.nan_to_num())


def test_pages_with_cache_batch_idx_are_rejected() -> None:
    k_pool, v_pool, table = pages(*cache(), 8)
    with pytest.raises(RuntimeError, match="Paged KVcache does not support cache_batch_idx"):
        flash_attn_with_kvcache(queries(), k_pool, v_pool, block_table=table, cache_batch_idx=ints(1, 0))


def test_pages_with_cache_leftpad_are_rejected() -> None:
    k_pool, v_pool, table = pages(*cache(), 8)
    with pytest.raises(RuntimeError, match="Paged KV and leftpad_k"):
        flash_attn_with_kvcache(queries(), k_pool, v_pool, cache_seqlens=9, block_table=table, cache_leftpad=ints(1, 0))


# ---------------------------------------------------------------- rotary


def tables(positions: int = 40, dim: int = 16) -> tuple[Tensor, Tensor]:
    angles = randn(positions, dim // 2, seed=16) * 3
    return angles.cos(), angles.sin()


def _rotated(
    q: Tensor, k: Tensor, starts: Tensor, q_constant: bool, interleaved: bool, dim: int
) -> tuple[Tensor, Tensor]:
    cos, sin = tables(dim=dim)
    k = apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=starts)
    if not q_constant:
        return apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=starts), k
    rows = [apply_rotary_emb(q[:, i : i + 1], cos, sin, interleaved, seqlen_offsets=starts) for i in range(q.shape[1])]
    return torch.cat(rows, 1), k


@on_general_backends
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize(
    ("kwargs", "q_constant"),
    [
        (dict(causal=True), False),
        (dict(window_size=(5, 1)), False),
        (dict(window_size=(-1, 0)), False),
        (dict(window_size=(5, -1)), False),
        ({}, True),
        (dict(window_size=(32, 99)), True),
    ],
)
def test_rotary_turns_new_keys_by_their_slot_and_queries_by_their_row_if_anything_is_masked(
    backend: str, interleaved: bool, dim: int, kwargs: Any, q_constant: bool
) -> None:
    q, (k, v), (k_new, v_new) = queries(d=32), cache(d=32), new(d=32)
    q_was, starts = q.clone(), ints(7, 20)
    q_turned, k_turned = _rotated(q, k_new, starts, q_constant, interleaved, dim)
    cos, sin = tables(dim=dim)
    arguments = dict(rotary_cos=cos, rotary_sin=sin, cache_seqlens=starts, rotary_interleaved=interleaved, **kwargs)
    out = on_backend(backend, flash_attn_with_kvcache, q, k, v, k_new, v_new, **arguments)
    for b, at in enumerate((7, 20)):
        close(k[b, at : at + 3], k_turned[b], 4)
        assert torch.equal(v[b, at : at + 3], v_new[b])
        close(out[b], row(q_turned, k, v, b, 0, at + 3, **kwargs), 4)
    assert torch.equal(q, q_was)


def test_rotary_is_interleaved_by_default() -> None:
    cos, sin = tables()
    caches = []
    for kwargs in ({}, dict(rotary_interleaved=True)):
        k, v = cache()
        flash_attn_with_kvcache(queries(), k, v, *new(), rotary_cos=cos, rotary_sin=sin, cache_seqlens=7, **kwargs)
        caches.append(k)
    assert torch.equal(*caches)


@on_general_backends
def test_rotary_positions_do_not_depend_on_leftpad(backend: str) -> None:
    cos, sin = tables()
    keys = []
    for leftpad in (None, ints(2, 6)):
        k, v = cache()
        kwargs = dict(rotary_cos=cos, rotary_sin=sin, cache_seqlens=ints(7, 20), cache_leftpad=leftpad, causal=True)
        on_backend(backend, flash_attn_with_kvcache, queries(), k, v, *new(), **kwargs)
        keys.append(k)
    assert torch.equal(*keys)


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
    call = dict(
        q=queries(),
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=ints(7, 20),
    )
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


# ---------------------------------------------------------------- results


@on_general_backends
def test_the_lse_is_returned_on_request(backend: str) -> None:
    q, (k, v) = queries(), cache()
    _, lse = on_backend(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=9, return_softmax_lse=True)
    _, right, _ = flash_attn_func(q, k[:, :9], v[:, :9], return_attn_probs=True)
    assert lse.shape == (2, 4, 3) and lse.dtype == torch.float32
    close(lse, right)
    assert isinstance(on_backend(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=9), Tensor)


@pytest.mark.parametrize("num_splits", [0, 1, 3, 128])
def test_num_splits_changes_nothing(num_splits: int) -> None:
    q, (k, v) = queries(sq=1), cache()
    close(flash_attn_with_kvcache(q, k, v, num_splits=num_splits), flash_attn_func(q, k, v))


def test_the_result_never_requires_grad() -> None:
    q, (k, v) = queries().requires_grad_(), cache()
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=9, return_softmax_lse=True)
    assert not out.requires_grad and not lse.requires_grad


@on_general_backends
def test_alibi_slopes_by_batch_belong_to_the_query_rows(backend: str) -> None:
    q, (k, v) = queries(), cache(rows=3)
    slopes = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 2.0, 0.5]])
    kwargs = dict(cache_seqlens=ints(7, 20), cache_batch_idx=ints(2, 0), alibi_slopes=slopes)
    out = on_backend(backend, flash_attn_with_kvcache, q, k, v, **kwargs)
    close(out[0], row(q, k[2:], v[2:], 0, 0, 7, alibi_slopes=slopes[:1]))
    close(out[1], row(q[1:], k, v, 0, 0, 20, alibi_slopes=slopes[1:]))


@on_general_backends
@pytest.mark.parametrize("kwargs", [{}, dict(window_size=(9, -1)), dict(softcap=3.0), dict(causal=True)])
def test_decoding_one_row_of_many_heads(backend: str, kwargs: Any) -> None:
    q, (k, v) = queries(sq=1, h=8), cache(capacity=700, hk=1)
    out = on_backend(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=ints(650, 700), **kwargs)
    for b, length in enumerate((650, 700)):
        close(out[b], row(q, k, v, b, 0, length, **kwargs))
