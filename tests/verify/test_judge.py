"""The judge finds every mutant, and its oracle matches flash-attn's answers from an H200."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_attn_compat import flash_attn_interface
from tests.verify import mutants
from verify import oracle
from verify.call import Answer, Call
from verify.cases import Case
from verify.drawing import random_problem
from verify.examination import Examination
from verify.judge import against_fp64, against_official, right_answer
from verify.problems import FUNCTIONS, Problem
from verify.recorded import recorded_cases, recorded_errors

# Accumulating in fp16 costs no more than the plain computation in fp16 does, which is the bound.
MUTANTS = [
    name
    for name, value in vars(mutants).items()
    if isinstance(value, mutants.Naive) and name not in ("correct", "fp16_accumulation")
]


def _within_the_mutants_reach(p: Problem) -> bool:
    """The small implementation they are made from knows no empty sequences, private functions or rubbish in tables."""
    wide = any(side >= max(p.seqlens_k) for side in p.window) and max(p.seqlens_q) > min(p.seqlens_k, default=0)
    return (
        p.kind != "private_varlen" and p.dtype != "float64" and not (p.poison and p.page_size)
        and all(p.seqlens_k) and all(p.seqlens_q) and max(p.seqlens_k) < 300 and not wide
    )  # fmt: skip


@pytest.fixture(scope="module")
def examinations() -> list[Examination]:
    return [Examination(problem) for problem in map(random_problem, range(260)) if _within_the_mutants_reach(problem)]


@pytest.fixture
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = getattr(mutants, request.param)
    for function in set(FUNCTIONS.values()) - {"_flash_attn_varlen_forward"}:
        monkeypatch.setattr(flash_attn_interface, function, getattr(mutant, function))


@pytest.mark.parametrize("implementation", MUTANTS, indirect=True)
def test_a_mutant_fails_some_problem(implementation: None, examinations: list[Examination]) -> None:
    assert any(examination.judge("reference").failures for examination in examinations)


@pytest.mark.parametrize("implementation", ["correct"], indirect=True)
def test_the_implementation_they_are_made_from_passes_every_problem(
    implementation: None, examinations: list[Examination]
) -> None:
    assert len(examinations) > 45
    complaints = {repr(e.problem): e.judge("reference").failures for e in examinations}
    assert not {problem: failures for problem, failures in complaints.items() if failures}


@pytest.mark.parametrize(
    ("score", "converted", "may_be_lost"),
    [(-75.0, False, False), (-75.0, True, True), (-85.0, False, True)],
    ids=["1e-34", "1e-34 where bf16 is converted", "below fp32's normal numbers"],
)
def test_only_a_probability_that_the_arithmetic_cannot_hold_may_be_lost(
    score: float, converted: bool, may_be_lost: bool
) -> None:
    """The first key is dropped; of the second, whose probability is exp(score - 2.8), nothing arrives."""
    problem = Problem(seqlens_q=(1,), seqlens_k=(2,), dtype="bfloat16", dropout_p=0.9, return_attn_probs=True)
    examination = Examination(problem)
    examination.call.q.fill_(1.0)
    examination.call.args["k"].copy_(torch.tensor([[[[1.0]], [[score * 8**-0.5]]]]))
    examination = Examination(examination.call)
    answer = examination.ask(flash_attn_interface.flash_attn_func)
    keep = torch.tensor([False, True]).view(1, 1, 1, 2)
    right = right_answer(examination.untouched, keep, converted)
    lost = replace(
        answer, out=torch.zeros_like(answer.out), grads={n: torch.zeros_like(g) for n, g in answer.grads.items()}
    )
    assert [check.quantity for check in against_fp64(right, lost) if not check.ok] == (
        [] if may_be_lost else ["out", "dq", "dk", "dv"]
    )


@pytest.mark.parametrize(("steps", "is_right"), [(1.0, True), (4.0, False)])
def test_a_probability_may_be_rounded_before_dropout_divides_it(steps: float, is_right: bool) -> None:
    """The first key, whose probability is nearly 1, is dropped; the second's is some steps of 2^-24."""
    problem = Problem(seqlens_q=(1,), seqlens_k=(2,), dtype="float16", dropout_p=0.9, backward=False)
    examination = Examination(problem)
    examination.call.q.fill_(1.0)
    examination.call.args["k"].copy_(torch.tensor([[[[0.0]], [[-15.0 * 8**-0.5]]]]))
    examination.call.args["v"].fill_(1.0)
    examination = Examination(examination.call)
    answer = examination.ask(flash_attn_interface.flash_attn_func)
    right = right_answer(examination.untouched, torch.tensor([False, True]).view(1, 1, 1, 2))
    rounded = right.exact.parts["out"] + steps * 2.0**-24 / (1 - problem.dropout_p)
    checks = against_fp64(right, replace(answer, out=rounded.half(), softmax_lse=None))
    assert [check.ok for check in checks if check.quantity == "out"] == [is_right]


def test_an_exception_is_a_failure_and_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**kwargs: object) -> torch.Tensor:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(flash_attn_interface, "flash_attn_func", broken)
    verdict = Examination(Problem()).judge("reference")
    assert verdict.failures == ["ZeroDivisionError: broken"] and not verdict.refused


def test_inputs_are_examined_on_their_own_device() -> None:
    examination = Examination(Problem(kind="varlen", max_seqlen_as="tensor"))
    examination.judges = "meta"  # stands for a GPU: a length that comes as a tensor stays on the host
    assert examination.written() == []


CACHE = Problem(kind="kvcache", seqlens_q=(1,), seqlens_k=(3,), capacity=8, new_keys=1)
DROPOUT = Problem(dropout_p=0.5)
GAP = Problem(kind="varlen", gap=(0, 1))


@pytest.mark.parametrize(
    ("problem", "quantity", "spoil"),
    [
        (CACHE, "v_cache", lambda x: replace(x, caches={**x.caches, "v_cache": x.caches["v_cache"] + 1})),
        (CACHE, "softmax_lse", lambda x: replace(x, softmax_lse=x.softmax_lse.double())),
        (CACHE, "out", lambda x: replace(x, out=x.out.double())),
        (DROPOUT, "dk", lambda x: replace(x, grads={**x.grads, "k": x.grads["k"][:, 1:]})),
        (DROPOUT, "S_dmask", lambda x: replace(x, s_dmask=x.s_dmask[..., :64])),
        (GAP, "out", lambda x: replace(x, out=torch.cat([x.out[:-1], x.out[:1]]))),
    ],
)
def test_an_answer_of_another_form_or_with_extra_results_is_wrong(
    problem: Problem, quantity: str, spoil: Callable[[Answer], Answer]
) -> None:
    examination = Examination(problem)
    answer = examination.ask(getattr(flash_attn_interface, examination.call.fn))
    assert [check.quantity for check in examination.checks(answer) if not check.ok] == []
    assert [check.quantity for check in examination.checks(spoil(answer)) if not check.ok] == [quantity]


# ---------------------------------------------------------------- the oracle

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
