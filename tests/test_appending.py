"""What a backend is handed when a call over a cache brings new keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_with_kvcache
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.engine import dispatch
from flash_attn_compat.engine.append import Append, by_operators
from flash_attn_compat.engine.call import AttentionCall, Result
from tests.support import qkv, randn

CAPACITY = 20


class Recorder(Reference):
    """The reference, and what it was asked."""

    def __init__(self) -> None:
        self.appended: list[tuple[AttentionCall, Append]] = []
        self.computed: list[AttentionCall] = []

    def append(self, call: AttentionCall, new: Append) -> Tensor:
        self.appended.append((call, new))
        return super().append(call, new)

    def forward(self, call: AttentionCall) -> Result:
        self.computed.append(call)
        return super().forward(call)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    recorder = Recorder()
    monkeypatch.setattr(dispatch, "BACKENDS", (recorder,))
    dispatch.forget_decisions()
    yield recorder
    dispatch.forget_decisions()


def caches() -> tuple[Tensor, Tensor]:
    return randn(2, CAPACITY, 2, 16, seed=5), randn(2, CAPACITY, 2, 16, seed=6)


@pytest.mark.parametrize("seqlen_new", [0, 3])
def test_an_int_length_is_a_dense_slice_of_the_cache_and_needs_no_tensor(backend: Recorder, seqlen_new: int) -> None:
    (q, k, v), (k_cache, v_cache) = qkv(sq=3, sk=3), caches()
    new = (k, v) if seqlen_new else ()
    flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=4, causal=True)
    (call,) = backend.computed
    assert call.is_dense and call.seqused_k is None and call.seqlen_new == 0
    assert call.k.data_ptr() == k_cache.data_ptr() and call.k.shape[1] == call.max_seqlen_k == 4 + seqlen_new
    assert [new.cache_seqlens for _, new in backend.appended] == ([4] if seqlen_new else [])


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
