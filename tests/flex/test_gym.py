"""The functions that people run flex_attention with, forward and backward, against PyTorch's composition in fp32."""

from __future__ import annotations

import pytest

from tests.flex import calls, fuzz, gym
from tests.forms.plain import some
from tests.kernels.fused_on_cpu import LaunchRecord

TOKENS = 144
NAMES = gym.collection(1, 1, TOKENS)


@pytest.mark.parametrize("name", some(NAMES, 8))
def test_an_entry_of_attention_gym_is_right_forward_and_backward(name: str, served: LaunchRecord) -> None:
    batch, heads = 2, 2
    qkv = calls.tensors(batch, heads, 1, TOKENS, TOKENS, seed=len(name))
    score_mod, mask_mod, per_head = gym.collection(batch, heads, TOKENS)[name]
    mask = mask_mod and calls.make_mask(mask_mod, *qkv[:2], per_head=per_head)
    found, right = calls.call(qkv, score_mod, mask), calls.in_fp32(qkv, score_mod, mask)
    assert served.entries == ["forward", "delta", "dkdv", "dq"]
    calls.assert_close(found, right, qkv[0].dtype)


@pytest.mark.parametrize("seed", some((1, 0, *range(2, 9)), 9))
def test_random_functions_are_right(seed: int, served: LaunchRecord) -> None:
    assert fuzz.mistake(fuzz.make_problem(seed, "cpu")) is None
