"""Two groups of a forward's warps share rows and take alternate tiles of keys (cuda/groups.cuh)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_attn_compat.backends.fused.choosing import enumeration, variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, Hints, Kind, Sizes
from flash_attn_compat.backends.fused.choosing.tiles import TWO_GROUPS
from flash_attn_compat.backends.fused.launching import grids
from tests.forms.plain import pairwise, some_of
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.kernels.test_kernels import check
from tests.kernels.test_sizes import MASKS, NEEDS_EMULATOR, TRAINED, launches

__all__ = ["launches"]  # a fixture

# Rows and keys: tiles for one group alone, for both and an odd number of them; sequences without rows or without keys.
OF_GROUPS = (
    ((140,), (1,)), ((140,), (33,)), ((200,), (129,)), ((130,), (290,)), ((129, 0, 1, 77, 5), (70, 9, 99, 129, 0)),
)  # fmt: skip


@NEEDS_EMULATOR
@pytest.mark.parametrize(
    ("number", "head_dim", "dtype", "mask", "lengths", "splits"),
    some_of(
        pairwise((75,), (128, 120, 112), ("float16", "bfloat16"), ("full", "causal", "window"), OF_GROUPS, (1, 3)), 8
    ),
)
def test_two_groups_of_warps_merge_their_results_of_alternate_tiles(
    head_dim: int, dtype: str, mask: str, lengths: tuple[tuple[int, ...], ...], splits: int,
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(grids, "count_splits", lambda *shapes: splits)
    monkeypatch.setattr(variants, "choose_tile", lambda *asked: TWO_GROUPS)
    rows, keys = lengths
    problem = replace(TRAINED, kind="varlen" if len(rows) > 1 else "dense", backward=False, **MASKS[mask])
    check(replace(problem, seqlens_q=rows, seqlens_k=keys, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype))
    assert any(("KEY_GROUPS", 2) in one.variant.macros for one in launches.seen)


@pytest.mark.parametrize("D", [112, 128])
def test_no_call_with_more_than_a_mask_by_position_takes_two_groups(D: int) -> None:
    """Even if `tune` found that tile: with other features the kernel spills, or skips tiles of its own."""
    found = set()
    for kind in enumeration.every_kind(75):
        if kind.D == D and not kind.features.bias_pairs:
            variant = variants.forward(kind.replace(tiles=(("forward", TWO_GROUPS),)))
            found |= {frozenset(variant.macros)} if ("KEY_GROUPS", 2) in variant.macros else set()
    features = {name for macros in found for name, value in macros if value} - {name for name, _ in TWO_GROUPS.macros()}
    assert features == {"D", "TYPE", "VEC", "LOCAL", "COPIED", "KEY_GROUPS"}
    assert all(("VEC", 8) in macros for macros in found)
    flex = variants.forward(Kind(75, FP16, Sizes(D), hints=Hints(tiles=(("forward", TWO_GROUPS),), flex=True)))
    assert ("KEY_GROUPS", 2) not in flex.macros
