"""Decoding over a cache on torch_efficient: how keys are cut into shares and merged.

On a CPU the kernel is a stand-in with the real one's traps; where there is a GPU, the real one runs too.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from flash_attn_compat import explain, flash_attn_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends import BACKENDS, efficient_decode, efficient_launch, efficient_shares
from flash_attn_compat.backends.efficient_shares import Cut
from flash_attn_compat.engine import jiterated
from tests import cuda_on_cpu, efficient_kernels

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the kernel, needs a CUDA device")
HEADS = [(2, 4), (4, 1), (1, 8)]  # (key heads, query heads for each)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request, monkeypatch) -> str:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    monkeypatch.setattr(efficient_shares, "_WORTH_CUTTING", 512)
    efficient_shares._even_shares.cache_clear()
    if request.param == "cpu":
        backend = next(backend for backend in BACKENDS if backend.name == "torch_efficient")
        table = dataclasses.replace(backend.capabilities, devices=frozenset({"cpu"}), min_capability=None)
        monkeypatch.setattr(type(backend), "capabilities", table)
        monkeypatch.setattr(efficient_launch, "forward", efficient_kernels.forward)
    return request.param


def random(*shape: int, device: str, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def ints(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def decode(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor | tuple[Tensor, Tensor]:
    with use_backend("torch_efficient"):
        return flash_attn_with_kvcache(q, k, v, causal=True, **options)


def right(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], first: int = 0) -> Tensor:
    """One query row for each cache row over its keys from ``first`` up to its length, in fp64; 0 without keys."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64, device=q.device)
    group = q.shape[2] // k.shape[2]
    for index, length in enumerate(lengths):
        keys, values = (x[index, first:length].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q[index, 0].double(), keys) * q.shape[-1] ** -0.5
        out[index, 0] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return out


def close(ours: Tensor, expected: Tensor, size: float = 4.0) -> None:
    """``size`` is that of the values; one rounding of the kernel's shares, of their weights and of the result."""
    assert ours.shape == expected.shape and ours.is_contiguous()
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2 * torch.finfo(ours.dtype).eps * size)


def with_garbage(x: Tensor, lengths: list[int]) -> Tensor:
    for index, length in enumerate(lengths):
        x[index, length:] = math.nan
        x[index, length + 1 :: 2] = math.inf
    return x


@pytest.mark.parametrize(("nheads_k", "group"), HEADS)
@pytest.mark.parametrize("length", [0, 1, 11, 12, 13, 255, 2048, 3070, 3071])
def test_a_lone_sequence_of_any_length_is_right(device, nheads_k, group, length):
    q, k, v = random(1, 1, nheads_k * group, 64, device=device), *random(2, 1, 3071, nheads_k, 64, device=device)
    expected = right(q, k, v, [length])
    k, v = with_garbage(k, [length]), with_garbage(v, [length])
    lengths = ints(length, device=device)
    close(decode(q, k, v, cache_seqlens=lengths), expected)


@pytest.mark.parametrize(("nheads_k", "group"), HEADS)
def test_sequences_of_different_lengths_ignore_what_lies_behind_them(device, nheads_k, group):
    lengths = [0, 1, 300, 777, 1100]
    q, k, v = random(5, 1, nheads_k * group, 64, device=device), *random(2, 5, 1100, nheads_k, 64, device=device)
    expected = right(q, k, v, lengths)
    k, v = with_garbage(k, lengths), with_garbage(v, lengths)
    for _ in range(2):
        out, lse = decode(q, k, v, cache_seqlens=ints(*lengths, device=device), return_softmax_lse=True)
        close(out, expected)
        close(decode(q, k, v, cache_seqlens=ints(*lengths, device=device)), expected)
        assert (lse[0] == math.inf).all() and lse[1:].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("lengths", [[0], [5], [2000], [0, 2000], [1, 3]])
def test_the_lse_is_that_of_all_keys_and_plus_inf_without_any(device, head_dim, lengths):
    batch = len(lengths)
    q, k, v = random(batch, 1, 4, head_dim, device=device), *random(2, batch, 2000, 2, head_dim, device=device)
    for _ in range(3):
        out, lse = decode(q, k, v, cache_seqlens=ints(*lengths, device=device), return_softmax_lse=True)
        close(out, right(q, k, v, lengths))
        for index, length in enumerate(lengths):
            scores = torch.einsum("hgd,khd->hgk", q[index, 0].unflatten(0, (2, 2)).double(), k[index].double())
            expected = (scores[..., :length] * head_dim**-0.5).logsumexp(-1).flatten()
            expected = expected if length else torch.full_like(expected, math.inf)
            torch.testing.assert_close(lse[index, :, 0].double(), expected, rtol=0, atol=2e-3)


def test_a_cache_that_is_part_of_a_longer_one_is_read_where_it_lies(device, monkeypatch):
    seen, forward = [], efficient_launch.forward

    def noted(launch: efficient_launch.Launch, keep_lse: bool) -> tuple[Tensor, efficient_launch.Native]:
        seen.append(launch)
        return forward(launch, keep_lse)

    monkeypatch.setattr(efficient_launch, "forward", noted)
    lengths = [700, 0, 35]
    q, both = random(3, 1, 4, 64, device=device), random(3, 2000, 2, 2, 64, device=device)
    k, v = both[:, 100:900, 0], both[:, 100:900, 1]
    for _ in range(2):
        close(decode(q, k, v, cache_seqlens=ints(*lengths, device=device)), right(q, k, v, lengths))
    assert len(seen) == 2
    for launch in seen:
        assert launch.k.data_ptr() == k.data_ptr() and launch.v.data_ptr() == v.data_ptr()


def test_a_cache_with_its_sequences_side_by_side_is_right(device):
    q, k, v = random(3, 1, 4, 64, device=device), *random(2, 800, 3, 2, 64, device=device).transpose(1, 2)
    close(decode(q, k, v, cache_seqlens=ints(700, 0, 35, device=device)), right(q, k, v, [700, 0, 35]))


@pytest.mark.parametrize("lengths", [[1000], [0], [257], [600, 0, 1, 1024]])
def test_pages_beyond_a_length_are_not_looked_at_whatever_the_table_says_of_them(device, lengths):
    batch, page, pages = len(lengths), 256, 4
    q, k, v = random(batch, 1, 8, 64, device=device), *random(2, batch, page * pages, 2, 64, device=device)
    expected = right(q, k, v, lengths)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).to(device)
    pools = []
    for x in (with_garbage(k, lengths), with_garbage(v, lengths)):
        pool = x.new_empty(batch * pages, page, 2, 64)
        pool[order] = x.unflatten(1, (pages, page)).flatten(0, 1)
        pools.append(pool)
    table = order.view(batch, pages).int()
    for index, length in enumerate(lengths):
        table[index, -(-length // page) :] = -1
    for _ in range(2):
        close(decode(q, *pools, cache_seqlens=ints(*lengths, device=device), block_table=table), expected)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_window_and_leftpad_hide_the_front(device, batch):
    lengths = [1500, 1400, 600][:batch]
    q, k, v = random(batch, 1, 4, 64, device=device), *random(2, batch, 1500, 2, 64, device=device)
    used, pad = ints(*lengths, device=device), ints(*([77] * batch), device=device)
    for _ in range(2):
        close(decode(q, k, v, cache_seqlens=used, cache_leftpad=pad), right(q, k, v, lengths, first=77))
        for index, length in enumerate(lengths):
            one = slice(index, index + 1)
            out = decode(q[one], k[one], v[one], cache_seqlens=used[one].clone(), window_size=(400, 0))
            close(out, right(q[one], k[one], v[one], [length], first=length - 401))


@pytest.mark.parametrize("head_dim", [64, 192])
def test_shares_that_leftpad_or_a_window_leave_empty_count_for_nothing(device, head_dim):
    q, k, v = random(2, 1, 4, head_dim, device=device), *random(2, 2, 1500, 2, head_dim, device=device)
    expected = right(q, k, v, [1500, 1500], first=1100)
    k[:, :1100], v[:, :1100] = math.nan, math.nan
    pad = ints(1100, 1100, device=device)
    for options in (
        {"cache_leftpad": pad},
        {"window_size": (399, 0), "cache_seqlens": ints(1500, 1500, device=device)},
    ):
        dirty = [torch.full((2, 1500, 4, head_dim), math.nan, device=device, dtype=q.dtype) for _ in range(4)]
        del dirty
        close(decode(q, k, v, **options), expected)


@pytest.mark.parametrize(("nheads_k", "group"), HEADS)
@pytest.mark.parametrize("window", [(-1, -1), (100, 0), (100, 5), (-1, 3)])
@pytest.mark.parametrize(("batch", "seqlen_k"), [(1, 1500), (3, 300), (2, 1)])
def test_one_query_of_a_dense_call_is_served_like_a_cache(device, nheads_k, group, window, batch, seqlen_k):
    nheads = nheads_k * group
    q, k, v = random(batch, 1, nheads, 64, device=device), *random(2, batch, seqlen_k, nheads_k, 64, device=device)
    first = 0 if window[0] < 0 else max(0, seqlen_k - 1 - window[0])
    expected = right(q, k, v, [seqlen_k] * batch, first=first)
    with use_backend("torch_efficient"):
        out = flash_attn_func(q, k, v, window_size=window)
        again, lse, _ = flash_attn_func(q, k, v, causal=True, window_size=window, return_attn_probs=True)
        cached = flash_attn_with_kvcache(q, k, v, window_size=window)
    for found in (out, again, cached):
        close(found, expected)
    keys = k.double().repeat_interleave(group, 2)[:, first:]
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * 64**-0.5
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=2e-3)


def test_one_query_that_shares_heads_or_has_many_keys_takes_one_launch(device, monkeypatch):
    seen, forward = [], efficient_launch.forward
    monkeypatch.setattr(
        efficient_launch, "forward", lambda launch, keep_lse: seen.append(1) or forward(launch, keep_lse)
    )
    for nheads_k in (2, 8):
        q, k, v = random(1, 1, 8, 64, device=device), *random(2, 1, 600, nheads_k, 64, device=device)
        with use_backend("torch_efficient"):
            close(flash_attn_func(q, k, v), right(q, k, v, [600]))
    assert len(seen) == 2


def test_small_values_are_not_lost_in_the_merging(device):
    q, k, v = random(1, 1, 8, 64, device=device), *random(2, 1, 8192, 2, 64, device=device)
    k, v = k * 0.01, (v.abs() + 1) * 1e-5
    lengths = ints(8192, device=device)
    decode(q, k, v, cache_seqlens=lengths)
    found = decode(q, k, v, cache_seqlens=lengths).double()
    # Half precision is that coarse here: the shares and their sum are rounded once each.
    assert (found - right(q, k, v, [8192])).abs().max() <= 1.1 * 2**-24


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("nheads_k", [1, 4])
def test_queries_may_be_strided(device, dtype, nheads_k):
    q = random(2, 3, 4, 3, 64, device=device, dtype=dtype)[:, 1:2, :, 1]
    k, v = random(2, 2, 700, nheads_k, 64, device=device, dtype=dtype)
    close(decode(q, k, v, cache_seqlens=ints(700, 650, device=device)), right(q, k, v, [700, 650]))


@pytest.fixture(params=cuda_on_cpu.devices())
def kernels(request, monkeypatch) -> str:
    if request.param == "cpu":
        cuda_on_cpu.install(monkeypatch)
    return request.param


LENGTHS = ([0, 1, 300], [2048, 4, 257], [1000, 1024, 0])


@pytest.mark.parametrize(("seqlen_q", "nheads_k", "group", "head_dim"), [(1, 2, 4, 64), (3, 1, 5, 8), (2, 4, 1, 192)])
@pytest.mark.parametrize("pages", [0, 1, 4])
@pytest.mark.parametrize("left", [-1, 0, 700])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels_equal_plain_operators(kernels, seqlen_q, nheads_k, group, head_dim, pages, left, dtype):
    device = torch.device(kernels, 0 if kernels == "cuda" else None)
    assert not jiterated.why_not(device, dtype, efficient_decode._is_right)
    q = random(3, seqlen_q, 3, nheads_k * group, head_dim, device=kernels, dtype=dtype)[:, :, 1]
    table = torch.arange(3 * max(1, pages), device=kernels, dtype=torch.int32).flip(0).view(3, -1) if pages else None
    count, page = (pages, 300) if pages > 1 else (5, 2048)
    size, shape = page if pages > 1 else -(-page // count), tuple(q.shape)
    for lengths in LENGTHS:
        used = ints(*lengths, device=kernels)
        for given, leftpad in ((used, None), (used, ints(3, 0, 290, device=kernels)), (None, None)):
            cut = Cut(count, size, page, page + 8, pages, left, given, leftpad, table)
            found, expected = (way.prepare(q, nheads_k, cut) for way in (efficient_decode, efficient_shares))
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
            lse = torch.randn(3 * count, nheads_k, 32, device=kernels) * 5
            out = torch.randn(expected.rows.shape, device=kernels).to(dtype)
            out.view(3 * count, -1).masked_fill_((expected.lengths <= 0).unsqueeze(1), math.nan)
            merged = [way.merge(out, lse, expected.lengths, shape) for way in (efficient_decode, efficient_shares)]
            torch.testing.assert_close(*merged, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels_pass_their_own_trial(kernels, dtype):
    assert efficient_decode._is_right(torch.device(kernels), dtype)


@needs_gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_captured_decode_reads_nothing_that_may_be_forgotten(monkeypatch, paged, batch):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    q, k, v = random(batch, 1, 8, 64, device="cuda"), *random(2, batch, 2048, 2, 64, device="cuda")
    lengths = ints(*range(2048, 2048 - batch, -1), device="cuda")
    options: dict[str, Tensor] = {"cache_seqlens": lengths}
    caches = (k, v)
    if paged:
        caches = tuple(x.view(-1, 256, 2, 64) for x in (k, v))
        options["block_table"] = torch.arange(batch * 8, dtype=torch.int32, device="cuda").view(batch, 8)

    def call() -> Tensor:
        return flash_attn_with_kvcache(q, *caches, causal=True, **options)

    assert explain(call).backend == "torch_efficient"
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    dirty = [torch.full((2**20,), -1, dtype=torch.int32, device="cuda") for _ in range(8)]
    for used in (list(range(5, 5 + batch)), [0] * batch, [1999] * batch):
        lengths.copy_(ints(*used, device="cuda"))
        graph.replay()
        close(captured, right(q, k, v, used))
        close(call(), right(q, k, v, used))
    del dirty
