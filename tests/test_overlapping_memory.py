"""Tensors whose memory overlaps itself: read as their contiguous copies are, refused where a call writes to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import (
    fa3,
    flash_attn_2_cuda,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn_compat.core.call import PackedInputs, Scalars
from flash_attn_compat.core.overlap import overlaps_itself, strides_overlap
from flash_attn_compat.dispatch import kvcache, raw
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from flash_attn_compat.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from tests import fused_on_cpu, others_kernels
from tests.plain import pairwise
from tests.support import GENERAL, close, cumulative, ints, randn
from tests.torch_sdpa import originals

# Strides of sequences, rows, heads and channels; 8 is the number of channels, so that rows may touch.
STEPS = (0, 1, 3, 8)
PATTERNS = [*itertools.product(STEPS, STEPS, STEPS, (1, 0, 2))]
WITH_CHANNELS = [pattern for pattern in PATTERNS if pattern[3] == 1]
Q_SHAPE, K_SHAPE = (2, 5, 4, 8), (2, 7, 2, 8)
DTYPES = torch.float32, torch.float16, torch.float64, torch.bfloat16
HALVES = torch.float16, torch.bfloat16
Answers = list[Tensor]
Serve = Callable[[str], Any]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Serve:
    """Return a function that lets a backend serve CPU tensors in a block, emulated or by a stand-in."""

    def start(backend: str) -> Any:
        if backend == "fused":
            fused_on_cpu.emulate(monkeypatch)
        elif backend not in GENERAL:
            others_kernels.install(monkeypatch, backend, tmp_path)
        return use_backend(backend)

    return start


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return normal numbers, seen through these strides."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return randn(extent, seed=seed, dtype=dtype).as_strided(shape, strides)


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def check_equal(found: Answers, expected: Answers) -> None:
    """Assert that answers differ by roundings at most, and that no answer overlaps itself."""
    for got, right in zip(found, expected, strict=True):
        close(got, right, right[right.isfinite()].abs().max(), epsilons=4)
        assert not overlaps_itself(got)


# ---------------------------------------------------------------- what a call reads


def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out: Tensor = flash_attn_func(q, k, v, **options)
    return out


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first sequence of each tensor as two packed ones; the last key belongs to none."""
    starts_q, starts_k = cumulative(2, 3), cumulative(2, 4)
    return flash_attn_varlen_func(q[0], k[0], v[0], starts_q, starts_k, 3, 4, causal=True)[None]


CALLS: dict[str, Callable[..., Tensor]] = {
    "full": dense,
    "causal": lambda *qkv: dense(*qkv, causal=True),
    "packed": packed,
    "one row": lambda q, k, v: dense(q[:, :1], k, v),
    "one head": lambda q, k, v: dense(q[:, :, :1], k[:, :, :1], v[:, :, :1], causal=True),
    "window": lambda *qkv: dense(*qkv, window_size=(2, 1)),
}


def with_gradients(call: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Answers:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = CALLS[call](*leaves)
    upstream = dout[: out.shape[0], : out.shape[1], : out.shape[2]]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    return DTYPES if backend in GENERAL else HALVES


def calls_of(backend: str) -> list[str]:
    return [name for name in CALLS if name != "window" or backend in (*GENERAL, "fused")]


WHICH = "q", "k", "v", "dout", "all four"
# Of how many patterns a test takes one. Tests of different tensors take different patterns.
EVERY = {"sdpa": 1, "chunked": 5, "reference": 5, "official": 19, "torch_flash": 19, "torch_efficient": 19, "fused": 47}


def cases(backend: str, which: str) -> Iterator[tuple[tuple[int, ...], torch.dtype, str]]:
    """Yield patterns of strides, with dtypes and calls that take turns."""
    options = [*itertools.product(dtypes_of(backend), calls_of(backend))]
    for index, pattern in enumerate(PATTERNS[WHICH.index(which) % EVERY[backend] :: EVERY[backend]]):
        yield pattern, *options[index * 7 % len(options)]


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("backend", EVERY)
def test_overlapping_inputs_give_the_answers_of_their_contiguous_copies(backend: str, which: str, serve: Serve) -> None:
    shapes = Q_SHAPE, K_SHAPE, K_SHAPE, Q_SHAPE
    with serve(backend):
        for pattern, dtype, call in cases(backend, which):
            chosen = [which in (name, "all four") for name in ("q", "k", "v", "dout")]
            tensors = [
                strided(shape, pattern, dtype, seed) if is_chosen else randn(*shape, seed=seed, dtype=dtype)
                for seed, (shape, is_chosen) in enumerate(zip(shapes, chosen))
            ]
            check_equal(with_gradients(call, *tensors), with_gradients(call, *map(copied, tensors)))


@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
def test_sliding_windows_over_one_sequence_give_the_answers_of_their_copies(backend: str, serve: Serve) -> None:
    """unfold and expand as programs use them, longer than a tile of the kernels for CPUs."""
    dtype = dtypes_of(backend)[0]
    tokens = randn(2, 200, 2, 16, dtype=dtype)
    windows = tokens.unfold(1, 40, 1)[:, :150].movedim(-1, 2).flatten(0, 1)[:4]
    views = [windows, tokens[:, 7:47].expand(2, 40, 2, 16).repeat(2, 1, 1, 1), tokens[:1, 5:45].expand(4, 40, 2, 16)]
    series = randn(4, 60, dtype=dtype).unfold(1, 16, 1)[:, :40, None].expand(4, 40, 2, 16)
    with serve(backend):
        for q, k, v in (views, [series] * 3, [windows, series, views[2]]):
            expected = with_gradients_of(q, k, v, copied)
            check_equal(with_gradients_of(q, k, v, lambda x: x), expected)


def with_gradients_of(q: Tensor, k: Tensor, v: Tensor, convert: Callable[[Tensor], Tensor]) -> Answers:
    """out and gradients through the views, of a sum, whose gradient is one number expanded."""
    leaves = [convert(x).detach().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, causal=True)
    out.sum().backward()
    return [out.detach(), *[x.grad for x in leaves if x.grad is not None]]


@pytest.mark.parametrize(
    ("backend", "name"), pairwise((*GENERAL, "fused"), ("qkv", "kv", "third axis of stride 0")), ids=str
)
def test_packed_inputs_that_overlap_give_the_answers_of_their_copies(backend: str, name: str, serve: Serve) -> None:
    with serve(backend):
        for pattern in WITH_CHANNELS[:: 31 if backend == "fused" else 5]:
            between = 0 if name == "third axis of stride 0" else 5
            shape = (2, 5, 2 if name == "kv" else 3, 2, 8)
            memory = strided(shape, (*pattern[:2], between, *pattern[2:]), dtypes_of(backend)[0], 1)
            q = randn(2, 5, 2, 8, dtype=memory.dtype)

            def answers(given: Tensor) -> Answers:
                given = given.detach().requires_grad_()
                out = flash_attn_kvpacked_func(q, given) if name == "kv" else flash_attn_qkvpacked_func(given)
                return [out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out))]

            check_equal(answers(memory), answers(copied(memory)))


@pytest.mark.parametrize("layout", ["lengths in a tensor", "an int", "pages", "chosen rows"])
@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
def test_overlapping_caches_are_read_as_their_copies(backend: str, layout: str, serve: Serve) -> None:
    options: dict[str, Any] = {"cache_seqlens": ints(7, 4), "causal": True}
    if layout == "an int":
        options["cache_seqlens"] = 6
    elif layout == "pages":
        options["block_table"] = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
    elif layout == "chosen rows":
        options["cache_batch_idx"] = ints(1, 0)
    with serve(backend):
        for index, pattern in enumerate(WITH_CHANNELS[:: 21 if backend == "fused" else 5]):
            dtype = dtypes_of(backend)[index % len(dtypes_of(backend))]
            q = randn(2, 1 + index % 3, 4, 8, dtype=dtype)
            k, v = strided(K_SHAPE, pattern, dtype, 1), strided(K_SHAPE, WITH_CHANNELS[-1 - index], dtype, 2)
            found = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
            expected = flash_attn_with_kvcache(q, copied(k), copied(v), return_softmax_lse=True, **options)
            check_equal([*found], [*expected])


@pytest.mark.parametrize("backend", EVERY)
def test_a_private_backward_reads_an_overlapping_out_dout_and_lse(backend: str, serve: Serve) -> None:
    with serve(backend):
        for index, pattern in enumerate(PATTERNS[:: 64 if backend == "fused" else 17]):
            dtype = dtypes_of(backend)[index % len(dtypes_of(backend))]
            q, k, v = (randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate((Q_SHAPE, K_SHAPE, K_SHAPE)))
            lse = _flash_attn_forward(q, k, v, 0.0, 0.3, False, -1, -1, 0.0, None, False)[1]
            lse = lse[..., :1].expand(lse.shape) if index % 2 else lse[:, :1, :1].expand(lse.shape)
            given = strided(Q_SHAPE, pattern, dtype, 4), strided(Q_SHAPE, PATTERNS[-1 - index], dtype, 5)

            def gradients(dout: Tensor, out: Tensor, lse: Tensor) -> Answers:
                written = [torch.zeros_like(x) for x in (q, k, v)]
                options = 0.0, 0.3, False, -1, -1, 0.0, None, False
                _flash_attn_backward(dout, q, k, v, out, lse, *written, *options)
                return written

            check_equal(gradients(*given, lse), gradients(*map(copied, (*given, lse))))


@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "all four", "attn_mask"])
def test_pytorchs_attention_on_our_kernels_reads_overlapping_memory(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads lie first; relative biases are sliding windows over one vector."""
    biases = randn(12, seed=6).unfold(0, 8, 1).flip(0)
    with originals.cpu_stand_ins(), originals.served(monkeypatch):
        for index, pattern in enumerate(PATTERNS[:: 95 if which == "attn_mask" else 47]):
            dtype = HALVES[index % 2]
            bias = biases.expand(2, 2, 5, 8).to(dtype) if which == "attn_mask" else None
            shapes = (2, 2, 5, 8), (2, 2, 8, 8), (2, 2, 8, 8), (2, 2, 5, 8)
            tensors = [
                strided(shape, pattern, dtype, seed)
                if which in (name, "all four")
                else randn(*shape, seed=seed, dtype=dtype)
                for seed, (name, shape) in enumerate(zip(("q", "k", "v", "dout"), shapes))
            ]

            def answers(*given: Tensor) -> Answers:
                *inputs, dout = given[:4]
                leaves = [x.detach().requires_grad_() for x in inputs]
                out = F.scaled_dot_product_attention(*leaves, attn_mask=given[4] if len(given) > 4 else None)
                return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

            given = tensors if bias is None else [*tensors, bias]
            check_equal(answers(*given), answers(*map(copied, given)))
        assert originals.counted() == {"fused": 2 * len(PATTERNS[:: 95 if which == "attn_mask" else 47])}


# ---------------------------------------------------------------- which memory overlaps itself


def test_small_strides_overlap_where_two_elements_have_one_offset() -> None:
    for shape in itertools.product((1, 2, 3, 4), repeat=3):
        for strides in itertools.product((0, 1, 2, 3, 5, 6), repeat=3):
            steps = [range(0, size * stride, stride) if stride else [0] * size for size, stride in zip(shape, strides)]
            offsets = [sum(where) for where in itertools.product(*steps)]
            assert strides_overlap(shape, strides) == (len(set(offsets)) < len(offsets)), (shape, strides)


ORDINARY: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.empty(3, 5, 2, 8),
    "heads first": lambda: torch.empty(3, 2, 5, 8).transpose(1, 2),
    "every axis permuted": lambda: torch.empty(8, 2, 5, 3).permute(3, 2, 1, 0),
    "slices of every axis": lambda: torch.empty(9, 9, 9, 32)[1:7:2, 2:8, ::3, 3:30:3],
    "part of a packed qkv": lambda: torch.empty(3, 5, 3, 2, 8)[:, :, 1],
    "keys beside values, NHD": lambda: torch.empty(7, 2, 16, 2, 8)[:, 0],
    "keys beside values, HND": lambda: torch.empty(7, 2, 16, 16).transpose(1, 2)[..., 8:],
    "keys and values by turns": lambda: torch.empty(7, 16, 2, 8, 2)[..., 1],
    "pages of every second block": lambda: torch.empty(14, 16, 2, 8)[::2],
    "batch last": lambda: torch.empty(5, 2, 8, 3).permute(3, 0, 1, 2),
    "a single row of a broadcast batch": lambda: torch.empty(1, 5, 2, 8).expand(4, 5, 2, 8)[:1],
    "one element an axis, any strides": lambda: torch.empty(8).as_strided((1, 1, 1, 8), (0, 1, 3, 1)),
    "no elements": lambda: torch.empty(0).as_strided((3, 0, 2, 8), (0, 1, 1, 1)),
    "steps that mesh": lambda: torch.empty(99).as_strided((2, 3, 1, 1), (5, 2, 0, 0)),
    "steps that mesh over channels": lambda: torch.empty(99).as_strided((2, 3, 8), (40, 16, 1)),
    "steps that mesh over channels in a cache": lambda: torch.empty(99).as_strided((1, 2, 3, 8), (0, 40, 16, 1)),
    "more memory than there is": lambda: torch.empty(2**20, 2**20, 2**10, 128, device="meta").transpose(0, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_layouts_do_not_overlap(name: str) -> None:
    assert not overlaps_itself(ORDINARY[name]())


OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "a broadcast batch": lambda x: x[:1].expand_as(x),
    "broadcast rows": lambda x: x[:, :1].expand_as(x),
    "broadcast heads": lambda x: x[:, :, :1].expand_as(x),
    "sliding windows of rows": lambda x: x.as_strided(x.shape, (x.stride(1), *x.stride()[1:])),
    "rows that overlap by a channel": lambda x: x.as_strided(x.shape, (*[s - 1 for s in x.stride()[:3]], 1)),
    "equal strides": lambda x: x.as_strided(x.shape, (200, 1, 16, 1)),
    "strides without order": lambda x: x.as_strided(x.shape, (30, 10, 15, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERLAPPING)
def test_views_that_share_addresses_overlap(name: str) -> None:
    x = torch.empty(1000)[:192].view(2, 6, 2, 8)
    assert overlaps_itself(OVERLAPPING[name](x)) and not overlaps_itself(x)


def test_strides_without_order_over_much_memory_count_as_overlapping() -> None:
    assert strides_overlap((2**20, 2**20), (2, 2**20 - 1))


# ---------------------------------------------------------------- what a call writes to


def check_refused(name: str, call: Callable[[], object], *untouched: Tensor) -> None:
    """Assert that the error names the argument, its shape and its strides, and that nothing was written."""
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
    return kvcache.attend_into(out, q, cache, cache.clone(), None, LENGTHS, table, Scalars(), False, None, None, *new)


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
            scalars = Scalars(max_seqlen_q=6, max_seqlen_k=6)
            check_refused("out", lambda: raw.forward_into(out, given, scalars), out)
