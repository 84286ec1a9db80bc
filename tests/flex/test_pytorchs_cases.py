"""The problems of PyTorch's own tests: served and right, or left to PyTorch for the reason that the list says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from flash_attn_compat import explain
from tests.flex import calls
from tests.flex.pytorchs_cases import BATCH, HEADS, ROWS, Case, make_cases
from tests.forms.plain import some
from tests.kernels.fused_on_cpu import LaunchRecord

NAMES = [*make_cases()]
SERVED = [name for name, case in make_cases().items() if case.reason is None]


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
    backward = mask is None or mask.q_num_blocks is not None
    found = calls.call(qkv, case.score_mod, mask, options=case.options, gradients=backward)
    right = calls.in_fp32(qkv, case.score_mod, mask, gradients=backward)
    assert served.entries[0] == "forward" and ("dq" in served.entries) == backward
    calls.assert_close(found, right, qkv[0].dtype)
