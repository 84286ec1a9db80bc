"""What flash-attn 2.8.3 answered on an H200, asked of the fused kernels' very sources, emulated on the CPU."""

from __future__ import annotations

import pytest

from tests import fused_on_cpu
from verify.implementations import Backend
from verify.judge import against_official
from verify.problem import Problem, solve
from verify.recorded import recorded_problems


@pytest.mark.parametrize("problem", recorded_problems(), ids=lambda problem: problem.name)
def test_the_kernels_give_the_recorded_answer(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch)
    with Backend("fused").serving(problem) as function:
        answer = solve(function, problem, "cpu")
    assert [check for check in against_official(problem, answer, problem.official) if not check.ok] == []
    assert launches.seen
