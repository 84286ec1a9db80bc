"""Head dims of every size, and how a call is dealt out to blocks: few rows, keys, heads and packed sequences."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import (
    BF16_AS_FP16,
    FP16,
    HEAD_DIMS,
    KernelFeatures,
    Kind,
    Sizes,
    choose_tile,
    size_of,
)
from flash_attn_compat.backends.fused.choosing.tiles import Tile
from flash_attn_compat.backends.fused.launching import grids, workspaces
from flash_attn_compat.backends.fused.launching.grids import Grid
from tests.forms.plain import pairwise, some, some_of
from tests.kernels import emulate, fused_on_cpu, offline
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.kernels.test_kernels import check
from verify.examination import Examination
from verify.problems import Problem

NEEDS_EMULATOR = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())
TRAINED = Problem(seqlens_q=(140,), seqlens_k=(150,), nheads_k=1, group=2, head_dim=64, dtype="float16")
MASKS = {
    "full": {},
    "causal": {"causal": True, "seqlens_k": (170,)},
    "window": {"window": (40, 10), "seqlens_k": (140,)},
    "ALiBi": {"alibi": "h", "causal": True},
    "softcap and dropout": {"softcap": 3.0, "dropout_p": 0.2, "causal": True},
    "few rows": {"seqlens_q": (33,), "seqlens_k": (300,), "causal": True},
    "packed": {"kind": "varlen", "seqlens_q": (3, 0, 70), "seqlens_k": (66, 9, 67), "gap": (3, 2), "poison": "nan"},
}
OF_SIZES = "causal", "few rows", "packed"  # by which a size's tiles differ
OF_SCORES = [mask for mask in MASKS if mask not in OF_SIZES]  # by what becomes of a score
# What is missing of the size: nothing, rows' last 16 bytes, or so that no row begins on 16 bytes.
MISSING = 0, 8, 3
NEW = tuple((size, size) for size in HEAD_DIMS if size not in (32, 64, 128))
OTHER_VALUES = (192, 128), (48, 96), (80, 16), (56, 200)

GPUS = 75, 90


@pytest.fixture
def launches(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchRecord]:
    with flash_attn_compat.use_backend("fused"):
        yield fused_on_cpu.emulate(monkeypatch, number)


def sizes_of(launches: LaunchRecord) -> set[tuple[int, int]]:
    """Return D and DV of the launched kernels."""
    macros = [dict(one.variant.macros) for one in launches.seen if one.variant.entry in ("forward", "dkdv", "dq")]
    return {(found["D"], found.get("DV", found["D"])) for found in macros}


@NEEDS_EMULATOR
@pytest.mark.parametrize("number", [75])
@pytest.mark.parametrize("head_dims", some([*((D, D) for D in HEAD_DIMS), (192, 128)], 4))
def test_every_size_is_right_and_no_two_lanes_ask_one_bank_of_shared_memory_at_once(
    head_dims: tuple[int, int], launches: LaunchRecord
) -> None:
    """Whole tiles alone, and rows on 16 bytes: lanes of a warp then do the same."""
    lengths, (D, DV) = {"seqlens_q": (128,), "seqlens_k": (256,)}, head_dims
    check(replace(TRAINED, **lengths, head_dim=D, head_dim_v=DV, group=1, causal=True))
    assert sizes_of(launches) == {(D, DV)}
    found = dict(zip(launches.entries, launches.conflicts, strict=True))
    assert {entry: found[entry] for entry in ("forward", "dkdv", "dq")} == {"forward": 0, "dkdv": 0, "dq": 0}


# (GPU, head_dim of q and k and of v, dtype, mask)
TRAINED_IN = [
    *some_of(pairwise(GPUS, NEW, ("float16", "bfloat16"), OF_SIZES, MISSING), 30),
    *some_of(pairwise(GPUS, ((80, 80), (160, 160)), ("float16", "bfloat16"), OF_SCORES, MISSING), 22),
    *some_of(pairwise(GPUS, OTHER_VALUES, ("float16", "bfloat16"), ("full", "causal", "packed"), (0,)), 12),
]


@NEEDS_EMULATOR
@pytest.mark.parametrize(("number", "head_dims", "dtype", "mask", "missing"), TRAINED_IN)
def test_every_size_is_right_in_every_type_and_layout_and_values_are_not_padded_to_that_of_q(
    head_dims: tuple[int, int], dtype: str, mask: str, missing: int, launches: LaunchRecord
) -> None:
    D, DV = (head_dim - missing for head_dim in head_dims)
    check(replace(TRAINED, head_dim=D, head_dim_v=DV, dtype=dtype, **MASKS[mask]))
    assert sizes_of(launches) == {(size_of(D), size_of(DV))}


@NEEDS_EMULATOR
@pytest.mark.parametrize("number", some(GPUS, 2))
def test_warps_share_an_odd_number_of_16_channels(number: int, launches: LaunchRecord) -> None:
    check(replace(TRAINED, head_dim=192, head_dim_v=72, causal=True))
    assert sizes_of(launches) == {(192, 80), (192, 96)}, "forward; where halves are shared out"
    del launches.seen[:]
    check(replace(TRAINED, head_dim=16, head_dim_v=400, seqlens_q=(20,)))
    assert sizes_of(launches) == {(32, 512), (64, 512)}, "halves; quarters"


@NEEDS_EMULATOR
@pytest.mark.parametrize(
    ("number", "head_dim", "dtype", "page_size"),
    some_of(pairwise(GPUS, (72, 96, 136, 160, 192, 224, 504), ("float16", "bfloat16"), (None, 7, 16)), 5),
)
def test_every_size_is_right_when_decoding(
    head_dim: int, dtype: str, page_size: int | None, launches: LaunchRecord
) -> None:
    rotary = head_dim // 2 // 16 * 16
    step = Problem(
        "kvcache", (3, 3), (200, 33), 2, 3, head_dim, dtype=dtype, causal=True, capacity=224, page_size=page_size or 0,
        new_keys=2, rotary_dim=rotary, poison="nan",
    )  # fmt: skip
    check(step)
    check(replace(step, head_dim_v=64, new_keys=0, rotary_dim=0))
    assert set(launches.entries) == {"decode"}


@NEEDS_EMULATOR
@pytest.mark.parametrize(
    ("number", "head_dims"), some_of([*pairwise(GPUS, ((80, 80), (160, 160), (192, 128))), (90, (512, 512))], 7)
)
def test_blocks_that_share_a_tile_add_partial_results_of_any_size(
    head_dims: tuple[int, int], launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "count_splits", lambda *shapes: 3)
    monkeypatch.setattr(grids, "count_head_splits", lambda *shapes: 2)
    check(replace(TRAINED, head_dim=head_dims[0], head_dim_v=head_dims[1], seqlens_k=(300,), causal=True))
    assert {one.fields["splits"] for one in launches.seen if one.variant.entry == "forward"} == {3}


# Of `tune`, of long calls, and of 192 and 256 channels.
STAGED = {
    32: {"forward": Tile(64, 8, 1, 2, stages=3)},
    80: {"dkdv": Tile(32, 8, 1, 1, stages=3)},
    64: {entry: Tile(32, 8, 1, 1, stages=3) for entry in ("forward", "dkdv", "dq")},
    192: {"forward": Tile(32, 8, 1, 1, stages=3), "dkdv": Tile(32, 8, 1, 1, roles=True, stages=2)},
    256: {"forward": Tile(16, 8, 1, 1, stages=3), "dkdv": Tile(16, 8, 1, 1, roles=True, stages=3)},
}


@NEEDS_EMULATOR
@pytest.mark.parametrize(
    ("number", "head_dim", "dtype", "mask", "missing"),
    some_of(pairwise((75,), STAGED, ("float16", "bfloat16"), MASKS, (0, 3)), 9),
)
def test_kernels_with_several_stages_are_right_under_every_mask(
    head_dim: int, dtype: str, mask: str, missing: int, launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = choose_tile
    monkeypatch.setattr(variants, "choose_tile", lambda *asked: STAGED[head_dim].get(asked[0]) or usual(*asked))
    check(replace(TRAINED, head_dim=head_dim - missing, head_dim_v=head_dim - missing, dtype=dtype, **MASKS[mask]))
    staged = {one.variant.entry for one in launches.seen if dict(one.variant.macros).get("STAGES")}
    assert staged >= set(STAGED[head_dim])


# ---------------------------------------------------------------- how a call is dealt out to blocks

PROCESSORS = 40  # of a T4
GROUPED = Problem(seqlens_q=(70,), seqlens_k=(83,), nheads_k=1, group=5, head_dim=32, dtype="float16")


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_decode_asks_for_no_more_blocks_than_turings_shared_memory_holds(D: int) -> None:
    for type, vec in itertools.product((FP16, BF16_AS_FP16), (8, 1)):
        variant = variants.decode(Kind(75, type, Sizes(D, vec=vec)))
        found = grids.count_splits(variant, 1, 2**20, grids.resident_blocks(variant, PROCESSORS, 75))
        assert found % 40 == 0 and found // 40 * variant.shared <= offline.SHARED_MEMORY[75]
        assert found // 40 == offline.blocks(variant), "what the registers are bounded for"


@pytest.mark.parametrize(("tiles", "splits"), [(9, 29), (8, 32), (7, 37), (6, 44)])
def test_decode_takes_no_splits_that_barely_exceed_the_lanes_that_merge_them(tiles: int, splits: int) -> None:
    variant = variants.decode(Kind(90, FP16, Sizes(128)))
    assert grids.count_splits(variant, tiles, 2**20, grids.resident_blocks(variant, 132, 90)) == splits


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


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_no_block_is_without_a_head_and_their_work_is_even(D: int) -> None:
    for group, local, blocks in itertools.product((2, 5, 32, 71), (False, True), (1, 7, 32, 64, 500)):
        variant = variants.dkdv(Kind(75, FP16, Sizes(D), KernelFeatures(local=local)))
        splits = grids.count_head_splits(variant, blocks, group, 2048, grids.resident_blocks(variant, PROCESSORS, 75))
        each = -(-group // splits)
        assert 0 < group - (splits - 1) * each <= each
        assert splits == 1 or splits * blocks <= 40 * offline.blocks(variant) * (1 + local)


def test_one_key_head_for_all_queries_fills_a_small_gpu() -> None:
    variant = variants.dkdv(Kind(75, FP16, Sizes(64)))
    tiles = 2048 // variant.rows
    assert grids.count_head_splits(variant, tiles, 16, 2048, grids.resident_blocks(variant, PROCESSORS, 75)) == 2
    assert grids.count_head_splits(variant, tiles, 1, 2048, grids.resident_blocks(variant, PROCESSORS, 75)) == 1
    assert grids.count_head_splits(variant, tiles, 16, 17, grids.resident_blocks(variant, PROCESSORS, 75)) == 1, (
        "too few rows to be worth it"
    )


GROUPS = {
    "full": GROUPED,
    "causal": replace(GROUPED, causal=True, seqlens_k=(70,)),
    "head_dim 128, two key heads, two sequences": replace(
        GROUPED, head_dim=128, nheads_k=2, seqlens_q=(33, 33), seqlens_k=(70, 70), window=(40, 10)
    ),
    "head_dim 256, sums of two warps": replace(GROUPED, head_dim=256, seqlens_q=(33,), causal=True),
    "packed": replace(
        GROUPED, kind="varlen", seqlens_q=(3, 0, 70, 65), seqlens_k=(66, 9, 0, 67), gap=(3, 2), poison="nan", group=3
    ),
    "converted, all at once": replace(
        GROUPED, dtype="bfloat16", alibi="h", softcap=3.0, dropout_p=0.2, window=(40, 10), head_dim=64
    ),
    "converted, heads of all sizes": replace(
        GROUPED, dtype="bfloat16", sizes=((1e-5, 1.0, 1e8, 1e-6), (1.0, 1e4, 1e-8, 1e6)), nheads_k=2, causal=True
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
    ("gpu", "name"), some_of([*((75, name) for name in SEATS), (90, "causal"), (90, "all at once")], 5)
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


BOTH = {"forward", "dkdv"}
CAUSAL, WINDOW = {"causal": True}, {"causal": True, "window_size": (4096, 0)}


@pytest.mark.parametrize(
    ("length", "head_dim", "dtype", "mask", "staged"),
    [
        (2048, 64, "float16", {}, BOTH), (2048, 64, "bfloat16", {}, BOTH),
        (2048, 40, "float16", {}, {"forward"}), (2047, 64, "float16", {}, set()),
        (2048, 32, "float16", {}, {"forward"}), (2048, 32, "bfloat16", {}, set()),
        (2048, 80, "float16", {}, {"dkdv"}), (2048, 80, "bfloat16", {}, set()), (8191, 64, "float16", CAUSAL, set()),
        (8192, 32, "float16", CAUSAL, {"forward"}), (8192, 64, "float16", CAUSAL, {"forward"}),
        (8192, 80, "float16", CAUSAL, set()), (8192, 64, "bfloat16", CAUSAL, set()),
        (8192, 64, "float16", WINDOW, set()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_long_calls_take_tiles_of_three_stages_without_a_mask_sooner_than_under_a_causal_one(
    length: int,
    head_dim: int,
    dtype: str,
    mask: dict[str, Any],
    staged: set[str],
    packed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = fused_on_cpu.record(monkeypatch)
    q = torch.zeros(2, length, 1, head_dim, dtype=getattr(torch, dtype), requires_grad=True)
    starts = torch.tensor([0, 2 * length - 1000, 2 * length], dtype=torch.int32)  # the mean length counts
    rows, others = (q.flatten(0, 1), (starts, starts, 2 * length, 2 * length)) if packed else (q, ())
    attend = flash_attn_compat.flash_attn_varlen_func if packed else flash_attn_compat.flash_attn_func
    with flash_attn_compat.use_backend("fused"):
        attend(rows, rows, rows, *others, **mask).sum().backward()
    assert {one.variant.entry for one in launches.seen if dict(one.variant.macros).get("STAGES")} == staged


@pytest.mark.parametrize(
    ("length", "mask", "groups"), [(8192, CAUSAL, 2), (8191, CAUSAL, 0), (8192, WINDOW, 0)], ids=str
)
def test_a_long_causal_forward_at_128_takes_two_groups_of_warps(
    length: int, mask: dict[str, Any], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, q = fused_on_cpu.record(monkeypatch), torch.zeros(1, length, 1, 128, dtype=torch.float16)
    with flash_attn_compat.use_backend("fused"):
        flash_attn_compat.flash_attn_func(q, q, q, **mask)
    assert dict(launches.seen[0].variant.macros).get("KEY_GROUPS", 0) == groups


def test_sequences_share_a_grid_unasked_where_one_of_many_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, 75)
    lengths = (1, 0, 0, 2) * 30 + (200,)
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
    assert held == {"forward": 2 * PROCESSORS, "dkdv": PROCESSORS, "dq": 2 * PROCESSORS}
