"""What the head of flash-attn's repository, version 2.8.4, changed behind 2.8.3."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flash_attn_compat import flash_attn_2_cuda, flash_attn_with_kvcache
from tests.forms.inputs import ints, randn

TABLE = torch.stack((ints(4, 0), ints(1, 3)))
RAW = ("fwd", "varlen_fwd", "bwd", "varlen_bwd")


@pytest.mark.parametrize("name", RAW)
def test_a_raw_function_given_a_generator_raises_flash_attns_words(name: str) -> None:
    function = getattr(flash_attn_2_cuda, name)
    arguments: dict[str, Any] = dict.fromkeys(inspect.signature(function).parameters)
    arguments["gen_"] = torch.Generator()
    with pytest.raises(RuntimeError, match="RNG `generator` argument is no longer supported and must be None"):
        function(**arguments)


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_an_int_cache_seqlens_is_the_length_of_each_sequence_of_q(appends: bool, paged: bool) -> None:
    """The cache has more rows, or pages, than q has sequences."""
    q, caches = randn(2, 1, 4, 16), randn(2, 5, 8, 2, 16)
    where = {"block_table": TABLE} if paged else {"cache_batch_idx": ints(4, 1)}
    new = dict(zip("kv", randn(2, 2, 1, 2, 16))) if appends else {}
    found, expected = (
        (flash_attn_with_kvcache(q, *mine, cache_seqlens=lengths, causal=True, **where, **new), mine)
        for mine, lengths in ((caches.clone(), 6), (caches.clone(), ints(6, 6)))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("as_int", [False, True])
def test_a_length_beyond_the_block_table_raises_before_anything_is_written(appends: bool, as_int: bool) -> None:
    """Two pages of 8 for each sequence: 16 slots, of which an append of one needs the last."""
    q, caches = randn(2, 1, 4, 16), randn(2, 5, 8, 2, 16)
    new = dict(zip("kv", randn(2, 2, 1, 2, 16))) if appends else {}
    longest = 16 if appends else 17
    lengths = longest if as_int else ints(3, longest)
    before = caches.clone()
    words = r"max\(seqlens_k\) \+ seqlen_knew \(= 17\) exceeds the capacity addressable by block_table"
    with pytest.raises(RuntimeError, match=words):
        flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=TABLE, **new)
    assert torch.equal(caches, before)
