"""The normal form of windows: a bound that hides nothing is no bound, in every kind of call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attn_compat import explain, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_compat.engine.build import Cache, Options, Packing, cache_call, dense_call, packed_call
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.mask import MOST_TOKENS, Mask
from tests.support import close, cumulative, on_backend, on_general_backends, qkv

SEQLEN_K = 12


def _dense(options: Options, sq: int = 5) -> AttentionCall:
    return dense_call(*qkv(sq=sq, sk=SEQLEN_K), options)


def _packed(options: Options, sq: int = 5) -> AttentionCall:
    q, k, v = (x.flatten(0, 1) for x in qkv(sq=sq, sk=SEQLEN_K))
    starts = cumulative(sq, sq), cumulative(SEQLEN_K, SEQLEN_K)
    return packed_call(q, k, v, Packing(*starts, sq, SEQLEN_K), options)


def _cached(options: Options, sq: int = 5, cache_seqlens: Any = 9) -> AttentionCall:
    return cache_call(*qkv(sq=sq, sk=SEQLEN_K), Cache(cache_seqlens, 0, None, None, None), options)


def _cached_with_a_tensor(options: Options, sq: int = 5) -> AttentionCall:
    return _cached(options, sq, torch.tensor([9, 3], dtype=torch.int32))


BUILDERS = [_dense, _packed, _cached, _cached_with_a_tensor]
Builder = Callable[..., AttentionCall]
# (causal, window_size, the mask it is over 12 keys and 5 rows)
FORMS = [
    (False, (-1, -1), Mask()),
    (False, (-7, -2), Mask()),
    (True, (-1, -1), Mask(None, 0)),
    (True, (12, 0), Mask(None, 0)),
    (True, (4096, 4096), Mask(None, 0)),
    (True, (2**32, -1), Mask(None, 0)),
    (True, (11, 3), Mask(11, 0)),
    (False, (12, 12), Mask()),
    (False, (2**31, 2**63), Mask()),
    (False, (2**32, 3), Mask(None, 3)),
    (False, (3, 2**32), Mask(3, None)),
    (False, (-1, 0), Mask(None, 0)),
    (False, (11, 11), Mask(11, 11)),
]


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize(("causal", "window_size", "mask"), FORMS)
def test_a_bound_from_the_keys_on_is_none_in_every_kind_of_call(
    build: Builder, causal: bool, window_size: tuple[int, int], mask: Mask
) -> None:
    assert build(Options(causal=causal, window_size=window_size)).mask == mask


@pytest.mark.parametrize("build", BUILDERS)
def test_a_right_bound_beyond_the_keys_still_hides_keys_from_rows_far_before_the_first(build: Builder) -> None:
    assert build(Options(window_size=(-1, 15)), sq=18).mask == Mask(None, 15)
    assert build(Options(window_size=(-1, 17)), sq=18).mask == Mask()


@pytest.mark.parametrize("bound", [2**31 - 1, 2**32, 2**62])
def test_no_bound_is_ever_larger_than_kernels_can_add_to_a_position(bound: int) -> None:
    q, k, v = (x.flatten(0, 1) for x in qkv())
    starts = cumulative(7, 7)
    call = packed_call(q, k, v, Packing(starts, starts, 7, MOST_TOKENS), Options(window_size=(bound, bound)))
    assert call.mask == Mask()


def _calls(kind: str) -> tuple[Any, tuple[Any, ...]]:
    q, k, v = qkv(sq=40, sk=40)
    if kind == "dense":
        return flash_attn_func, (q, k, v)
    if kind == "packed":
        starts = cumulative(40, 40)
        return flash_attn_varlen_func, (*(x.flatten(0, 1) for x in (q, k, v)), starts, starts, 40, 40)
    return flash_attn_with_kvcache, (q, k, v)


@pytest.mark.parametrize("kind", ["dense", "packed", "cache"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, dict(softcap=3.0), dict(alibi_slopes=torch.tensor([0.5, 0.25]))])
def test_an_idle_window_takes_the_path_of_the_call_without_it(kind: str, causal: bool, options: Any) -> None:
    fn, args = _calls(kind)
    idle = explain(fn, *args, causal=causal, window_size=(4096, 4096), **options)
    assert idle == explain(fn, *args, causal=causal, **options)


@on_general_backends
@pytest.mark.parametrize("length", [7, torch.tensor([7, 7], dtype=torch.int32)], ids=["int", "tensor"])
@pytest.mark.parametrize("left", [6, 7, 8, 11, 12, 13])
def test_the_lse_of_alibi_over_a_cache_knows_the_windows_the_capacity_makes_idle(
    backend: str, left: int, length: Any
) -> None:
    q, k, v = qkv(sq=3, sk=SEQLEN_K)
    slopes = torch.tensor([0.5, 0.25])
    _, true_lse, _ = flash_attn_func(q, k[:, :7], v[:, :7], window_size=(7 - 1, 0), alibi_slopes=slopes,
                                     return_attn_probs=True)  # fmt: skip
    _, lse = on_backend(
        backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=length, causal=True, window_size=(left, -1),
        alibi_slopes=slopes, return_softmax_lse=True,
    )  # fmt: skip
    shift = slopes[:, None] * torch.arange(4, 7) if left >= SEQLEN_K else 0.0
    close(lse, true_lse + shift)
