"""How a call is dealt out to blocks: few rows to the decode kernel, keys and heads to as many blocks as a GPU holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import flash_attn_with_kvcache
from flash_attn_compat.backends.fused import launcher, variants
from flash_attn_compat.backends.fused.variants import BF16_AS_FP16, FP16, Kind
from tests import fused_on_cpu
from tests.kernels import offline
from verify.examination import Examination
from verify.problems import Problem

T4 = 40  # multiprocessors
TRAINED = Problem(seqlens_q=(70,), seqlens_k=(83,), nheads_k=1, group=5, head_dim=32, dtype="float16")


@pytest.mark.parametrize("vec", [8, 1])
@pytest.mark.parametrize("D", variants.HEAD_DIMS)
def test_decode_asks_for_no_more_blocks_than_turings_shared_memory_holds(D: int, vec: int) -> None:
    for type in (FP16, BF16_AS_FP16):
        variant = variants.decode(Kind(75, type, D, vec=vec))
        found = variants.splits(variant, 1, 2**20, T4)
        assert found % T4 == 0 and found // T4 * variant.shared <= offline.SHARED_MEMORY[75]
        assert found // T4 == offline.blocks(variant), "what the registers are bounded for"


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
def test_keys_are_read_for_sixteen_rows_at_once_whatever_the_heads(
    rows: int, nheads: int, nheads_k: int, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = fused_on_cpu.record(monkeypatch)
    q, cache = torch.zeros(1, rows, nheads, 64).half(), torch.zeros(1, 64, nheads_k, 64).half()
    flash_attn_with_kvcache(q, cache, cache, cache_seqlens=64, causal=True)
    assert launches.entries == [entry]
    if entry == "decode":
        assert launches.last.fields["tiles"] == -(-rows * nheads // nheads_k // 16)


# ---- few key heads: blocks share the query heads of a group


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("D", variants.HEAD_DIMS)
@pytest.mark.parametrize("group", [2, 5, 32, 71])
def test_no_block_is_without_a_head_and_their_work_is_even(group: int, D: int, local: bool) -> None:
    variant = variants.dkdv(Kind(75, FP16, D, local=local))
    for blocks in (1, 7, 32, 64, 500):
        splits = variants.head_splits(variant, blocks, group, 2048, T4)
        each = -(-group // splits)
        assert 0 < group - (splits - 1) * each <= each
        assert splits == 1 or splits * blocks <= T4 * offline.blocks(variant) * (1 + local)


def test_one_key_head_for_all_queries_fills_a_small_gpu() -> None:
    variant = variants.dkdv(Kind(75, FP16, 64))
    assert variants.head_splits(variant, 32, 16, 2048, T4) == 2
    assert variants.head_splits(variant, 32, 1, 2048, T4) == 1
    assert variants.head_splits(variant, 32, 16, 17, T4) == 1, "too few rows to be worth it"


GROUPS = {
    "full": TRAINED,
    "causal": replace(TRAINED, causal=True, seqlens_k=(70,)),
    "head_dim 128, two key heads, two sequences": replace(
        TRAINED, head_dim=128, nheads_k=2, seqlens_q=(33, 33), seqlens_k=(70, 70), window=(40, 10)
    ),
    "head_dim 256, in parts": replace(TRAINED, head_dim=256, seqlens_q=(33,), causal=True),
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


@pytest.mark.parametrize(("gpu", "name"), [*((75, name) for name in GROUPS), (90, "causal"), (90, "packed")])
def test_gradients_are_right_where_blocks_share_a_groups_heads(
    gpu: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "head_splits", lambda *shapes: 3)
    launches = fused_on_cpu.emulate(monkeypatch, gpu)
    with flash_attn_compat.use_backend("fused"):
        verdict = Examination(GROUPS[name]).judge("fused")
    assert not verdict.failures and not verdict.refused, verdict
    assert [launch.fields["splits"] for launch in launches.seen if launch.variant.entry == "dkdv"] == [3]
    (workspace,) = launcher._workspaces.values()
    assert workspace[launcher.PARTS_AT :].any() and not workspace[: launcher.PARTS_AT].any()
