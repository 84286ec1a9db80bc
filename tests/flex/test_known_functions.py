"""The functions that people run flex_attention with, and random ones, against PyTorch's composition in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from flash_attn_compat import explain
from tests.flex import calls, fuzz, known_functions
from tests.flex.known_functions import BATCH, HEADS, ROWS, Case, make_cases
from tests.forms.plain import some
from tests.kernels.fused_on_cpu import LaunchRecord

TOKENS = 144
GYM = known_functions.collection(1, 1, TOKENS)
NAMES = [*make_cases()]
SERVED = [name for name, case in make_cases().items() if case.reason is None]


@pytest.mark.parametrize("name", some(GYM, 8))
def test_an_entry_of_attention_gym_is_right_forward_and_backward(name: str, served: LaunchRecord) -> None:
    batch, heads = 2, 2
    qkv = calls.tensors(batch, heads, 1, TOKENS, TOKENS, seed=len(name))
    score_mod, mask_mod, per_head = known_functions.collection(batch, heads, TOKENS)[name]
    mask = mask_mod and calls.make_mask(mask_mod, *qkv[:2], per_head=per_head)
    found, right = calls.call(qkv, score_mod, mask), calls.in_fp32(qkv, score_mod, mask)
    assert served.entries == ["forward", "delta", "dkdv", "dq"]
    calls.assert_close(found, right, qkv[0].dtype)


@pytest.mark.parametrize("seed", some((1, 0, *range(2, 9)), 9))
def test_random_functions_are_right(seed: int, served: LaunchRecord) -> None:
    assert fuzz.mistake(fuzz.make_problem(seed, "cpu")) is None


def problem(case: Case) -> tuple[tuple[torch.Tensor, ...], BlockMask | None]:
    shape: dict[str, Any] = {"batch": BATCH, "heads": HEADS, "heads_k": 2, "rows": ROWS, "keys": ROWS, **case.shape}
    qkv = calls.tensors(**shape)
    if case.mask_mod is None:
        return qkv, None
    return qkv, case.change(calls.make_mask(case.mask_mod, *qkv[:2], per_head=case.per_head, block=case.block))


@pytest.mark.parametrize("name", some(NAMES, 6))
def test_a_case_of_pytorchs_is_served_or_declined_as_the_list_says(name: str, served: LaunchRecord) -> None:
    case = make_cases()[name]
    qkv, mask = problem(case)
    call = torch.compile(calls.of_operator(qkv, case.score_mod, mask, options=case.options), backend="eager")
    with torch.no_grad():
        reasons = explain(call, *qkv).reasons["fused"]
    assert bool(reasons) == bool(case.reason) and (case.reason or "") in " ".join(reasons), reasons


@pytest.mark.parametrize("name", some(SERVED, 24))
def test_a_served_case_of_pytorchs_is_right(name: str, served: LaunchRecord) -> None:
    case = make_cases()[name]
    qkv, mask = problem(case)
    has_twins = mask is None or mask.q_num_blocks is not None
    backward = has_twins and name != "autograd_function_in_score_mod"  # whose gradient dynamo of 2.13 fails to trace
    found = calls.call(qkv, case.score_mod, mask, options=case.options, gradients=backward)
    right = calls.in_fp32(qkv, case.score_mod, mask, gradients=backward)
    assert "forward" in served.entries and ("dq" in served.entries) == backward
    calls.assert_close(found, right, qkv[0].dtype)
