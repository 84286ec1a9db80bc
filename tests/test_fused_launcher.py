"""Where tensors become addresses: what a kernel is given, and what is refused before anything is launched."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flash_attn_compat import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn_compat.backends.fused import launcher, variants
from flash_attn_compat.engine import dropout
from tests import fused_on_cpu
from tests.fused_on_cpu import Launches
from tests.support import cumulative, randn

HALF = torch.float16


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return fused_on_cpu.record(monkeypatch)


def half(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, seed=seed, dtype=HALF)


# ---- address


def test_an_address_is_where_the_first_element_lies() -> None:
    tensor = half(4, 8)[1:]
    assert launcher.address("q", tensor, HALF, -1, launcher.reach(tensor)) == tensor.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(8), "dtype"),
        (torch.zeros(8, dtype=HALF, device="meta"), "meta"),
        (torch.zeros(7, dtype=HALF), "too small"),
        (torch.zeros(16, dtype=HALF)[9:], "too small behind its offset"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_address_of_another_dtype_or_device_or_of_too_little_memory_is_refused(tensor: Tensor, reason: str) -> None:
    with pytest.raises(RuntimeError, match=r"cu_seqlens_q must be torch.float16 .* 16 bytes.*shape"):
        launcher.address("cu_seqlens_q", tensor, HALF, 0 if reason == "meta" else -1, 16)


def test_freed_storage_is_refused() -> None:
    tensor = half(2, 8)
    size = launcher.reach(tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="k must be"):
        launcher.address("k", tensor, HALF, -1, size)


def test_reach_counts_to_the_last_element() -> None:
    assert launcher.reach(torch.zeros(3, 5)) == 60
    assert launcher.reach(torch.zeros(3, 5).t()) == 60
    assert launcher.reach(torch.zeros(3, 5)[:, ::2]) == 4 * (2 * 5 + 4 + 1)
    assert launcher.reach(torch.zeros(1, 5).expand(3, 5)) == 20
    assert launcher.reach(torch.zeros(0, 5)) == launcher.reach(None) == 0


# ---- alignment


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (half(2, 3, 4, 16), True),
        (half(2, 3, 4, 20), False),
        (half(2, 3, 4, 24)[..., 1:17], False),
        (half(2, 3, 4, 24)[..., 8:], True),
        (half(1, 1, 1, 20)[..., :16], True),
        (half(2, 3, 4, 20)[..., :16], False),
        (half(2, 3, 3, 4, 16)[:, :, 1], True),
    ],
    ids=["plain", "20 channels", "off by one", "off by 16 bytes", "one row", "rows apart by 40 bytes", "slice of qkv"],
)
def test_rows_on_16_bytes_are_told_from_others(tensor: Tensor, expected: bool) -> None:
    assert launcher.is_aligned(tensor) is expected


def test_channels_that_do_not_touch_cannot_be_read() -> None:
    assert not launcher.is_readable(half(2, 3, 4, 16)[..., ::2])
    assert not launcher.is_readable(half(2, 3, 4, 1).expand(2, 3, 4, 16))
    assert launcher.is_readable(half(2, 3, 4, 2)[..., ::2])  # a single channel touches nothing


def test_steps_that_no_int_holds_cannot_be_read() -> None:
    def far(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=HALF, device="meta")[..., :8]

    assert not launcher.is_readable(far(1, 2, 1, 2**31)) and not launcher.is_readable(far(1, 1, 2, 2**31))
    assert launcher.is_readable(far(2, 1, 1, 2**33))  # 64 bits hold the steps between sequences


@pytest.mark.parametrize("shape", [(2, 5, 3, 20), (2, 5, 3, 16)])
def test_copies_into_place_are_padded_with_zeros(shape: tuple[int, ...]) -> None:
    tensor = half(*shape, 2)[..., 0]
    copy = launcher.aligned(tensor)
    assert launcher.is_aligned(copy) and launcher.is_readable(copy)
    assert torch.equal(copy[..., : shape[-1]], tensor) and not copy[..., shape[-1] :].any()


def test_small_problems_are_read_element_by_element_large_ones_copied(launches: Launches) -> None:
    with use_backend("fused"):
        out = flash_attn_func(*(half(1, 9, 2, 20) for _ in range(3)))
        assert dict(launches.last.variant.macros)["VEC"] == 1 and out.shape[-1] == 20 == out.stride(-2)
        out = flash_attn_func(*(half(1, 9000, 2, 20) for _ in range(3)))
        assert dict(launches.last.variant.macros)["VEC"] == 8 and out.shape[-1] == 20 and out.stride(-2) == 24
        assert launches.last.fields["q_s"] == (9000 * 48, 48, 24)


def test_a_cache_is_never_copied(launches: Launches) -> None:
    cache = half(1, 9000, 2, 20)
    with use_backend("fused"):
        flash_attn_with_kvcache(half(1, 1, 2, 20), cache, cache, cache_seqlens=torch.tensor([7], dtype=torch.int32))
    assert dict(launches.last.variant.macros)["VEC"] == 1 and launches.last.fields["k"] == cache.data_ptr()


# ---- what kernels are told


def test_a_dense_call_in_numbers(launches: Launches) -> None:
    q, kv = half(2, 100, 6, 64), half(2, 70, 2, 2, 64)
    with use_backend("fused"):
        flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], causal=True, softmax_scale=0.5)
    variant, blocks, fields = launches.last
    assert variant.entry == "forward" and dict(variant.macros)["LOCAL"] == 1
    expected = {
        "q": q.data_ptr(), "k": kv.data_ptr(), "v": kv.data_ptr() + 2 * 64 * 2, "q_s": (100 * 384, 384, 64),
        "k_s": (70 * 256, 256, 64), "v_s": (70 * 256, 256, 64), "out_s": (100 * 384, 384, 64), "batch": 2, "nheads": 6,
        "nheads_k": 2, "group": 3, "seqlen_q": 100, "seqlen_k": 70, "head_dim": 64, "head_dim_v": 64, "lse": 0,
        "window_left": -1, "window_right": 0, "softmax_scale": 0.5, "cu_seqlens_q": 0, "rng_state": 0, "zero": 0,
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    tiles = -(-100 // variant.rows)
    assert fields["tiles"] == tiles and blocks == tiles * 6 * 2


def test_a_packed_call_has_a_slab_for_tokens_outside(launches: Launches) -> None:
    q, starts = half(50, 4, 64), cumulative(20, 25)
    with use_backend("fused"):
        flash_attn_varlen_func(q, q, q, starts, starts, 25, 25)
    fields = launches.last.fields
    assert fields["total_q"] == fields["total_k"] == 50 and fields["seqlen_q"] == fields["seqlen_k"] == 25
    assert fields["cu_seqlens_q"] == fields["cu_seqlens_k"] == starts.data_ptr() and fields["q_s"] == (0, 256, 64)
    assert launches.last.blocks == fields["tiles"] * 4 * 3


def test_lengths_beyond_the_tokens_launch_no_tiles_for_them(launches: Launches) -> None:
    q, starts = half(300, 1, 64), cumulative(300)
    with use_backend("fused"):
        flash_attn_varlen_func(q, q, q, starts, starts, 2**30, 2**30)
    assert launches.last.fields["seqlen_q"] == 300


def test_pages_in_numbers(launches: Launches) -> None:
    pool, table = half(9, 16, 2, 64), torch.arange(8, dtype=torch.int32).view(2, 4)[:, :3]
    used = torch.tensor([3, 40], dtype=torch.int32)
    with use_backend("fused"):
        flash_attn_with_kvcache(half(2, 1, 4, 64), pool, pool, cache_seqlens=used, block_table=table)
    fields = launches.last.fields
    expected = {"table_stride": 4, "page_size": 16, "pages_per_sequence": 3, "num_pages": 9, "seqlen_k": 48}
    assert {name: fields[name] for name in expected} == expected
    assert fields["seqused_k"] == used.data_ptr() and fields["block_table"] == table.data_ptr()


def test_a_table_with_gaps_between_pages_is_copied(launches: Launches) -> None:
    pool, table = half(9, 16, 2, 64), torch.arange(8, dtype=torch.int32).view(2, 4)[:, ::2]
    with use_backend("fused"):
        flash_attn_with_kvcache(half(2, 1, 4, 64), pool, pool, cache_seqlens=cumulative(4), block_table=table)
    assert launches.last.fields["table_stride"] == 2 and launches.last.fields["block_table"] != table.data_ptr()


@pytest.mark.parametrize("per_sequence", [True, False])
def test_slopes_per_sequence_have_a_step(per_sequence: bool, launches: Launches) -> None:
    q = half(3, 9, 4, 64)
    slopes = torch.rand(3, 4) if per_sequence else torch.rand(4)
    with use_backend("fused"):
        flash_attn_func(q, q, q, alibi_slopes=slopes)
    assert launches.last.fields["slopes_batch"] == (4 if per_sequence else 0)


def test_dropout_is_the_packages_own(launches: Launches) -> None:
    q = half(1, 9, 4, 64)
    with use_backend("fused"):
        flash_attn_func(q, q, q, dropout_p=0.3, return_attn_probs=True)
    assert launches.last.fields["dropout_limit"] == dropout.word_limit(0.3) and launches.last.fields["rng_state"]


def test_the_lse_is_left_out_where_nobody_wants_it(launches: Launches) -> None:
    q = half(1, 9, 4, 64)
    with use_backend("fused"):
        flash_attn_func(q, q, q)
        assert launches.last.fields["lse"] == 0
        flash_attn_func(q, q, q, return_attn_probs=True)
        assert launches.last.fields["lse"] and not launches.last.fields["lse_true"]
        flash_attn_func(q.clone().requires_grad_(), q, q, causal=True, alibi_slopes=torch.rand(4))
    assert launches.last.fields["lse_true"] and launches.last.fields["lse_has_position"]


def test_a_gradients_steps_are_those_of_its_place(launches: Launches) -> None:
    qkv = half(2, 20, 3, 4, 64).requires_grad_()
    with use_backend("fused"):
        flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
    assert launches.entries == ["forward", "delta", "dkdv", "dq"]
    fields = launches.last.fields
    assert fields["dq_s"] == fields["dk_s"] == fields["dv_s"] == (20 * 768, 768, 64)
    assert fields["dv"] - fields["dk"] == fields["dk"] - fields["dq"] == 2 * 256
    # The gradient of sum() is one number for all: it is copied into rows.
    assert fields["dout_s"] == (20 * 256, 256, 64)


# ---- decode and append


def decode(seqlen_new: int = 1, rotary: bool = True, **cache: int | Tensor) -> Tensor:
    k_cache = half(2, 1000, 2, 64)
    new = half(2, seqlen_new, 2, 64)
    tables = {"rotary_cos": half(1000, 16), "rotary_sin": half(1000, 16)} if rotary else {}
    with use_backend("fused"):
        return flash_attn_with_kvcache(half(2, 1, 8, 64), k_cache, k_cache, new, new, causal=True, **tables, **cache)


def test_a_step_of_decoding_is_two_launches(launches: Launches) -> None:
    decode(cache_seqlens=torch.tensor([5, 700], dtype=torch.int32))
    assert launches.entries == ["append", "decode"] and not launches.cleared
    first, second = launches.seen
    assert second.fields["q"] == first.fields["q_rotated"] and second.fields["seqlen_new"] == 1
    assert second.fields["counters"] == first.fields["counters"] != 0
    assert second.fields["splits"] > 1 and first.fields["tiles"] == second.fields["tiles"]
    assert second.blocks == second.fields["splits"] * 2 * 2


def test_what_an_append_prepared_serves_one_call_of_its_own(launches: Launches) -> None:
    decode(cache_seqlens=torch.tensor([5, 700], dtype=torch.int32), rotary=False)
    q, k = half(2, 1, 8, 64), half(2, 1000, 2, 64)
    with use_backend("fused"):
        flash_attn_with_kvcache(q, k, k, cache_seqlens=torch.tensor([5, 700], dtype=torch.int32))
    assert launches.last.fields["q"] == q.data_ptr() and launches.cleared == [4]


def test_an_int_of_lengths_needs_no_tensor(launches: Launches) -> None:
    decode(cache_seqlens=77)
    first, second = launches.seen
    assert first.fields["seqused_k"] == 0 and first.fields["seqlen_k"] - first.fields["seqlen_new"] == 77
    assert second.fields["seqused_k"] == 0 and second.fields["seqlen_k"] == 78 and second.fields["seqlen_new"] == 0


def test_appending_is_known_to_autograd(launches: Launches) -> None:
    cache, new = half(2, 10, 2, 64), half(2, 1, 2, 64)
    before = cache._version
    with use_backend("fused"):
        flash_attn_with_kvcache(half(2, 1, 8, 64), cache, cache, new, new, cache_seqlens=3)
    assert cache._version > before


@pytest.mark.parametrize(
    ("seqlen_q", "group", "drops", "expected"),
    [(1, 1, False, True), (1, 64, False, True), (1, 65, False, False), (16, 4, False, True), (17, 1, False, False),
     (1, 1, True, False)],
)  # fmt: skip
def test_few_rows_take_the_decode_kernel(seqlen_q: int, group: int, drops: bool, expected: bool) -> None:
    assert variants.takes_decode(seqlen_q, group, drops) is expected


@pytest.mark.parametrize("processors", [40, 132])
def test_splits_fill_the_gpu_and_no_more(processors: int) -> None:
    for tiles in (1, 8, 32, 100, 256, 10_000):
        for keys in (1, 64, 1000, 8192, 10**6):
            count = variants.splits(tiles, keys, processors, 128)
            assert 1 <= count <= max(1, -(-keys // 64))
            assert count == 1 or tiles * count <= 2 * max(processors, 2 * tiles)
    assert variants.splits(2 * processors, 10**6, processors, 128) == 1
    assert variants.splits(8, 8192, 132, 128) == 33 and variants.splits(128, 4096, 132, 64) == 4


# ---- plans and threads


def test_equal_calls_share_a_plan_and_others_do_not(launches: Launches) -> None:
    def variations() -> list[Callable[[], object]]:
        q, k = half(2, 40, 4, 64), half(2, 40, 2, 64)
        return [
            lambda: flash_attn_func(q, k, k),
            lambda: flash_attn_func(q, k, k, causal=True),
            lambda: flash_attn_func(q, k, k, softcap=1.0),
            lambda: flash_attn_func(q, k, k, softmax_scale=1.0),
            lambda: flash_attn_func(q, k, k, return_attn_probs=True),
            lambda: flash_attn_func(q, k, k, window_size=(3, 4)),
            lambda: flash_attn_func(q, k, k, alibi_slopes=torch.rand(4)),
            lambda: flash_attn_func(q, k, k, alibi_slopes=torch.rand(2, 4)),
            lambda: flash_attn_func(q, k[:, :30], k[:, :30]),
            lambda: flash_attn_func(q[:1], k[:1], k[:1]),
            lambda: flash_attn_func(q.transpose(1, 2).contiguous().transpose(1, 2), k, k),
        ]

    with use_backend("fused"):
        for count, call in enumerate(variations(), start=1):
            call()
            assert len(launcher._plans) == count
        for call in variations():
            call()
    assert len(launcher._plans) == len(variations())


def test_plans_do_not_pile_up(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_MOST_PLANS", 5)
    with use_backend("fused"):
        for length in range(1, 12):
            flash_attn_func(*(half(1, length, 1, 64) for _ in range(3)))
    assert len(launcher._plans) <= 5


def test_threads_do_not_share_a_struct() -> None:
    buffers = {}

    def note(name: int) -> None:
        buffers[name] = launcher.arguments.pointers.value

    threads = [threading.Thread(target=note, args=(index,)) for index in range(2)]
    note(-1)
    for thread in threads:
        thread.start()
        thread.join()
    assert buffers[-1] not in (buffers[0], buffers[1])


# ---- bf16 where the tensor cores take fp16


def test_converted_bf16_looks_for_maxima_first(launches: Launches) -> None:
    q = half(2, 40, 4, 64).bfloat16().requires_grad_()
    with use_backend("fused"):
        flash_attn_func(q, q, q).sum().backward()
    assert launches.entries == ["absmax", "forward", "absmax", "delta", "dkdv", "dq"]
    forward, backward = launches.seen[0], launches.seen[2]
    parts = forward.fields["absmax_splits"]
    assert forward.blocks == 3 * 2 * 4 * parts and backward.blocks == 4 * 2 * 4 * parts
    assert launches.seen[1].fields["absmax"] == forward.fields["absmax"] and backward.fields["dout"]


def test_native_bf16_needs_no_maxima(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch, number=90)
    q = half(2, 40, 4, 64).bfloat16()
    with use_backend("fused"):
        flash_attn_func(q, q, q)
    assert launches.entries == ["forward"] and dict(launches.last.variant.macros)["TYPE"] == variants.BF16
