"""How a call is dealt out to blocks: few rows to the decode kernel, keys and heads to as many blocks as a GPU holds."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat import flash_attn_with_kvcache
from flash_attn_compat.backends.fused import variants
from flash_attn_compat.backends.fused.variants import BF16_AS_FP16, FP16, Kind
from tests import fused_on_cpu
from tests.kernels import offline

T4 = 40  # multiprocessors


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
