"""Random problems through every backend against the fp64 oracle: out, LSE, all gradients, the caches left behind.

The same problems every time, so that a red run is a change and not the dice; tests/fuzz.py rolls them by the thousand
and makes a failure small.
"""

from __future__ import annotations

import pytest

from flash_attn_compat.backends import BACKENDS
from tests.fuzz import must_serve
from verify.drawing import random_problem
from verify.examination import Examination
from verify.problems import KINDS

FIRST = 10_000  # numbers that test_judge.py and the fuzzer's first minutes do not see


def _problems(kind: str) -> int:
    return 40 if kind in ("dense", "varlen", "kvcache") else 24


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_agrees_with_the_oracle(kind: str, part: int) -> None:
    complaints = []
    for number in range(FIRST + part, FIRST + _problems(kind), 2):
        examination = Examination(problem := random_problem(number, (kind,)))
        for backend in BACKENDS:
            verdict = examination.judge(backend.name)
            complaints += [f"{problem} on {backend.name}: {failure}" for failure in verdict.failures]
            if verdict.refused and must_serve(problem, backend.name):
                complaints.append(f"{problem}: {backend.name} refused: {verdict.refused}")
    assert not complaints, "\n".join(complaints)
