"""What flash-attn 2.8.3 answered on an H200, asked of every backend of a CPU and of the fused kernels' sources."""

from __future__ import annotations

import pytest

from flash_attn_compat.backends import BACKENDS
from tests import fused_on_cpu
from verify.cases import Case
from verify.examination import Examination
from verify.implementations import Backend, NotSupported
from verify.judge import Check, against_official
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


@cases
def test_the_kernels_give_the_recorded_answer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch)
    assert wrong(case, "fused") == []
    assert launches.seen


def test_the_backends_without_limits_are_among_those_tested() -> None:
    assert {"chunked", "reference"} <= set(ON_CPU)
