"""Which memory overlaps itself, and that no call writes to such memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_compat import fa3, flash_attn_2_cuda, flash_attn_with_kvcache
from flash_attn_compat.core.inputs import CacheInputs, Options, PackedInputs
from flash_attn_compat.core.overlap import overlaps_itself, strides_overlap
from flash_attn_compat.dispatch import kvcache, raw
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from flash_attn_compat.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from tests.forms.inputs import ORDINARY, OVERLAPPING, copied, cumulative, ints, randn
from tests.forms.support import Serve, close

# ---------------------------------------------------------------- which memory overlaps itself


def test_small_strides_overlap_where_two_elements_have_one_offset() -> None:
    for shape in itertools.product((1, 2, 3, 4), repeat=3):
        for strides in itertools.product((0, 1, 2, 3, 5, 6), repeat=3):
            steps = [range(0, size * stride, stride) if stride else [0] * size for size, stride in zip(shape, strides)]
            offsets = [sum(where) for where in itertools.product(*steps)]
            assert strides_overlap(shape, strides) == (len(set(offsets)) < len(offsets)), (shape, strides)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_layouts_do_not_overlap(name: str) -> None:
    assert not overlaps_itself(ORDINARY[name]())


@pytest.mark.parametrize("name", OVERLAPPING)
def test_views_that_share_addresses_overlap(name: str) -> None:
    x = torch.empty(1000)[:192].view(2, 6, 2, 8)
    assert overlaps_itself(OVERLAPPING[name](x)) and not overlaps_itself(x)


def test_strides_without_order_over_much_memory_count_as_overlapping() -> None:
    assert strides_overlap((2**20, 2**20), (2, 2**20 - 1))


# ---------------------------------------------------------------- what a call writes to


def check_refused(name: str, call: Callable[[], object], *untouched: Tensor) -> None:
    """Assert that the error names the argument, its shape and its strides, and that nothing is written."""
    before = [x.clone() for x in untouched]
    for _ in range(2):  # a refusal is never prepared
        with pytest.raises(RuntimeError, match=rf"^{name} must not overlap itself.* shape \(.* strides \("):
            call()
    assert all(map(torch.equal, untouched, before))


@pytest.mark.parametrize("name", OVERLAPPING)
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize("backend", ["sdpa", "fused"])
def test_an_append_to_an_overlapping_cache_is_refused_before_it_writes(
    backend: str, which: str, name: str, serve: Serve
) -> None:
    caches = {cache: randn(2, 6, 2, 8, seed=1, dtype=torch.float16) for cache in ("k_cache", "v_cache")}
    caches[which] = OVERLAPPING[name](randn(1000, seed=2, dtype=torch.float16)[:192].view(2, 6, 2, 8))
    q = randn(2, 1, 2, 8, dtype=torch.float16)
    with serve(backend):
        call = lambda length: flash_attn_with_kvcache(q, **caches, k=q, v=q, cache_seqlens=length)  # noqa: E731
        check_refused(which, lambda: call(ints(2, 3)), *caches.values())
        check_refused(which, lambda: call(2), *caches.values())
        none = q[:, :0]
        read = flash_attn_with_kvcache(q, **caches, k=none, v=none, cache_seqlens=ints(2, 3))
        copies = {cache: copied(x) for cache, x in caches.items()}
        close(read, flash_attn_with_kvcache(q, **copies, cache_seqlens=ints(2, 3)), 3.0)


@pytest.mark.parametrize("layout", ["pages", "chosen rows"])
def test_an_append_to_overlapping_pages_or_chosen_rows_is_refused(layout: str) -> None:
    q, k = randn(2, 1, 2, 8), randn(1, 6, 2, 8).expand(3, 6, 2, 8)
    where = {"block_table": ints(0, 2)[:, None]} if layout == "pages" else {"cache_batch_idx": ints(0, 2)}
    v = torch.zeros(3, 6, 2, 8)
    check_refused("k_cache", lambda: flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=ints(1, 1), **where), k, v)


CACHES = (
    "contiguous", "heads first", "part of a packed qkv", "keys beside values, NHD", "keys beside values, HND",
    "pages of every second block", "steps that mesh over channels in a cache",
)  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
def test_an_append_takes_every_cache_of_an_ordinary_layout(name: str) -> None:
    k, v = ORDINARY[name]().zero_(), ORDINARY[name]().zero_()
    new = randn(1, 1, *k.shape[2:])
    flash_attn_with_kvcache(new, k, v, new, 2 * new, cache_seqlens=1)
    assert torch.equal(k[0, 1], new[0, 0]) and torch.equal(v[0, 1], 2 * new[0, 0])
    assert not k[0, 0].any() and not k[0, 2:].any() and not k[1:].any()


@pytest.mark.parametrize("which", ["dq", "dk", "dv"])
@pytest.mark.parametrize("backend", ["sdpa", "fused", "official"])
def test_a_private_backward_refuses_overlapping_gradients(backend: str, which: str, serve: Serve) -> None:
    q, k, v, dout = (randn(2, 6, 2, 8, seed=seed, dtype=torch.float16) for seed in range(4))
    options = 0.0, 0.3, False, -1, -1, 0.0, None, False
    with serve(backend):
        out, lse, _, _ = _flash_attn_forward(q, k, v, *options)
        for name in OVERLAPPING:
            written = {gradient: torch.zeros_like(q) for gradient in ("dq", "dk", "dv")}
            written[which] = OVERLAPPING[name](torch.zeros(1000).half()[:192].view(2, 6, 2, 8))
            check_refused(
                which,
                lambda: _flash_attn_backward(dout, q, k, v, out, lse, *written.values(), *options),
                *written.values(),
            )


SHAPE, LENGTHS = (2, 6, 2, 8), ints(2, 3)
Write = Callable[[Tensor, Tensor, Tensor], object]  # from (out, q, the cache of both keys and values)


def raw_over_cache(out: Tensor, q: Tensor, cache: Tensor) -> object:
    tables = (None,) * 6  # rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, alibi_slopes
    return flash_attn_2_cuda.fwd_kvcache(
        q, cache, cache.clone(), q[:, :1], q[:, :1], LENGTHS, *tables, out, 0.3, False, -1, -1, 0.0, True, 0
    )


def pages_into(out: Tensor, q: Tensor, cache: Tensor) -> object:
    table, new = ints(0, 1)[:, None], (q[:, :1], q[:, :1])
    x = CacheInputs(q, cache, cache.clone(), None, LENGTHS, None, table, None, None, *new)
    return kvcache.attend_into(out, x, Options())


WRITES: dict[str, Write] = {
    "flash_attn_2_cuda.fwd": lambda out, q, cache: flash_attn_2_cuda.fwd(
        q, cache, cache, out, None, 0.0, 0.3, False, -1, -1, 0.0, False, None
    ),
    "flash_attn_2_cuda.fwd_kvcache": raw_over_cache,
    "attend_into": pages_into,
    "fa3": lambda out, q, cache: fa3._flash_attn_forward(
        q, cache, cache, None, None, None, out, *(None,) * 16, 0.3, False
    ),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("backend", ["sdpa", "fused"])
def test_an_overlapping_out_is_refused_before_anything_is_written(backend: str, name: str, serve: Serve) -> None:
    q, cache = randn(*SHAPE, dtype=torch.float16), randn(*SHAPE, seed=1, dtype=torch.float16)
    with serve(backend):
        for view in OVERLAPPING.values():
            out = view(torch.zeros(1000).half()[:192].view(SHAPE))
            check_refused("out", lambda: WRITES[name](out, q, cache), out, cache)
        out = torch.zeros(2, 2, 6, 8).half().transpose(1, 2)
        WRITES[name](out, q, cache)
        assert out.any()


def test_a_rotation_in_place_refuses_overlapping_memory() -> None:
    cos = randn(6, 4)
    x, qkv = randn(1, 6, 2, 8).expand(2, 6, 2, 8), randn(2, 6, 1, 2, 8).expand(2, 6, 3, 2, 8)
    check_refused("x", lambda: apply_rotary_emb(x, cos, cos, inplace=True), x)
    check_refused("qkv", lambda: apply_rotary_emb_qkv_(qkv, cos, cos), qkv)
    check_refused("kv", lambda: apply_rotary_emb_kv_(qkv[:, :, :2], cos, cos), qkv)
    close(apply_rotary_emb(x, cos, cos), apply_rotary_emb(copied(x), cos, cos))


def test_a_compiled_append_to_an_overlapping_cache_is_refused(fresh_compiler: None) -> None:
    q, k, v = randn(2, 1, 2, 8), randn(1000, seed=1)[:192].view(SHAPE), torch.zeros(SHAPE)
    append = torch.compile(
        lambda k: flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=2), backend="aot_eager", fullgraph=True
    )
    windows = OVERLAPPING["sliding windows of rows"](k)
    before = windows.clone()
    with pytest.raises(RuntimeError, match="k_cache must not overlap itself"):
        append(windows)
    assert torch.equal(windows, before) and not v.any()


@pytest.mark.parametrize("backend", ["sdpa", "fused"])
def test_a_packed_forward_refuses_an_overlapping_out(backend: str, serve: Serve) -> None:
    q, k, v = (randn(12, 2, 8, seed=seed, dtype=torch.float16) for seed in range(3))
    given = PackedInputs(q, k, v, None, cumulative(6, 6), cumulative(6, 6))
    with serve(backend):
        for strides in ((0, 8, 1), (8, 8, 1), (16, 0, 1), (15, 8, 1), (16, 8, 0)):
            out = torch.zeros(200).half().as_strided(q.shape, strides)
            scalars = Options(max_seqlen_q=6, max_seqlen_k=6)
            check_refused("out", lambda: raw.forward_into(out, given, scalars), out)


@pytest.mark.parametrize("which", ["dq", "dk", "dv"])
def test_a_private_backward_under_a_dispatch_mode_refuses_overlapping_gradients(which: str) -> None:
    q, k, v, dout = (randn(*SHAPE, seed=seed) for seed in range(4))
    options = 0.0, 0.3, False, -1, -1, 0.0, None, False
    out, lse, _, _ = _flash_attn_forward(q, k, v, *options)
    written = {gradient: torch.zeros(SHAPE) for gradient in ("dq", "dk", "dv")}
    written[which] = OVERLAPPING["sliding windows of rows"](torch.zeros(SHAPE))
    with FlopCounterMode(display=False):
        check_refused(
            which,
            lambda: _flash_attn_backward(dout, q, k, v, out, lse, *written.values(), *options),
            *written.values(),
        )
