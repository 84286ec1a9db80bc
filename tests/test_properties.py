"""Random problems through every backend against the fp64 oracle: out, LSE, all gradients, the caches left behind.

The same problems every time, so that a red run is a change and not the dice; tests/fuzz.py rolls
them by the thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from flash_attn_compat.backends import BACKENDS
from tests.fuzz import must_serve
from verify.drawing import draw_problem
from verify.examination import Examination
from verify.problems import KINDS, Problem

T = TypeVar("T")


class FromHypothesis:
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def pick(self, options: Sequence[T]) -> T:
        return self.draw(st.sampled_from(options))


@st.composite
def problems(draw: Any, kind: str) -> Problem:
    return draw_problem(FromHypothesis(draw), (kind,))


def _every_backend_is_right(problem: Problem) -> None:
    examination = Examination(problem)
    complaints = []
    for backend in BACKENDS:
        verdict = examination.judge(backend.name)
        complaints += [f"{backend.name}: {failure}" for failure in verdict.failures]
        if verdict.refused and must_serve(problem, backend.name):
            complaints.append(f"{backend.name} refused: {verdict.refused}")
    assert not complaints, f"{problem}\n" + "\n".join(complaints)


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_agrees_with_the_oracle(kind: str, part: int) -> None:
    problems_each = 36 if kind in ("dense", "varlen", "kvcache") else 16
    rules = settings(max_examples=problems_each, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    seed(part)(rules(given(problems(kind))(_every_backend_is_right)))()
