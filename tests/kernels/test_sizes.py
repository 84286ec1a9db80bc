"""Every head_dim that is a multiple of 16 has kernels of its own size; values may be narrower or wider than q and k."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

import flash_attn_compat
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.tiles import Tile
from flash_attn_compat.backends.fused.choosing.variants import FP16, HEAD_DIMS, Kind
from flash_attn_compat.backends.fused.launching import grids
from tests.forms.plain import pairwise, some, some_of
from tests.kernels import emulate, fused_on_cpu, offline
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.kernels.test_kernels import check
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
    *some_of(pairwise(GPUS, NEW, ("float16", "bfloat16"), OF_SIZES, MISSING), 20),
    *some_of(pairwise(GPUS, ((80, 80), (160, 160)), ("float16", "bfloat16"), OF_SCORES, MISSING), 15),
    *some_of(pairwise(GPUS, OTHER_VALUES, ("float16", "bfloat16"), ("full", "causal", "packed"), (0,)), 8),
]


@NEEDS_EMULATOR
@pytest.mark.parametrize(("number", "head_dims", "dtype", "mask", "missing"), TRAINED_IN)
def test_every_size_is_right_in_every_type_and_layout_and_values_are_not_padded_to_that_of_q(
    head_dims: tuple[int, int], dtype: str, mask: str, missing: int, launches: LaunchRecord
) -> None:
    D, DV = (head_dim - missing for head_dim in head_dims)
    check(replace(TRAINED, head_dim=D, head_dim_v=DV, dtype=dtype, **MASKS[mask]))
    assert sizes_of(launches) == {(variants.size_of(D), variants.size_of(DV))}


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
    ("number", "head_dims"), some_of([*pairwise(GPUS, ((80, 80), (160, 160), (192, 128))), (90, (512, 512))], 6)
)
def test_blocks_that_share_a_tile_add_partial_results_of_any_size(
    head_dims: tuple[int, int], launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "count_splits", lambda *shapes: 3)
    monkeypatch.setattr(grids, "count_head_splits", lambda *shapes: 2)
    check(replace(TRAINED, head_dim=head_dims[0], head_dim_v=head_dims[1], seqlens_k=(300,), causal=True))
    assert {one.fields["splits"] for one in launches.seen if one.variant.entry == "forward"} == {3}


# Of `tune`, and of 192 and 256 channels.
STAGED = {
    64: {entry: Tile(32, 8, 1, 1, stages=3) for entry in ("forward", "dkdv", "dq")},
    192: {"forward": Tile(32, 8, 1, 1, stages=3), "dkdv": Tile(32, 8, 1, 1, roles=True, stages=2)},
    256: {"forward": Tile(16, 8, 1, 1, stages=3), "dkdv": Tile(16, 8, 1, 1, roles=True, stages=3)},
}


@NEEDS_EMULATOR
@pytest.mark.parametrize(
    ("number", "head_dim", "dtype", "mask", "missing"),
    some_of(pairwise((75,), STAGED, ("float16", "bfloat16"), MASKS, (0, 3)), 6),
)
def test_kernels_with_several_stages_are_right_under_every_mask(
    head_dim: int, dtype: str, mask: str, missing: int, launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = variants.choose_tile
    monkeypatch.setattr(variants, "choose_tile", lambda *asked: STAGED[head_dim].get(asked[0]) or usual(*asked))
    check(replace(TRAINED, head_dim=head_dim - missing, head_dim_v=head_dim - missing, dtype=dtype, **MASKS[mask]))
    staged = {one.variant.entry for one in launches.seen if dict(one.variant.macros).get("STAGES")}
    assert staged >= set(STAGED[head_dim])


# ---- shared memory


@pytest.mark.parametrize("number", [75, 80, 90])
def test_tiles_of_every_size_fit_the_shared_memory_of_a_multiprocessor(number: int) -> None:
    most = {75: 64, 80: 163, 90: 227}[number] * 1024
    for D, few_rows, DV, entry in itertools.product(
        HEAD_DIMS, (False, True), (0, *HEAD_DIMS), ("forward", "dkdv", "dq")
    ):
        kind = Kind(number, FP16, D, few_rows=few_rows, head_dim_v=DV or D)
        variant = getattr(variants, entry)(kind)
        assert variant.shared <= most, (kind, variant)
        if number == 75:
            assert variant.shared * offline.blocks(variant) <= most, (kind, variant)


# ---- what is asked for


def test_a_head_dim_takes_the_next_size_and_no_larger_one() -> None:
    assert [variants.size_of(head_dim) for head_dim in (1, 16, 17, 40, 72, 96, 104, 129, 200, 256, 257)] == [
        16, 16, 32, 48, 80, 96, 112, 160, 224, 256, 512,
    ]  # fmt: skip
    assert all(size % 16 == 0 and math.gcd(size, 128) >= 16 for size in HEAD_DIMS)
