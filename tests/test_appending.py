"""What a backend is handed when a call over a cache brings new keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_with_kvcache
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.engine import dispatch
from flash_attn_compat.engine.append import Append, by_operators
from flash_attn_compat.engine.call import AttentionCall, Result
from tests.support import close, on_backend, on_general_backends, qkv, randn

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
        return super().forward(call._replace(seqused_k=call.seqused_k + call.seqlen_new) if call.seqlen_new else call)


class Counting(Recorder):
    counts_new_keys = True


@pytest.fixture(params=[Recorder, Counting])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    recorder = request.param()
    monkeypatch.setattr(dispatch, "BACKENDS", (recorder,))
    dispatch.forget_decisions()
    yield recorder
    dispatch.forget_decisions()


def caches() -> tuple[Tensor, Tensor]:
    return randn(2, CAPACITY, 2, 16, seed=5), randn(2, CAPACITY, 2, 16, seed=6)


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_seqused_k_leaves_new_keys_out_only_for_backends_that_count_them(backend: Recorder) -> None:
    (q, k, v), (k_cache, v_cache) = qkv(sq=3, sk=3), caches()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths(4, 9), causal=True)
    ((appending, new),), (call,) = backend.appended, backend.computed
    assert appending.seqlen_new == 3 and appending.seqused_k.tolist() == [4, 9] and new.cache_seqlens.tolist() == [4, 9]
    if backend.counts_new_keys:
        assert call.seqlen_new == 3 and call.seqused_k.tolist() == [4, 9]
    else:
        assert call.seqlen_new == 0 and call.seqused_k.tolist() == [7, 12]
    close(out[1:], flash_attn_func(q[1:], k_cache[1:, :12], v_cache[1:, :12], causal=True))


def test_without_new_keys_nothing_is_appended_and_seqlen_new_is_0(backend: Recorder) -> None:
    q, _, _ = qkv(sq=3)
    flash_attn_with_kvcache(q, *caches(), cache_seqlens=lengths(4, 9))
    assert not backend.appended and backend.computed[0].seqlen_new == 0


@pytest.mark.parametrize("seqlen_new", [0, 3])
def test_an_int_length_is_a_dense_slice_of_the_cache_and_needs_no_tensor(backend: Recorder, seqlen_new: int) -> None:
    (q, k, v), (k_cache, v_cache) = qkv(sq=3, sk=3), caches()
    new = (k, v) if seqlen_new else ()
    flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=4, causal=True)
    (call,) = backend.computed
    assert call.is_dense and call.seqused_k is None and call.seqlen_new == 0
    assert call.k.data_ptr() == k_cache.data_ptr() and call.k.shape[1] == call.max_seqlen_k == 4 + seqlen_new
    assert [new.cache_seqlens for _, new in backend.appended] == ([4] if seqlen_new else [])


@pytest.mark.parametrize(
    ("options", "own"),
    [({}, False), (dict(causal=True), True), (dict(window_size=(5, -1)), True), (dict(window_size=(20, 20)), False)],
)
def test_rows_have_their_own_position_under_a_mask_only(backend: Recorder, options: Any, own: bool) -> None:
    (q, k, v), angles = qkv(sq=3, sk=3), randn(CAPACITY, 8)
    flash_attn_with_kvcache(q, *caches(), k, v, angles.cos(), angles.sin(), cache_seqlens=4, **options)
    assert backend.appended[0][1].rows_have_own_position == own


ADDRESSINGS = {
    "cache rows": {},
    "leftpad": dict(cache_leftpad=lengths(1, 3)),
    "cache_batch_idx": dict(cache_batch_idx=lengths(1, 0)),
    "pages": dict(block_table=torch.tensor([[1, 2, 4, 0], [3, 5, 7, 6]], dtype=torch.int32)),
}


@on_general_backends
@pytest.mark.parametrize("addressing", ADDRESSINGS.values(), ids=ADDRESSINGS.keys())
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("used", [0, 4, 17])
def test_an_int_length_appends_and_answers_as_a_tensor_of_equal_ones(
    backend: str, addressing: dict[str, Tensor], rotary: bool, used: int
) -> None:
    q, k, v = qkv(sq=5, sk=3)
    angles = randn(CAPACITY, 8)
    turn = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin()) if rotary else {}
    found = []
    for given in (used, lengths(used, used)):
        k_cache, v_cache = caches()
        if "block_table" in addressing:
            k_cache, v_cache = (cache.reshape(8, 5, 2, 16) for cache in (k_cache, v_cache))
        options = dict(cache_seqlens=given, causal=True, return_softmax_lse=True, **turn, **addressing)
        found.append((*on_backend(backend, flash_attn_with_kvcache, q, k_cache, v_cache, k, v, **options),
                      k_cache, v_cache))  # fmt: skip
    for ours, right in zip(*found):
        close(ours, right)


@pytest.mark.parametrize("length", [4, lengths(4, 9)], ids=["int", "tensor"])
def test_autocast_rounds_nothing_of_a_call_that_appends(length: Any) -> None:
    (q, k, v), angles = qkv(sq=3, sk=3), randn(CAPACITY, 8)
    found = []
    for enabled in (False, True):
        cached = caches()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = flash_attn_with_kvcache(
                q, *cached, k, v, angles.cos(), angles.sin(), cache_seqlens=length, softcap=3.0, causal=True
            )
        found.append((out, *cached))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("length", [18, 21, -1])
@pytest.mark.parametrize("paged", [False, True])
def test_an_int_length_that_does_not_fit_raises_on_every_device_before_anything_is_written(
    device: str, length: int, paged: bool
) -> None:
    (q, k, v), cached = qkv(sq=3, sk=3), caches()
    table = dict(block_table=ADDRESSINGS["pages"]["block_table"].to(device)) if paged else {}
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
