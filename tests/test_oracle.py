"""The oracle against what flash-attn 2.8.3 itself answered on an H200, so that the judge is known to be right."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from verify import oracle
from verify.call import Call
from verify.cases import Case
from verify.judge import against_fp64, against_official, right_answer
from verify.recorded import recorded_cases, recorded_errors

cases = pytest.mark.parametrize("case", recorded_cases(), ids=lambda case: case.name)


def _call(case: Case) -> Call:
    assert isinstance(case.problem, Call)
    return case.problem


def test_there_are_62_recorded_answers_and_34_recorded_errors() -> None:
    assert len(recorded_cases()) == 62
    assert len(recorded_errors()) == 34


@cases
def test_the_oracle_and_the_official_answer_pass_by_each_others_criteria(case: Case) -> None:
    assert case.official is not None
    right = right_answer(_call(case))
    checks = against_fp64(right, case.official, "cuda", approximate=True)
    checks += against_official(_call(case), right.exact, case.official)
    assert [check for check in checks if not check.ok] == []


@cases
def test_the_plain_computation_stays_near_the_oracle(case: Case) -> None:
    """The yardstick must be a good computation, or twice its error allows anything."""
    call = _call(case)
    exact, plain = (solver(call.fn, call.args, call.dout) for solver in (oracle.answer, oracle.plain))
    eps = torch.finfo(plain.out.dtype).eps
    for what in ("out", *exact.grads):
        a, b = (x.out if what == "out" else x.grads[what] for x in (exact, plain))
        assert (a - b.double()).abs().max() <= 16 * eps * exact.magnitude(what), what


def test_the_oracle_and_the_judge_share_no_code_with_the_package() -> None:
    folder, left, seen = Path(oracle.__file__).parent, ["oracle", "judge"], set()
    while left:
        name = left.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            own = isinstance(node, ast.ImportFrom) and node.level > 0
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(module.split(".")[0].startswith(("flash_attn", "verify")) for module in modules), name
            if own:
                inside = [module for module in modules if module] or [alias.name for alias in node.names]
                left += [part for part in inside if part not in seen]
    assert seen >= {"oracle", "judge", "call"}
