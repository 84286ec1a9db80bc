"""The judge finds every mutant, its oracle matches flash-attn's answers, and each step of the ladder is right."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_attn_compat import flash_attn_interface
from tests.forms.plain import pairwise, some
from tests.forms.support import compare_quickly
from tests.verify import mutants
from verify import inputs, ladder, oracle
from verify.call import Answer, Call
from verify.cases import Case
from verify.cli import main
from verify.drawing import random_problem
from verify.examination import Examination
from verify.judge import against_fp64, against_official, right_answer
from verify.problems import FUNCTIONS, Problem
from verify.recorded import recorded_cases, recorded_errors
from verify.steps import PAPER, STEPS
from verify.timing import allocations

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


@pytest.mark.parametrize("implementation", some(MUTANTS, 4), indirect=True)  # FOUND, below, has them all
def test_a_mutant_fails_some_problem(implementation: None, examinations: list[Examination]) -> None:
    assert any(examination.judge("reference").failures for examination in examinations)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("implementation", ["correct"], indirect=True)
def test_the_implementation_they_are_made_from_passes_every_problem(
    implementation: None, every: int, examinations: list[Examination]
) -> None:
    assert len(examinations) > 45
    complaints = {repr(e.problem): e.judge("reference").failures for e in examinations[::every]}
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


# ---------------------------------------------------------------- deliberately wrong implementations

# mutant: the cases to run (-k), and quantities that must be among those found wrong
FOUND = {
    "left_edge_one_too_far": ("window sq", {"out", "dk", "softmax_lse"}),
    "left_edge_one_too_near": ("window sq", {"out", "dk", "softmax_lse"}),
    "right_edge_one_too_far": ("func causal sq", {"out", "dk", "softmax_lse"}),
    "right_edge_one_too_near": ("func causal sq", {"out", "dk", "softmax_lse"}),
    "top_left_causal": ("func causal sq", {"out", "dq", "softmax_lse"}),
    "softcap_before_scale": ("func softcap fp16", {"out", "softmax_lse"}),
    "alibi_sign": ("func alibi fp16", {"out", "softmax_lse"}),
    "alibi_softcapped": ("softcap+alibi", {"out", "softmax_lse"}),
    "tiled_heads": ("func causal gqa fp32", {"out", "dk", "dv"}),
    "log2_lse": ("func softcap fp16", {"softmax_lse"}),
    "fp16_accumulation": ("8192 keys one-sided", {"out"}),
    "unwindowed_backward": ("window sq", {"dq", "dk", "dv"}),
    "stale_key_tile": ("func causal gqa fp32", {"out", "dk"}),
    "stored_maximum_lost": ("func causal gqa fp32", {"softmax_lse"}),
    "cache_one_row_late": ("kv_decode,kvcache decode", {"k_cache", "v_cache", "out"}),
    "dropout_unscaled": ("func dropout fp16", {"out"}),
    "dropout_of_scores": ("func dropout fp16", {"out"}),
    "dead_rows_average": ("func causal sq", {"out"}),
    "dead_rows_minus_inf": ("func causal sq", {"softmax_lse"}),
    "scale_of_padded_head_dim": ("func head_dim 52,func head_dim 13", {"out", "softmax_lse"}),
    "no_maximum_subtracted": ("func large logits", {"out"}),
    "rotary_halves_swapped": ("kv_rotary,kvcache rotary halves", {"out", "k_cache"}),
    "leftpad_ignored": ("leftpad", {"out"}),
    "aligned_to_longest": ("varlen causal skewed", {"out", "softmax_lse"}),
    "gradient_of_one_group_head": ("func causal gqa fp32", {"dk", "dv"}),
    "values_share_a_scale": ("func sizes gqa bf16", {"out", "dq"}),
    "upstream_shares_a_scale": ("func sizes gqa bf16", {"dq", "dk", "dv"}),
    "scores_share_a_scale": ("func sizes gqa bf16", {"dq"}),
    "neighbouring_head_leaks": ("func sizes gqa fp32", {"out"}),
    "largest_of_all_sequences": ("func inf in v of one,varlen nan in v of one", {"out", "dq"}),
    "padding_times_zero": ("varlen nan outside,kvcache nan behind the end fp16", {"out"}),
}
# These leave the other quantities right, and verify must say so.
UNTOUCHED = {
    "log2_lse": {"out", "dq", "dk", "dv"},
    "unwindowed_backward": {"out", "softmax_lse"},
    "dead_rows_minus_inf": {"out", "dq", "dk", "dv"},
    "gradient_of_one_group_head": {"out", "softmax_lse", "dq"},
    "upstream_shares_a_scale": {"out", "softmax_lse"},
}


def test_every_mutant_has_an_expectation():
    defined = {name for name, value in vars(mutants).items() if isinstance(value, mutants.Naive)}
    assert defined == {*FOUND, "correct"}


@pytest.mark.thorough  # CI has `verify --quick` judge the package itself
def test_the_right_implementation_passes_every_quick_case(tmp_path):
    code, rows = compare_quickly("tests.verify.mutants:correct", tmp_path)
    others = {case: row["verdict"] for case, row in rows.items() if row["verdict"] != "pass"}
    assert set(others.values()) == {"declined"} and all("e4m3" in case or "e5m2" in case for case in others)
    assert code == 0 and len(rows) > 62


@pytest.mark.parametrize("mutant", FOUND)
def test_a_wrong_implementation_is_found_in_the_quantity_that_is_wrong(mutant, tmp_path):
    cases, expected = FOUND[mutant]
    code, rows = compare_quickly(f"tests.verify.mutants:{mutant}", tmp_path, cases)
    wrong = {check["quantity"] for row in rows.values() for check in row["checks"] if not check["ok"]}
    assert code == 1
    assert expected <= wrong
    assert not wrong & UNTOUCHED.get(mutant, set())


def test_the_command_names_the_case_that_a_mutant_fails(tmp_path, capsys):
    assert compare_quickly("tests.verify.mutants:top_left_causal", tmp_path, "causal_sq_lt_sk")[0] == 1
    shown = capsys.readouterr().out
    assert "causal_sq_lt_sk" in shown and "FAIL" in shown


# ---------------------------------------------------------------- verify ladder

QUICK = ["--repeats", "1", "--heads", "1", "--head-dim", "8"]


@pytest.mark.parametrize(
    ("step", "sizes", "causal", "dtype"),
    pairwise(STEPS, [(50, 50, 2), (21, 50, 1), (50, 21, 1)], [False, True], ["bfloat16", "float32"]),
)
def test_a_step_is_right_for_blocks_that_do_not_divide_the_lengths(step, sizes, causal, dtype):
    n, keys, group = sizes
    lengths = {"seqlens_q": (n, n), "seqlens_k": (keys, keys)}
    problem = Problem(**lengths, group=group, head_dim=24, dtype=dtype, causal=causal, backward=False)
    examination = Examination(problem)

    def of_size(q, k, v, causal):
        return STEPS[step](q, k, v, causal=causal, block_rows=12, block_columns=17)

    assert [check for check in examination.checks(examination.ask(of_size)) if not check.ok] == []


@pytest.mark.parametrize(
    ("step", "growth"),
    [("naive", 16), ("blocked matmul", 16), ("fused rows", 4), ("online tiles", 4)],
)
def test_memory_grows_as_the_step_says(step, growth):
    def peak(n: int) -> int:
        q, k, v = Problem(seqlens_q=(n,), seqlens_k=(n,)).build().qkv
        found = allocations(lambda: STEPS[step](q, k, v, block_rows=32, block_columns=32))
        assert found is not None
        return found.peak

    # four times the length: 16 times the memory where all scores are kept, 4 times at most where they are not
    measured = peak(256) / peak(64)
    assert growth / 2 < measured < growth * 1.1 if growth == 16 else measured < growth * 1.1


def _with(monkeypatch, *rungs):
    monkeypatch.setattr(ladder, "rungs", lambda rows, columns: [ladder.rung(*each) for each in rungs])


def test_a_wrong_step_fails_and_one_without_memory_is_noted(monkeypatch, capsys):
    def greedy(q, k, v, causal):
        raise torch.cuda.OutOfMemoryError("planted")

    def broken(q, k, v, causal):
        raise ZeroDivisionError("planted")

    _with(monkeypatch, ("wrong", lambda q, k, v, causal: q), ("right", STEPS["naive"]), ("broken", broken))
    assert main(["ladder", "--n", "32", *QUICK]) == 1
    shown = capsys.readouterr().out
    assert "WRONG OR FAILED  N = 32 wrong" in shown and "N = 32 broken: ZeroDivisionError: planted" in shown
    _with(monkeypatch, ("greedy", greedy))
    assert main(["ladder", "--n", "32", *QUICK]) == 0
    assert "out of memory" in capsys.readouterr().out


def test_the_command_writes_every_step_at_every_length_and_draws_it(tmp_path, capsys):
    saved = tmp_path / "a.json"
    arguments = ["--n", "24", "6", "12", "--br", "7", "--bc", "9", *QUICK, "--json", str(saved)]
    assert main(["ladder", *arguments]) == 0
    data = json.loads(saved.read_text())
    found = {(row["contestant"], row["workload"]): row for row in data["rows"]}
    names = [*STEPS, "PyTorch SDPA", "flash_attn_compat"]
    assert set(found) == {(name, f"N = {n}") for name in names for n in (6, 12, 24)}
    for row in found.values():
        assert row["verdict"]["ok"] and row["forward"]["median_ms"] > 0 and row["memory_mib"] > 0
    assert "tiles of 7 rows x 9 keys" in data["environment"]["problem"]
    assert [picture["title"] for picture in data["pictures"]] == ["Speed, forward", "Peak memory, forward"]
    lines = dict(data["pictures"][0]["lines"])
    assert [*lines] == [*PAPER.values(), "PyTorch SDPA", "flash_attn_compat"] and [*PAPER] == [*STEPS]
    assert [n for n, _ in lines["online tiles: FlashAttention-2, algorithm 1"]] == [6, 12, 24]
    assert "PASS" in capsys.readouterr().out


def test_a_missing_fp64_is_found_out_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(inputs, "checked_devices", lambda wanted: wanted)
    assert main(["ladder", "--device", "mps", "--dtype", "fp64"]) == 2
    assert "mps has no fp64" in capsys.readouterr().err
