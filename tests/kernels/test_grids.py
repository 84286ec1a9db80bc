"""How a call is dealt out to blocks: few rows to the decode kernel, keys and heads to as many blocks as a GPU holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.variants import BF16_AS_FP16, FP16, Kind
from flash_attn_compat.backends.fused.launching import grids, workspaces
from flash_attn_compat.backends.fused.launching.grids import Grid
from tests.forms.plain import some_of
from tests.kernels import fused_on_cpu, offline
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.kernels.test_kernels import check
from verify.examination import Examination
from verify.problems import Problem

T4 = grids.Gpu(processors=40, number=75)
TRAINED = Problem(seqlens_q=(70,), seqlens_k=(83,), nheads_k=1, group=5, head_dim=32, dtype="float16")


@pytest.mark.parametrize("D", variants.HEAD_DIMS)
def test_decode_asks_for_no_more_blocks_than_turings_shared_memory_holds(D: int) -> None:
    for type, vec in itertools.product((FP16, BF16_AS_FP16), (8, 1)):
        variant = variants.decode(Kind(75, type, D, vec=vec))
        found = grids.count_splits(variant, 1, 2**20, T4)
        assert found % 40 == 0 and found // 40 * variant.shared <= offline.SHARED_MEMORY[75]
        assert found // 40 == offline.blocks(variant), "what the registers are bounded for"


@pytest.mark.parametrize(
    ("rows", "nheads", "nheads_k", "entry"),
    [
        (1, 71, 1, "decode"),  # Falcon-7B
        (8, 32, 2, "decode"),  # several tokens at once, 16 heads a key head
        (16, 8, 1, "decode"),
        (1, 128, 1, "decode"),
        (17, 1, 1, "forward"),
        (16, 9, 1, "forward"),
    ],
)
def test_keys_are_read_for_sixteen_rows_at_once_with_any_heads(
    rows: int, nheads: int, nheads_k: int, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = fused_on_cpu.record(monkeypatch)
    q, cache = torch.zeros(1, rows, nheads, 64).half(), torch.zeros(1, 64, nheads_k, 64).half()
    flash_attn_with_kvcache(q, cache, cache, cache_seqlens=64, causal=True)
    assert launches.entries == [entry]
    if entry == "decode":
        assert launches.last.fields["tiles"] == -(-rows * nheads // nheads_k // 16)


@pytest.mark.parametrize(
    ("batch", "seqlen", "rows"),
    [(2, 256, 64), (3, 256, 128), (1, 512, 64), (1, 640, 128), (1, 2048, 128), (2, 200, 128)],
    ids=str,
)
def test_dense_calls_with_fewer_tall_tiles_than_multiprocessors_take_small_tiles(
    batch: int, seqlen: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 heads on the 40 multiprocessors of a T4."""
    launches = fused_on_cpu.record(monkeypatch)
    q, k, v = (torch.zeros(batch, seqlen, 8, 96).half().requires_grad_() for _ in range(3))
    with use_backend("fused"):
        flash_attn_func(q, k, v).sum().backward()
    assert [launch.variant.rows for launch in launches.seen if launch.variant.entry != "delta"] == [rows] * 3


# ---- few key heads: blocks share the query heads of a group


@pytest.mark.parametrize("D", variants.HEAD_DIMS)
def test_no_block_is_without_a_head_and_their_work_is_even(D: int) -> None:
    for group, local, blocks in itertools.product((2, 5, 32, 71), (False, True), (1, 7, 32, 64, 500)):
        variant = variants.dkdv(Kind(75, FP16, D, local=local))
        splits = grids.count_head_splits(variant, blocks, group, 2048, T4)
        each = -(-group // splits)
        assert 0 < group - (splits - 1) * each <= each
        assert splits == 1 or splits * blocks <= 40 * offline.blocks(variant) * (1 + local)


def test_one_key_head_for_all_queries_fills_a_small_gpu() -> None:
    variant = variants.dkdv(Kind(75, FP16, 64))
    tiles = 2048 // variant.rows
    assert grids.count_head_splits(variant, tiles, 16, 2048, T4) == 2
    assert grids.count_head_splits(variant, tiles, 1, 2048, T4) == 1
    assert grids.count_head_splits(variant, tiles, 16, 17, T4) == 1, "too few rows to be worth it"


GROUPS = {
    "full": TRAINED,
    "causal": replace(TRAINED, causal=True, seqlens_k=(70,)),
    "head_dim 128, two key heads, two sequences": replace(
        TRAINED, head_dim=128, nheads_k=2, seqlens_q=(33, 33), seqlens_k=(70, 70), window=(40, 10)
    ),
    "head_dim 256, sums of two warps": replace(TRAINED, head_dim=256, seqlens_q=(33,), causal=True),
    "packed": replace(
        TRAINED, kind="varlen", seqlens_q=(3, 0, 70, 65), seqlens_k=(66, 9, 0, 67), gap=(3, 2), poison="nan", group=3
    ),
    "converted, all at once": replace(
        TRAINED, dtype="bfloat16", alibi="h", softcap=3.0, dropout_p=0.2, window=(40, 10), head_dim=64
    ),
    "converted, heads of all sizes": replace(
        TRAINED, dtype="bfloat16", sizes=((1e-5, 1.0, 1e8, 1e-6), (1.0, 1e4, 1e-8, 1e6)), nheads_k=2, causal=True
    ),
}


@pytest.mark.parametrize(
    ("gpu", "name"), some_of([*((75, name) for name in GROUPS), (90, "causal"), (90, "packed")], 4)
)
def test_gradients_are_right_where_blocks_share_a_groups_heads(
    gpu: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "count_head_splits", lambda *shapes: 3)
    launches = fused_on_cpu.emulate(monkeypatch, gpu)
    with flash_attn_compat.use_backend("fused"):
        verdict = Examination(GROUPS[name]).judge("fused")
    assert not verdict.failures and not verdict.refused, verdict
    assert [launch.fields["splits"] for launch in launches.seen if launch.variant.entry == "dkdv"] == [3]
    (workspace,) = workspaces._workspaces.values()
    assert workspace[workspaces.PARTS_OFFSET :].any() and not workspace[: workspaces.PARTS_OFFSET].any()


# ---- packed sequences of very different lengths: all share a grid


def test_sequences_share_a_grid_where_most_of_their_own_blocks_would_have_nothing_to_do() -> None:
    many = 2**16
    assert grids.choose_grid(2**20, 128, many, 16, 2**20) == Grid(64, 1153, 64 * 1153)
    assert 64 * 1153 >= 2**20 // 128 + many + 1 > 64 * 1152
    assert grids.choose_grid(256, 128, many, 16, 2**20) == Grid(2, many + 1), "no more than twice as many"
    assert grids.choose_grid(2**20, 128, many, 16, None) == Grid(8192, many), "sequences that are all as long"
    assert grids.choose_grid(512, 128, 16, 16, 600) == Grid(4, 17), "too few to matter"


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_there_is_a_seat_for_every_tile_of_any_lengths(rows: int) -> None:
    for seed in range(50):
        draw = functools.partial(torch.randint, generator=torch.Generator().manual_seed(seed))
        size, batch = int(draw(1, 400, ())), int(draw(1, 90, ()))
        lengths = draw(0, size, (batch,)) * draw(0, 2, (batch,))
        found = grids.choose_grid(size, rows, batch, 1, int(lengths.sum()), shares=True)
        assert found.varlen_tiles > int((-(-lengths // rows)).sum())
        assert found.varlen_tiles == found.tiles * found.groups


def test_a_longest_sequence_that_is_said_to_be_all_tokens_costs_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, total, batch = fused_on_cpu.record(monkeypatch), 2**20, 2**16
    q, k, v = (torch.empty(total, heads, 8, dtype=torch.float16, requires_grad=True) for heads in (16, 4, 4))
    starts = torch.arange(0, total + 1, total // batch, dtype=torch.int32)
    with flash_attn_compat.use_backend("fused"):
        out = flash_attn_varlen_func(q, k, v, starts, starts, total, total, causal=True)
        torch.autograd.grad(out, (q, k, v), out)
    assert launches.entries == ["forward", "delta", "dkdv", "dq"]
    for launch in launches.seen:
        heads = 4 if launch.variant.entry == "dkdv" else 16
        tiles = launch.fields["varlen_tiles"]
        assert launch.blocks == heads * tiles and variants.has_shared_grid(launch.variant)
        assert tiles - 64 < total // launch.variant.rows + batch + 1 <= tiles


SKEWED = Problem(
    "varlen", seqlens_q=(0, 70, 1, 0, 65, 0, 3), seqlens_k=(9, 66, 0, 0, 67, 1, 130), nheads_k=1, group=2, head_dim=32,
    dtype="float16", gap=(3, 2), poison="nan",
)  # fmt: skip
SEATS = {
    "full": SKEWED,
    "causal": replace(SKEWED, causal=True, group=5),
    "many sequences": replace(SKEWED, seqlens_q=(1, 0, 2) * 25 + (70,), seqlens_k=(0, 3, 1) * 25 + (90,), causal=True),
    "far outside": replace(SKEWED, gap=(70, 140), causal=True),
    "window": replace(SKEWED, window=(20, 3)),
    "all at once": replace(SKEWED, alibi="bh", softcap=3.0, dropout_p=0.2, window=(40, 10), head_dim=64),
    "head_dim 512": replace(SKEWED, head_dim=512, causal=True),
    "odd channels": replace(SKEWED, head_dim=9, head_dim_v=17),
    "converted": replace(SKEWED, dtype="bfloat16", head_dim=64, sizes=((1.0, 1e4, 1e-8, 1e6), (1e-5, 1.0, 1e8, 1e-6))),
    "pages": replace(SKEWED, kind="paged", page_size=7, causal=True, gap=(0, 0), backward=False),
}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packed sequences share a grid whether that pays or not."""
    fused_on_cpu.share_grids(monkeypatch)
    with flash_attn_compat.use_backend("fused"):
        yield


def have_shared_grids(launches: LaunchRecord) -> bool:
    return all(variants.has_shared_grid(one) for one in launches.variants if one.entry != "absmax")


@pytest.mark.parametrize(
    ("gpu", "name"), some_of([*((75, name) for name in SEATS), (90, "causal"), (90, "all at once")], 4)
)
def test_answers_and_gradients_are_right_where_sequences_share_a_grid(
    gpu: int, name: str, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, gpu)
    check(SEATS[name])
    assert ("dq" in launches.entries) == SEATS[name].has_gradients and have_shared_grids(launches)


@pytest.mark.parametrize("name", ["causal", "far outside"])
def test_one_kernel_for_few_keys_is_right_where_sequences_share_a_grid(
    name: str, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, one_tile=True)
    check(replace(SEATS[name], seqlens_k=tuple(min(keys, 100) for keys in SKEWED.seqlens_k)))
    assert launches.entries == ["forward", "dkdv"] and have_shared_grids(launches)


@pytest.mark.parametrize(
    ("rows", "keys", "size", "heads", "tile"),
    [
        (64, 32, 64, 1, 32),
        (64, 32, 80, 1, 64),
        (64, 33, 64, 1, 64),
        (64, 96, 64, 1, 96),
        (64, 128, 64, 1, 128),
        (64, 129, 64, 1, 0),
        (64, 64, 128, 1, 64),
        (64, 65, 96, 1, 0),
        (64, 128, 112, 1, 128),
        (64, 64, 160, 1, 0),
        (64, 0, 64, 1, 0),
        (257, 64, 64, 159, 0),
        (257, 64, 64, 160, 64),
    ],
)
def test_one_tile_takes_few_keys_of_rows_that_are_few_or_of_many_heads(
    rows: int, keys: int, size: int, heads: int, tile: int
) -> None:
    assert grids.choose_one_tile(rows, keys, size, heads, processors=40) == tile


@pytest.mark.parametrize(
    ("rows", "head_dim", "local", "small"),
    [
        (64, 256, False, True), (65, 64, False, False), (65, 64, True, True), (65, 128, False, True),
        (129, 64, False, True), (193, 64, True, False), (193, 128, False, True), (256, 192, False, True),
        (256, 193, True, False), (257, 96, False, True), (320, 256, True, True), (321, 128, True, False),
    ],
)  # fmt: skip
def test_small_tiles_take_few_rows_of_which_a_tall_one_would_waste_more(
    rows: int, head_dim: int, local: bool, small: bool
) -> None:
    assert grids.takes_small_tiles(rows, head_dim, local) == small


def test_sequences_share_a_grid_unasked_where_one_of_many_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, 75)
    lengths = (1, 0, 0, 2) * 30 + (300,)
    problem = Problem("varlen", lengths, lengths, 3, 1, 64, dtype="float16", causal=True, max_seqlen_slack=1000)
    with flash_attn_compat.use_backend("fused"):
        check(problem)
    assert launches.entries == ["forward", "delta", "dkdv", "dq"] and have_shared_grids(launches)


def test_kernels_for_a_shared_grid_are_tried_as_such(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, 75, tried=True)
    check(replace(SKEWED, backward=True))
    assert launches.entries == ["forward"] * 2 + ["delta", "dkdv", "dq"] * 2 and have_shared_grids(launches)


def test_under_a_mask_as_many_blocks_stand_together_as_the_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch)
    q = torch.zeros(1, 300, 16, 64).half().requires_grad_()  # tall tiles fill 40 multiprocessors
    with flash_attn_compat.use_backend("fused"):
        flash_attn_compat.flash_attn_func(q, q, q, causal=True).sum().backward()
    held = {one.variant.entry: one.fields["resident"] for one in launches.seen if one.variant.entry != "delta"}
    assert held == {"forward": 2 * T4.processors, "dkdv": T4.processors, "dq": 2 * T4.processors}
