"""verify's verdict on kernels with one habit or fault: errors without a name, an LSE, no maximum, other precisions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.verify.test_verdicts import judge, row
from verify.cli import main
from verify.compare_report import report
from verify.compare_rows import DECLINED, FAIL, PASS, RAISED
from verify.compare_words import law_words, own_words, worst_words
from verify.examination import Verdict
from verify.judge import Check, broken, difference


def test_the_worst_mistake_is_of_usual_numbers_and_said_absolutely_and_relatively() -> None:
    tiny = Check("dq", "fp64", 1e-9, 1e-12, "planted", size=1e-9)
    unusual = row(PASS, "tiny", sizes=((1.0, 1.0, 1.0, 1.0),))
    rows = [row(FAIL, "usual"), replace(unusual, verdict=Verdict(checks=[tiny]))]
    assert worst_words(rows)[0] == "the worst mistake: out off by 2, 0.5 times its size, where 1 is allowed, in usual"
    assert worst_words(rows[1:])[0].startswith("the worst mistake: dq off by 1e-09, 1 times its size, where 1e-12")


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (Check("out", "fp64", math.nan, 0.5, "a", size=1.0), "NaN or infinite where an error of 0.5 is allowed"),
        (Check("out", "fp64", math.inf, 0.5, "a", size=1.0), "NaN or infinite where an error of 0.5 is allowed"),
        (broken("k", "was written to"), "was written to"),
        (Check("softmax_lse", "official", 3.0, 0.002, "a"), "off by 3 where 0.002 is allowed"),
    ],
)
def test_a_mistake_without_a_finite_number_is_put_into_words(check: Check, words: str) -> None:
    assert check.words == words


def test_a_larger_error_is_worse_than_one_of_a_number_that_should_be_zero() -> None:
    of_zero = Check("dk", "fp64", 1.9, 1e-6, "planted", size=1e-6)
    assert (
        max([of_zero, large := Check("dv", "fp64", 4.1, 1e-3, "planted", size=0.7)], key=lambda each: each.gravity)
        is large
    )
    assert of_zero.words == "off by 1.9 where 1e-06 is allowed"
    half = Check("dq", "fp64", 5.0, 1e-3, "planted", size=10.0)
    assert of_zero.gravity > half.gravity < broken("q", "was written to").gravity


def test_an_infinity_in_the_place_of_a_number_is_an_infinite_difference() -> None:
    assert difference(torch.tensor([1.0, torch.inf]), torch.tensor([torch.inf, torch.inf])).tolist() == [math.inf, 0.0]


@pytest.mark.parametrize(
    ("causal", "others", "said"),
    [
        ([FAIL] * 3, [PASS], ["of the problems not declined, all with causal are wrong, and no others"]),
        ([FAIL] * 3 + [DECLINED], [PASS], ["of the problems not declined, all with causal are wrong, and no others"]),
        ([FAIL] * 3 + [PASS], [PASS], []),
        ([FAIL] * 2, [PASS], []),
        ([RAISED] * 3, [PASS], ["of the problems not declined, all with causal raise an error, and no others"]),
        ([FAIL] * 3, [RAISED], ["of the problems not declined, all with causal are wrong, and no others"]),
        ([FAIL] * 3 + [RAISED], [PASS],
         ["of the problems not declined, all with causal are wrong or raise an error, and no others"]),
        ([FAIL] * 3, [], []),
    ],
)  # fmt: skip
def test_a_law_holds_against_all_other_outcomes_and_needs_three_of_its_own(causal, others, said) -> None:
    rows = [*(row(outcome, causal=True) for outcome in causal), *map(row, others)]
    assert law_words(rows) == said


def test_a_problem_right_to_fp32_or_not_asked_speaks_against_a_law() -> None:
    wrong = [row(FAIL, causal=True)] * 3 + [row(PASS)]
    to_fp32 = replace(row(PASS, causal=True), verdict=Verdict(checks=[Check("out", "fp64", 0.0, 1.0)], right_to="fp32"))
    assert law_words([*wrong, to_fp32]) == [] == law_words([*wrong, replace(row(PASS, causal=True), unasked=True)])


@pytest.mark.parametrize(("right", "said"), [(0, True), (1, True), (2, False)])
def test_half_precision_explains_wrong_fp32_answers_unless_as_many_are_right(right: int, said: bool) -> None:
    near = replace(row(FAIL), verdict=replace(row(FAIL).verdict, as_near_as="fp16"))
    assert (
        any("it computes in half precision" in line for line in own_words([near, near, *[row(PASS)] * right])) is said
    )


def test_wrong_answers_share_a_line_if_their_errors_are_of_one_kind_and_the_plainest_leads() -> None:
    def wrong(name: str, error: float):
        checks = [Check("out", "fp64", error, 1.0, f"error {error}", size=4.0), Check("dq", "fp64", 0.0, 1.0)]
        return replace(row(FAIL, name), verdict=Verdict(checks=checks))

    rows = [wrong("plain", 4.7), wrong("odd", math.inf), wrong("long", 9.0), wrong("large", math.nan)]
    table = next(each for each in report(rows, {}, False, [], "mine").tables if each.title.startswith("Wrong"))
    assert [cells[0] for cells in table.rows] == ["plain and 1 more like it", "odd and 1 more like it"]


# Kernels, the cases to judge, the exit code, what their author reads, and what nobody says.
MORE = {
    "with_lse": ("func causal gqa,causal sq", 0, ["fp64, judged separately: 1 answer is right to fp32"], ["FAIL"]),
    "wrong_lse": (
        "func causal gqa,func causal sq",
        1,
        [
            "only softmax_lse is wrong",
            "softmax_lse is in log2, 1.4427 times",
            "locate cannot show this",
            "output 6 pass softmax_lse 6 FAIL gradients 6 pass",
        ],
        ["look closer"],
    ),
    "no_maximum": (
        "plain 64 d64,large scores,d64 large,large logits fp32",
        1,
        ["the worst mistake: out NaN or infinite where", "all with large scores are wrong", "--magnitude 6.3"],
        [],
    ),
    "empty_rows_are_nan": (
        "causal sq,full sq,plain 64",
        1,
        ["of the problems not declined, all with rows without keys are wrong, and no others"],
        ["half precision"],
    ),
    "bf16_inside": (
        "plain 64 d64 fp16,plain 64 d64 causal,plain 128 d64 causal fp32",
        1,
        ["as near as bf16 comes: it rounds to bf16, or keeps sums in fp16", "wrong in fp32, but as near as"],
        ["PASS"],
    ),
    "raising_once": (
        "plain 64 d64,func causal sq,causal gqa,full sq",
        1,
        ["of the problems not declined, all with causal are wrong or raise an error, and no others"],
        ["causal are wrong, and", "causal raise an error"],
    ),
    "by_place": ("plain 64 d64,scale 0.3 fp16", 0, ["PASS: 6 of 6", "softmax_scale 2 pass"], ["declined"]),
    "_Forward.apply": (
        "plain 64 d64,scale 0.3 fp16",
        0,
        ["PASS: 6 of 6", "gradients not judged: 6 answers have none (NotImplementedError: You must implement"],
        ["FAIL", "dq missing"],
    ),
    "without_backward": (
        "plain 64 d64",
        0,
        ["PASS: 4 of 4", "gradients not judged: 4 answers have none"],
        ["declined"],
    ),
    "through_numpy": (
        "plain 64 d64",
        0,
        ["PASS: 4 of 4", "gradients not judged: 4 answers have none (RuntimeError: Can't call numpy()"],
        ["errors, no answers"],
    ),
    "one_head_dim": (
        "plain 64 d64,value 32",
        0,
        ["declined: 1 x ValueError: v must have q's head_dim (flash-attn refuses v of another head_dim too)"],
        ["look closer"],
    ),
    "v_cut_off": ("plain 64 d64,value 32", 1, ["v of another head_dim 1 FAIL", "head_dim 64 4 pass"], []),
    "on_a_gpu": (
        "plain 64 d64",
        1,
        ["no answer on cpu, where its errors speak of a GPU: it needs --device cuda", "TOO LITTLE TO SAY: no case ran"],
        [],
    ),
    "asserting": (
        "plain 64,plain 128",
        1,
        [
            "x AssertionError: assert q.dtype == torch.float16",
            "x ValueError: head_dim must be 64",
            "a case counts as declined, not as wrong, if",
            "FAIL: 8 of 8 answers right, 10 raised an error, 2 declined",
        ],
        ["look closer", "locate cannot", "the worst mistake: "],
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_a_kernel_with_one_more_habit_or_fault_gets_its_verdict(name, tmp_path, capsys) -> None:
    cases, code, said, unsaid = MORE[name]
    judged = judge(name, tmp_path, capsys, cases)
    assert [part for part in said if part not in judged.told] == [], judged.told
    assert not [part for part in unsaid if part in judged.told] and judged.code == code
    if "look closer" in judged.told:
        assert main(judged.advice) == 1
        capsys.readouterr()
