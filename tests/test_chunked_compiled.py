"""The step of chunked that FLASH_ATTN_COMPAT_COMPILE=1 compiles, as the compiler gets it."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat.backends import chunked
from flash_attn_compat.engine.compilation import OptionallyCompiled
from tests.support import check_against_oracle, qkv
from verify.drawing import random_problem
from verify.examination import Examination


@pytest.fixture
def compiled_step(monkeypatch):
    """Counts its runs."""
    step, runs = chunked._fused_weights._function, []
    monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: lambda *args: runs.append(1) or function(*args))
    monkeypatch.setattr(chunked, "_fused_weights", OptionallyCompiled(step))
    return runs


def test_random_problems_are_right_with_the_compiled_step(compiled_step):
    for number in range(60):
        problem = random_problem(9000 + number, dtypes=("float32", "float64"))
        verdict = Examination(problem).judge("chunked")
        assert not verdict.failures, (problem, verdict)
    assert compiled_step


@pytest.mark.parametrize("left", [12, 200])
def test_the_compiled_step_is_right_for_a_long_causal_window(compiled_step, left):
    q, k, v = qkv(1, 1100, 1100, h=1, d=16, dtype=torch.float64)
    arguments = {"q": q, "k": k, "v": v, "causal": True, "window_size": (left, 0)}
    check_against_oracle("chunked", "flash_attn_func", arguments)
    assert compiled_step
