"""What flash-attn 2.8.3 answered on an H200, asked of every backend that runs on a CPU."""

from __future__ import annotations

import pytest

from flash_attn_compat.backends import BACKENDS
from verify.implementations import Backend, NotSupported
from verify.judge import against_official
from verify.problem import Problem, solve
from verify.recorded import recorded_problems

ON_CPU = [
    backend.name
    for backend in BACKENDS
    if backend.capabilities.devices is None or "cpu" in backend.capabilities.devices
]


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("problem", recorded_problems(), ids=lambda problem: problem.name)
def test_a_backend_gives_the_recorded_answer(problem: Problem, backend: str):
    try:
        with Backend(backend).serving(problem) as function:
            answer = solve(function, problem, "cpu")
    except NotSupported as refusal:
        pytest.skip(f"{backend}: {refusal}")
    assert [check for check in against_official(problem, answer, problem.official) if not check.ok] == []


def test_the_backends_without_limits_are_among_those_tested():
    assert {"chunked", "reference"} <= set(ON_CPU)
