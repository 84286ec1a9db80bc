"""How torch_efficient makes a launch of a call, on a CPU: the kernel is a stand-in with the real one's traps."""

from __future__ import annotations

import pytest

from tests import efficient_kernels
from verify.drawing import random_problem
from verify.examination import Examination, Verdict
from verify.problems import Problem

PROBLEMS = 200


@pytest.fixture(autouse=True)
def kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    efficient_kernels.install(monkeypatch)


def examine(problem: Problem) -> Verdict:
    examination = Examination(problem)
    # Half precision is the GPU's: an LSE may be as far off as its rounded operands allow.
    examination.device = "cuda"
    return examination.judge("torch_efficient")


@pytest.mark.parametrize("first", range(0, PROBLEMS, 50))
def test_random_problems_are_right_or_refused(first: int) -> None:
    served = 0
    for number in range(first, first + 50):
        problem = random_problem(number)
        if problem.dropout_p <= 0:  # the stand-in has none
            verdict = examine(problem)
            assert not verdict.failures, (problem, verdict)
            served += not verdict.refused
    assert served


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("dense", ((40, 40), (65, 65))), ("dense", ((90,), (33,))), ("varlen", ((9, 0, 40), (9, 0, 40)))],
)
def test_grouped_heads_are_right_under_every_mask_it_has(
    kind: str, lengths: tuple[tuple[int, ...], ...], window: tuple[int, int], dtype: str
) -> None:
    problem = Problem(kind, *lengths, window=window, group=2, nheads_k=2, dtype=dtype)
    verdict = examine(problem)
    assert not verdict.failures, verdict
    assert bool(verdict.refused) == (window == (-1, 0) and lengths == ((90,), (33,)))
