"""The compiled step of `chunked`: off by default, as right as the plain one, given up after one failure."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from flash_attn_compat import flash_attn_func, use_backend
from flash_attn_compat.backends import chunked
from flash_attn_compat.backends.compilation import OptionallyCompiled
from verify.drawing import random_problem
from verify.examination import Examination
from verify.problems import Problem


def test_nothing_is_compiled_unless_the_user_says_so(monkeypatch):
    monkeypatch.delenv("FLASH_ATTN_COMPAT_COMPILE", raising=False)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    assert OptionallyCompiled(torch.neg)(torch.ones(1)).item() == -1


@pytest.fixture
def compiled_step(monkeypatch):
    """Counts its runs."""
    step, runs = chunked._fused_weights._function, []
    monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: lambda *args: runs.append(1) or function(*args))
    monkeypatch.setattr(chunked, "_fused_weights", OptionallyCompiled(step))
    return runs


def test_random_problems_are_right_with_the_compiled_step(compiled_step):
    long = Problem(seqlens_q=(1100,), seqlens_k=(1100,), head_dim=16, causal=True, dtype="float64")
    problems = [random_problem(9000 + number, dtypes=("float32", "float64")) for number in range(60)]
    for problem in (*problems, *(replace(long, window=(left, 0)) for left in (12, 200))):
        verdict = Examination(problem).judge("chunked")
        assert not verdict.failures, (problem, verdict)
    assert compiled_step


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_step_that_fails_warns_once_is_not_tried_again_and_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    tried: list[int] = []

    def compiled(function: Callable[..., object], **options: object) -> Callable[..., object]:
        def fails(*args: object) -> None:
            tried.append(1)
            if at_the_end:
                function(*args)
            raise RuntimeError("no compiler here")

        return fails

    q = torch.randn(1, 40, 2, 16)
    with use_backend("chunked"):
        right = flash_attn_func(q, q, q)
        monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
        monkeypatch.setattr(torch, "compile", compiled)
        monkeypatch.setattr(chunked, "_fused_weights", OptionallyCompiled(chunked._fused_weights._function))
        with pytest.warns(RuntimeWarning, match="no compiler here"):
            out = flash_attn_func(q, q, q)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = flash_attn_func(q, q, q)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(again, right)
    assert tried == [1]
