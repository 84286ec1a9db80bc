"""Packed queries and keys of equal lengths in two tensors count as those of one."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat.engine.build import Options, Packing, packed_call
from flash_attn_compat.engine.call import AttentionCall
from tests.support import cumulative, randn


def call(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> AttentionCall:
    q = randn(17, 2, 16)
    return packed_call(q, q, q, Packing(cu_seqlens_q, cu_seqlens_k, 9, 9), Options())


@pytest.mark.parametrize("same", [torch.Tensor.clone, torch.Tensor.contiguous, lambda starts: starts[:]])
def test_equal_lengths_in_two_tensors_are_recognised(same) -> None:
    starts = cumulative(5, 0, 9, 3)
    assert call(starts, same(starts)).equal_lengths


def test_other_lengths_are_not() -> None:
    assert not call(cumulative(5, 0, 9, 3), cumulative(3, 5, 9, 0)).equal_lengths
