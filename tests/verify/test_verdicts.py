"""verify's verdict on a user's kernel: its evidence, its gaps, and the next command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from flash_attn_compat import isolation
from tests.forms.support import compare_quickly
from verify import COMMAND
from verify.cases import Case, generated, plain
from verify.cli import main
from verify.compare_report import report
from verify.compare_rows import DECLINED, FAIL, PASS, RAISED, Row, feature_counts
from verify.compare_words import verdict_words
from verify.examination import Verdict
from verify.features import FEATURES, features_of, shared_by
from verify.implementations import declines
from verify.judge import Check
from verify.native import loads_native_code
from verify.problems import Problem
from verify.recorded import recorded_cases

FILE = str(Path(__file__).with_name("seven_kernels.py"))
CASES = ["--quick", "--device", "cpu", "--no-isolate", "-k", "mqa_cross,func causal gqa"]
FEW = "plain 64 d64,func causal gqa"


class Judged(NamedTuple):
    code: int
    told: str
    rows: dict[str, dict]

    @property
    def advice(self) -> list[str]:
        """The arguments of the locate command that it prints."""
        return shlex.split(self.told.partition(f"look closer: {COMMAND} ")[2].partition(" the worst mistake")[0])


def judge(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], cases: str, *more: str) -> Judged:
    code, rows = compare_quickly(f"{FILE}:{name}", tmp_path, cases, *more)
    return Judged(code, " ".join(capsys.readouterr().out.split()), rows)


# ---- the problems ----------------------------------------------------------------------------------------------------


def test_the_plainest_problems_come_first_and_most_of_them_are_fp16_squares_of_64_and_128() -> None:
    cases = [*plain()]
    squares = {
        (p.seqlens_q[0], p.head_dim, p.group, p.causal) for case in cases if (p := case.problem).dtype == "float16"
    }
    wanted = {(n, d, group, causal) for n in (64, 128, 256, 1024) for d in (64, 128) for group in (1, 2)
              for causal in (False, True)}  # fmt: skip
    assert wanted <= squares and all(n % 16 == 0 for n, *_ in squares)
    assert all(case.problem.seqlens_q == case.problem.seqlens_k for case in cases)
    groups = [case.problem.group for case in cases if case.dtype == "fp16" and case.problem.seqlens_q[0] % 64 == 0]
    assert groups == sorted(groups)


def test_the_quick_problems_have_few_long_ones() -> None:
    assert sum(case.problem.scores for case in plain(quick=True)) < 0.3 * sum(case.problem.scores for case in plain())


@pytest.mark.parametrize(
    ("problem", "features"),
    [
        (Problem(dtype="float16", head_dim=64, seqlens_q=(64,), seqlens_k=(64,)),
         ["fp16", "head_dim 64", "MHA", "no mask", "lengths in 64s", "dense"]),
        (Problem("paged", (3,), (9,), group=2, page_size=4, causal=True, softcap=2.0),
         ["fp32", "another head_dim", "GQA or MQA", "causal", "other lengths", "seqlen_q other than seqlen_k", "packed",
          "softcap", "pages", "pages of no multiple of 256"]),
        (Problem("kvcache", window=(3, 0), causal=True, rotary_dim=4, alibi="h", poison="nan"),
         ["fp32", "another head_dim", "MHA", "causal", "window", "other lengths", "cache", "ALiBi", "rotary",
          "NaN or infinity"]),
        (Problem("varlen", (3, 4), (3, 0), magnitude=6.0),
         ["fp32", "another head_dim", "MHA", "no mask", "other lengths", "seqlen_q other than seqlen_k",
          "no keys at all", "packed", "large scores"]),
        (Problem(head_dim=264, softcap=2.0, dropout_p=0.1),
         ["fp32", "head_dim above 256", "MHA", "no mask", "other lengths", "dense", "softcap", "dropout",
          "softcap with dropout"]),
        (Problem(head_dim=64, head_dim_v=32),
         ["fp32", "v of another head_dim", "MHA", "no mask", "other lengths", "dense"]),
        (Problem(seqlens_q=(4,), seqlens_k=(2,), window=(-1, 1)),
         ["fp32", "another head_dim", "MHA", "window", "other lengths", "seqlen_q other than seqlen_k",
          "rows without keys", "dense"]),
        (Problem(window=(-1, 0), causal=True, dropout_p=0.1, softmax_scale=0.3, layouts=("sliced",) * 4),
         ["fp32", "another head_dim", "MHA", "causal", "other lengths", "dense", "softmax_scale", "dropout",
          "strided inputs"]),
    ],
)  # fmt: skip
def test_features_of_a_problem(problem: Problem, features: list[str]) -> None:
    assert features_of(Case("", problem)) == features


def test_a_recorded_call_has_the_features_of_the_problem_that_it_is() -> None:
    for case in generated(quick=True)[::3]:
        assert isinstance(case.problem, Problem)
        if case.problem.kind in ("private_varlen", "kvcache") or case.problem.sizes or case.problem.stray:
            continue
        built = Case(case.name, case.problem.build())
        unseen = {"NaN or infinity", "strided inputs", "large scores"}
        told = [set(features_of(each)) - unseen for each in (case, built)]
        assert told[0] == told[1], case.name
    assert {"fp16", "bf16", "cache", "pages", "rotary"} <= {
        name for case in recorded_cases() for name in features_of(case)
    }


# ---- how much was asked ----------------------------------------------------------------------------------------------


def row(outcome: str, name: str = "", **fields) -> Row:
    verdict = {
        PASS: Verdict(),
        FAIL: Verdict(checks=[Check("out", "fp64", 2.0, 1.0, "planted", size=4.0)]),
        RAISED: Verdict(errors=["ValueError: planted"]),
        DECLINED: Verdict(refused="planted"),
    }[outcome]
    return Row(Case(name, Problem(**fields)), "mine", "cpu", verdict)


@pytest.mark.parametrize(
    ("rows", "narrowed", "words"),
    [
        ([PASS] * 3, False, "PASS: 3 of 3 answers right"),
        ([PASS, DECLINED, DECLINED], False, "TOO LITTLE TO SAY: 1 of 1 answers right, 2 declined"),
        ([PASS], False, "TOO LITTLE TO SAY: 1 of 1 answers right"),
        ([PASS], True, "PASS: 1 of 1 answers right"),
        ([PASS, DECLINED], True, "TOO LITTLE TO SAY: 1 of 1 answers right, 1 declined"),
        ([FAIL, DECLINED], False, "FAIL: 0 of 1 answers right, 1 declined"),
        ([DECLINED], True, "TOO LITTLE TO SAY: no case ran, 1 declined"),
        ([PASS, RAISED, DECLINED], False, "FAIL: 1 of 1 answers right, 1 raised an error, 1 declined"),
        ([RAISED], False, "FAIL: no answer, 1 raised an error"),
    ],
)
def test_few_answers_are_no_pass_unless_nothing_more_was_asked(rows: list[str], narrowed: bool, words: str) -> None:
    assert verdict_words([*map(row, rows)], narrowed) == words


def test_the_verdict_names_judged_declined_and_unasked_features() -> None:
    rows = [row(PASS), row(PASS, causal=True), row(PASS), row(DECLINED, softcap=2.0)]
    found = report(rows, {}, False, [], "mine", is_own=True)
    assert found.ok and found.conclusion[-1] == (
        "PASS: 3 of 3 answers right, 1 declined; judged: fp32, another head_dim, MHA, no mask, causal, other lengths, "
        "dense; declined: softcap; not judged: fp16, bf16, fp64, head_dim 64, head_dim 128, head_dim above 256, "
        "v of another head_dim, GQA or MQA, window, lengths in 64s, seqlen_q other than seqlen_k, rows without keys, "
        "no keys at all, packed, cache, softmax_scale, ALiBi, dropout, softcap with dropout, pages, "
        "pages of no multiple of 256, rotary, strided inputs, large scores, sizes far apart, NaN or infinity, "
        "8-bit cache, output, softmax_lse, gradients, cache as left"
    )
    (table,) = found.under
    assert ("causal", "1", "", "", "", "pass") in table.rows and ("softcap", "", "", "", "1", "declined") in table.rows
    assert "window" not in [name for name, *_ in table.rows]


def test_an_answer_of_an_fp64_call_that_is_right_to_fp32_counts_for_fp64_alone() -> None:
    verdict = Verdict(checks=[Check("out", "fp64", 0.0, 1.0)], right_to="fp32")
    counts = feature_counts([Row(Case("", Problem(dtype="float64", causal=True)), "mine", "cpu", verdict)])
    assert {name: sum(count.values()) for name, count in counts.items() if count} == {"fp64": 1}


@pytest.mark.parametrize(
    ("wrong", "right", "shared"),
    [
        ([{"causal", "MHA"}, {"causal", "GQA or MQA"}, {"causal", "MHA"}], [{"MHA"}], ["causal"]),
        ([{"causal", "softcap", "fp16"}] * 3, [{"causal", "fp16"}, {"softcap", "fp16"}], ["causal", "softcap"]),
        ([{"causal", "softcap", "fp16"}] * 2, [{"causal", "fp16"}, {"softcap", "fp16"}], []),
        ([{"causal"}, {"causal"}, {"softcap"}], [{"MHA"}], []),
        (
            [{"causal", "MHA", "fp16", "dense"}] * 3,
            [
                {"causal", "MHA", "fp16"},
                {"causal", "MHA", "dense"},
                {"MHA", "fp16", "dense"},
                {"causal", "fp16", "dense"},
            ],
            [],
        ),
        ([{"causal"}] * 3, [{"causal"}], []),
        ([], [{"causal"}], []),
    ],
)
def test_the_features_that_all_wrong_answers_share_and_no_right_one_has(wrong, right, shared) -> None:
    assert shared_by(wrong, right) == shared and {*shared} <= {*FEATURES}


def test_the_features_stand_right_under_the_verdict_in_text_markdown_and_page(tmp_path, capsys) -> None:
    markdown, page = tmp_path / "a.md", tmp_path / "a.html"
    files = "--markdown", str(markdown), "--html", str(page)
    cases = "plain 64 d64,plain 128 d64,func causal gqa,func causal sq<sk,func softcap"
    judged = judge("plain_squares", tmp_path, capsys, cases, *files)
    assert judged.code == 1 and "TOO LITTLE TO SAY: 2 of 2 answers right" in judged.told
    for text in (judged.told, markdown.read_text(encoding="utf-8")):
        behind = text.partition("TOO LITTLE TO SAY")[2]
        assert behind.partition("not judged: ")[2].index("Answers by feature") < 350
    html = page.read_text(encoding="utf-8")
    assert '<p class="verdict declined">' in html and html.count('class="narrow"') >= 1
    assert (
        html.partition("TOO LITTLE TO SAY")[2].partition("</p>")[2].strip().startswith("<details><summary>Answers by")
    )


# ---- seven kernels ---------------------------------------------------------------------------------------------------

# The cases to judge, the exit code, what its author reads, and what nobody says.
SEVEN = {
    "right": (FEW, 0, ["PASS: ", "fp64, judged separately: 1 answer is right to fp32"], ["half prec", "look closer"]),
    "wrong_at_the_edge": (
        FEW, 1, ["FAIL: ", "the worst mistake: ", "look closer: ", "other lengths"], ["half precision"],
    ),
    "wrong_alignment": (
        f"{FEW},causal sq<sk,full sq<sk", 1,
        ["of the problems not declined, all with causal and seqlen_q other than seqlen_k are wrong, and no others",
         "--causal"],
        ["half precision", "(of fp64)", "--backward"],
    ),
    "right_in_half_precision": (
        FEW, 1, ["as near as fp16 comes: it computes in half precision, or rounds to it"], ["right to fp32,"],
    ),
    "plain_squares": (
        "plain", 0,
        ["PASS: 5 of 5 answers right",
         "judged: fp16, head_dim 64, MHA, no mask, lengths in 64s, dense, large scores, output, gradients"],
        ["look closer"],
    ),
    "wrong_gradient": (
        "plain 64 d64", 1,
        ["func plain 64", "more like it", "only gradients are wrong: dk", "--backward"], ["half precision"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVEN)
def test_each_of_seven_kernels_gets_its_verdict(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases, code, said, unsaid = SEVEN[name]
    judged = judge(name, tmp_path, capsys, cases)
    assert judged.code == code
    assert [part for part in said if part not in judged.told] == [] and not [
        part for part in unsaid if part in judged.told
    ]
    if name == "wrong_gradient":
        assert judged.told.count("more like it") == 1, "alike wrong answers are one line"
    if "look closer" in judged.told:
        assert main(judged.advice) == 1
        capsys.readouterr()


def test_the_worst_mistake_is_no_digit_that_fp64_lacks(tmp_path, capsys) -> None:
    judged = judge("wrong_alignment", tmp_path, capsys, "func causal gqa,causal sq<sk", "-v")
    worst = judged.told.partition("the worst mistake: ")[2]
    assert worst.split()[0] in ("out", "dq", "dk", "dv") and "causal sq<sk" in worst.partition("FAIL")[0]
    fp64 = judged.rows["func causal gqa fp64"]
    assert fp64["verdict"] == "right to fp32" and fp64["checks"][0]["error"] < 1e-5


def test_a_kernel_with_scores_in_fp16_is_told_how_often_that_explains_it(tmp_path, capsys) -> None:
    judged = judge("fp16_scores", tmp_path, capsys, "func causal gqa fp32,func large logits fp32,sizes gqa fp32")
    assert "wrong in fp32, but 2 of 3 times as near as fp16 comes: it computes in half precision" in judged.told


@pytest.mark.parametrize("name", ["declines_everything", "one_length"])
def test_a_kernel_that_answers_nothing_or_once_is_not_passed(name, tmp_path, capsys) -> None:
    judged = judge(name, tmp_path, capsys, "plain 64,plain 256")
    assert judged.code == 1 and "TOO LITTLE TO SAY: " in judged.told and "PASS" not in judged.told


# ---- to decline is not to be wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (NotImplementedError(), True),
        (ValueError("head_dim 52 is not supported"), True),
        (AssertionError("Only fp16 and bf16 are supported"), True),
        (RuntimeError("this kernel doesn't support causal"), True),
        (RuntimeError("windows: not implemented yet"), True),
        (AssertionError(), False),
        (ValueError("head_dim must be 64"), False),
        (RuntimeError("CUDA error: operation not supported"), False),
        (RuntimeError("cublasGemmEx: CUBLAS_STATUS_NOT_SUPPORTED"), False),
        (RuntimeError("Triton Error [CUDA]: operation not supported"), False),
    ],
    ids=str,
)
def test_an_error_that_names_an_unsupported_feature_counts_as_declined(error, counts):
    assert declines(error) is counts


def half_only(q, k, v, causal=False):
    if q.dtype == torch.float32:
        raise ValueError("float32 is not supported\nand more")
    if causal:
        raise ZeroDivisionError("planted")
    from tests.verify.mutants import correct

    return correct.flash_attn_func(q, k, v)


def test_declined_cases_are_counted_with_reasons_beside_wrong_ones(tmp_path, capsys):
    code, rows = compare_quickly(
        "tests.verify.test_verdicts:half_only", tmp_path, "mqa_cross,func causal gqa", "--forward-only"
    )
    shown = " ".join(capsys.readouterr().out.split())
    verdicts = {case: (row["verdict"], row["note"]) for case, row in rows.items()}
    assert code == 1 and verdicts["mqa_cross"][0] == "pass"
    assert verdicts["func causal gqa fp16"] == ("FAIL", "ZeroDivisionError: planted")
    assert verdicts["func causal gqa fp32"] == ("declined", "float32 is not supported")
    assert "declined: 1 x float32 is not supported" in shown and "a case counts as declined, not as wrong, if" in shown


WITHOUT_GRADIENTS = "gradients not judged: 5 answers have none (out has no gradient); --gradients counts that as wrong"


def test_a_right_kernel_without_gradients_passes_and_one_line_says_that_they_were_not_judged(capsys):
    assert main([*CASES, "--implementation", "tests.verify.test_verdicts:detached"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("out has no gradient") == 1 and WITHOUT_GRADIENTS in shown
    assert "PASS: 5 of 5" in shown and "gradients" in shown.partition("not judged: head_dim")[2]


def test_a_kernel_that_must_have_gradients_is_wrong_without_them(capsys):
    assert main([*CASES, "--implementation", "tests.verify.test_verdicts:detached", "--gradients"]) == 1
    assert "dq missing: out has no gradient" in " ".join(capsys.readouterr().out.split())


def detached(q, k, v, causal=False):
    from tests.verify.mutants import correct

    return correct.flash_attn_func(q, k, v, causal=causal).detach()


@pytest.mark.parametrize(
    ("path", "half"),
    [
        ("verify.planted:half_inputs", True),
        ("verify.planted:bfloat16_throughout", True),
        ("tests.verify.test_verdicts:leaks", False),
        ("tests.verify.test_verdicts:too_large", False),
        ("verify.planted:right", None),
    ],
)
def test_a_kernel_that_is_right_in_half_precision_only_is_called_so(path, half, capsys):
    chosen = ["--quick", "--device", "cpu", "--no-isolate", "-k", "func causal gqa,sizes gqa", "--forward-only"]
    code = main([*chosen, "--implementation", path])
    shown = " ".join(capsys.readouterr().out.split())
    assert code == (half is not None)
    assert ("it computes in half precision, or rounds to it" in shown) is bool(half)


def too_large(q, k, v, causal=False):
    """By less than bf16 may be off."""
    from verify.planted import right

    return 1.01 * right(q, k, v, causal=causal)


def leaks(q, k, v, causal=False):
    """1e-4 of the neighbouring head, which is less than fp16 rounds away, but where that head is large."""
    from verify.planted import right

    out = right(q, k, v, causal=causal)
    return out + 1e-4 * out.roll(1, 2)


# ---- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("copied_children")
def test_a_crash_leaves_the_name_of_the_case_the_file_and_how_often(tmp_path, capsys) -> None:
    cases = "plain 64 d64 fp16,plain 128 d64 fp16,plain 128 d64 gqa fp16,plain 128 d128 bf16"
    judged = judge("crashing", tmp_path, capsys, cases, "--isolate", "--forward-only")
    assert judged.code == 1
    assert (
        f"{FILE}:crashing: the process ended 2 times, first in func plain 128 d64 fp16 on cpu "
        "(its process ended by SIGSEGV)" in judged.told
    )
    assert (
        judged.rows["func plain 64 d64 fp16"]["verdict"] == "pass" == judged.rows["func plain 128 d128 bf16"]["verdict"]
    )


@pytest.mark.usefixtures("copied_children")
def test_problems_that_are_not_asked_after_many_crashes_are_no_wrong_answers(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(isolation, "MOST_ENDED", 2)
    judged = judge("crashing", tmp_path, capsys, "plain 128 d64", "--isolate", "--forward-only")
    assert (
        "; 4 problems were skipped, since each restart takes seconds" in judged.told
        and "FAIL: 0 of 2 answers right, 4 not asked" in judged.told
    )


@pytest.mark.usefixtures("copied_children")
def test_a_file_that_crashes_when_it_is_loaded_ends_in_one_line(tmp_path, capsys) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    chosen = ["--quick", "--device", "cpu", "-k", "plain 64", "--isolate"]
    assert main([*chosen, "--implementation", f"{kernel}:attention"]) == 2
    assert "cannot be judged: where it was imported" in capsys.readouterr().err


@pytest.mark.usefixtures("copied_children")
def test_locate_names_a_crash_too(tmp_path, capsys) -> None:
    shape = ["--n", "128", "--head-dim", "64", "--batch", "1", "--heads", "1"]
    assert main(["locate", f"{FILE}:crashing", *shape, "--isolate"]) == 1
    assert f"FAIL: its process ended by SIGSEGV as {FILE}:crashing" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("source", "is_native"),
    [
        ("import torch\nimport ctypes.util\n", True),
        ("import triton.language as tl\n", True),
        ("from torch.utils.cpp_extension import load\n", True),
        ("from torch.utils import cpp_extension\n", True),
        ("import torch\ntorch.ops.load_library('a.so')\n", True),
        ("import torch\ntorch.cuda.synchronize()\nimport math, numpy\n", False),
        ("from beside import attention\n", True),
        ("import plain_beside\n", False),
        ("import compiled\n", True),
        ("this is no Python", False),
    ],
)
def test_whether_a_file_loads_native_code_is_found_without_running_it(
    source: str, is_native: bool, tmp_path: Path
) -> None:
    from importlib.machinery import EXTENSION_SUFFIXES

    (tmp_path / "beside.py").write_text("def attention():\n    import ctypes\n")
    (tmp_path / "plain_beside.py").write_text("import torch\nimport kernel\n")
    (tmp_path / f"compiled{EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    (tmp_path / "kernel.py").write_text(f"{source}\nraise SystemExit('it ran')\n")
    assert loads_native_code(f"{tmp_path / 'kernel.py'}:attention") is is_native


def test_pytorchs_own_functions_need_no_child_process() -> None:
    assert not loads_native_code("torch.nn.functional:scaled_dot_product_attention")
    assert not loads_native_code("verify.planted:right") and loads_native_code("ctypes:CDLL")
    assert not loads_native_code(f"{FILE}:right")
