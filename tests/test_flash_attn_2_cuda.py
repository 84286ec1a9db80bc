"""The raw extension's functions by position: they are the private functions, in place where asked."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_2_cuda as raw
from flash_attn_compat.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    flash_attn_with_kvcache,
)
from tests.support import randn

B, SQ, SK, H, HK, D = 2, 5, 7, 4, 2, 16
SCALE, SOFTCAP = 0.2, 0.0
WINDOW = (4, 0)


Q, K, V = randn(B, SQ, H, D), randn(B, SK, HK, D, seed=1), randn(B, SK, HK, D, seed=2)
SLOPES = torch.linspace(0.1, 0.4, H)
CU_Q, CU_K = torch.tensor([0, 3, 10], dtype=torch.int32), torch.tensor([0, 7, 14], dtype=torch.int32)
PACKED = (Q.flatten(0, 1), K.flatten(0, 1), V.flatten(0, 1))


def same(actual: Any, expected: Any) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def fwd(out: Any = None, p: float = 0.0, return_softmax: bool = False, gen: Any = None) -> list[Tensor]:
    return raw.fwd(Q, K, V, out, SLOPES, p, SCALE, True, *WINDOW, SOFTCAP, return_softmax, gen)


def varlen_fwd(out: Any = None, *more: Any, table: Any = None) -> list[Tensor]:
    return raw.varlen_fwd(
        *PACKED, out, CU_Q, CU_K, None, None, table, SLOPES, 7, 7, 0.0, SCALE, False, True, *WINDOW, SOFTCAP, False,
        None, *more,
    )  # fmt: skip


def test_the_positions_are_those_of_the_extension() -> None:
    counts = {name: len(inspect.signature(getattr(raw, name)).parameters) for name in raw.__all__}
    assert counts == {"fwd": 13, "varlen_fwd": 22, "bwd": 19, "varlen_bwd": 24, "fwd_kvcache": 20}


@pytest.mark.parametrize(("p", "return_softmax"), [(0.0, False), (0.3, True)])
def test_fwd_is_the_private_forward(p: float, return_softmax: bool) -> None:
    torch.manual_seed(0)
    actual = fwd(None, p, return_softmax)
    torch.manual_seed(0)
    expected = _flash_attn_forward(Q, K, V, p, SCALE, True, *WINDOW, SOFTCAP, SLOPES, return_softmax)
    assert isinstance(actual, list)
    same(actual[:3], expected[:3])


def test_varlen_fwd_is_the_private_varlen_forward_with_21_or_22_positions() -> None:
    expected = _flash_attn_varlen_forward(*PACKED, CU_Q, CU_K, 7, 7, 0.0, SCALE, True, *WINDOW, SOFTCAP, SLOPES, False)
    for more in ((), (0,), (2,)):
        same(varlen_fwd(None, *more)[:3], expected[:3])
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        varlen_fwd(None, 2, table=torch.zeros(B, 1, dtype=torch.int32))

    used, padding = torch.tensor([6, 4], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    actual = raw.varlen_fwd(
        *PACKED, None, CU_Q, CU_K, used, padding, None, None, 7, 7, 0.0, SCALE, True, False, -1, -1, 0.0, False, None
    )
    expected = _flash_attn_varlen_forward(
        *PACKED, CU_Q, CU_K, 7, 7, 0.0, SCALE, False, leftpad_k=padding, seqused_k=used, zero_tensors=True
    )
    same(actual[:3], expected[:3])


def test_a_preallocated_out_is_written_through_its_strides_and_returned() -> None:
    out, packed_out = torch.zeros(B, H, SQ, D).transpose(1, 2), torch.zeros(B * SQ, H, D)
    assert fwd(out)[0] is out and varlen_fwd(packed_out)[0] is packed_out
    assert torch.equal(out, fwd()[0]) and torch.equal(packed_out, varlen_fwd()[0])


@pytest.mark.parametrize("given", [False, True])
def test_bwd_is_the_private_backward_and_writes_what_it_is_given(given: bool) -> None:
    out, lse, _, rng_state = fwd()
    dout = randn(B, SQ, H, D, seed=5)
    expected = [torch.empty_like(t) for t in (Q, K, V)]
    softmax_d = _flash_attn_backward(
        dout, Q, K, V, out, lse, *expected, 0.0, SCALE, True, *WINDOW, SOFTCAP, SLOPES, False, rng_state
    )
    packed = torch.zeros(B, SK, 2, HK, D)
    targets = [torch.empty_like(Q), packed[:, :, 0], packed[:, :, 1]] if given else [None] * 3
    actual = raw.bwd(
        dout, Q, K, V, out, lse, *targets, SLOPES, 0.0, SCALE, True, *WINDOW, SOFTCAP, False, None, rng_state
    )
    same(actual, [*expected, softmax_d])
    if given:
        assert all(a is t for a, t in zip(actual, targets, strict=False))
        assert torch.equal(packed, torch.stack(expected[1:], dim=2))


def test_varlen_bwd_is_the_private_varlen_backward() -> None:
    out, lse, _, rng_state = varlen_fwd()
    dout = randn(B * SQ, H, D, seed=5)
    expected = [torch.empty_like(t) for t in PACKED]
    softmax_d = _flash_attn_varlen_backward(
        dout, *PACKED, out, lse, *expected, CU_Q, CU_K, 7, 7, 0.0, SCALE, True, *WINDOW, SOFTCAP, SLOPES, False
    )
    actual = raw.varlen_bwd(
        dout, *PACKED, out, lse, None, None, None, CU_Q, CU_K, SLOPES, 7, 7, 0.0, SCALE, False, True, *WINDOW,
        SOFTCAP, False, None, rng_state,
    )  # fmt: skip
    same(actual, [*expected, softmax_d])


@pytest.mark.parametrize("preallocated", [False, True])
def test_fwd_kvcache_appends_and_attends(preallocated: bool) -> None:
    cos, sin = torch.rand(16, D // 2), torch.rand(16, D // 2)
    lengths = torch.tensor([3, 6], dtype=torch.int32)
    new_k, new_v = randn(B, SQ, HK, D, seed=6), randn(B, SQ, HK, D, seed=7)
    caches = [[randn(B, 16, HK, D, seed=s) for s in (8, 9)] for _ in range(2)]
    out = torch.empty(B, SQ, H, D) if preallocated else None
    actual = raw.fwd_kvcache(
        Q, *caches[0], new_k, new_v, lengths, cos, sin, None, None, None, SLOPES, out, SCALE, True, -1, -1, 0.0, False,
        0,
    )  # fmt: skip
    expected = flash_attn_with_kvcache(
        Q, *caches[1], new_k, new_v, cos, sin, lengths, softmax_scale=SCALE, causal=True, rotary_interleaved=False,
        alibi_slopes=SLOPES, return_softmax_lse=True,
    )  # fmt: skip
    same(actual, expected)
    same(caches[0], caches[1])
    assert out is None or actual[0] is out


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(B, SQ, H, D + 1), "out must have shape"),
        (torch.empty(B, SQ, H, D, dtype=torch.float16), "Output must have the same dtype"),
    ],
)
def test_an_out_that_does_not_fit_is_refused_before_a_cache_is_touched(out: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fwd(out)
    with pytest.raises(RuntimeError, match="generator"):
        fwd(gen=torch.Generator())
    k_cache, v_cache = torch.zeros(B, 16, HK, D), torch.zeros(B, 16, HK, D)
    lengths = torch.zeros(B, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        raw.fwd_kvcache(
            Q, k_cache, v_cache, K, V, lengths, None, None, None, None, None, None, out, SCALE, True, -1, -1, 0.0,
            True, 0,
        )  # fmt: skip
    assert k_cache.abs().sum() == 0 and v_cache.abs().sum() == 0
