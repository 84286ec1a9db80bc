"""Each backend and the kernels against flash-attn 2.8.3's answers from an H200, and on random problems."""

from __future__ import annotations

import pytest

from flash_attn_compat.backends import BACKENDS
from tests.forms.plain import some
from tests.fuzz import must_serve
from tests.kernels import fused_on_cpu
from verify.cases import Case
from verify.drawing import random_problem
from verify.errors import NotSupported
from verify.examination import Examination
from verify.implementations import Backend
from verify.judge import Check, against_official
from verify.problems import KINDS
from verify.recorded import recorded_cases

ON_CPU = [
    backend.name
    for backend in BACKENDS
    if backend.capabilities.devices is None or "cpu" in backend.capabilities.devices
]
cases = pytest.mark.parametrize("case", recorded_cases(), ids=lambda case: case.name)


def wrong(case: Case, backend: str) -> list[Check]:
    examination = Examination(case.problem)
    assert case.official is not None
    with Backend(backend).serving(examination.call) as function:
        answer = examination.ask(function)
    return [check for check in against_official(examination.host, answer, case.official) if not check.ok]


@pytest.mark.parametrize("backend", ON_CPU)
@cases
def test_a_backend_gives_the_recorded_answer(case: Case, backend: str) -> None:
    try:
        assert wrong(case, backend) == []
    except NotSupported as refusal:
        pytest.skip(f"{backend}: {refusal}")


@pytest.mark.parametrize("case", some(recorded_cases(), 8), ids=lambda case: case.name)
def test_the_kernels_give_the_recorded_answer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch)
    assert wrong(case, "fused") == []
    assert launches.seen


def test_the_backends_without_limits_are_among_those_tested() -> None:
    assert {"chunked", "reference"} <= set(ON_CPU)


# ---------------------------------------------------------------- random problems, the same every time


FIRST = 10_000  # numbers that test_judge.py and the fuzzer's first minutes do not see


def _problems(kind: str) -> int:
    return 24 if kind in ("dense", "varlen", "kvcache") else 12


@pytest.mark.parametrize("part", some(range(2), 2))
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
