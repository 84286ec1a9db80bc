"""A user's kernel in bench, ladder and compare: contestants, verdicts on habits and faults, and crashes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forms.plain import all_but_thorough
from tests.verify.test_bench import timed
from tests.verify.test_verdicts import judge, row
from verify import bench, bench_pictures, bench_report
from verify.bench_run import Plan, Row
from verify.cli import main
from verify.compare_report import report
from verify.compare_rows import DECLINED, FAIL, PASS, RAISED
from verify.compare_words import law_words, own_words, worst_words
from verify.contestants import Contestant, ours
from verify.examination import Verdict
from verify.judge import Check, broken, difference
from verify.native import is_isolated, loads_native_code
from verify.own import own
from verify.tables import Bar
from verify.timing import DeviceLost, Timing
from verify.workloads import PLAIN, SMALL, of_lengths, shrunk

FILE = str(Path(__file__).with_name("seven_kernels.py"))
PLAIN_64 = ["--only", "plain_d64", "--repeats", "1", "--rivals", "none"]
DECODE_64 = [f"decode_2x512_d64{kind}" for kind in ("", "_paged", "_append")]  # as it runs on a CPU
LADDER = ["ladder", "--n", "24", "128", "--repeats", "1", "--heads", "1", "--head-dim", "64"]


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def rows_of(saved: Path) -> dict[tuple[str, str], dict[str, Any]]:
    data = json.loads(saved.read_text(encoding="utf-8"))
    return {(row["workload"], row["contestant"]): row for row in data["rows"]}


# ---- seven kernels ---------------------------------------------------------------------------------------------------

# The exit code, the output's parts, and parts that it must not have.
SEVEN: dict[str, tuple[int, list[str], list[str]]] = {
    "right": (0, ["PASS: every answer of ", "right is right, in all 4 workloads"], ["judge more problems"]),
    "wrong_at_the_edge": (1, ["WRONG OR FAILED plain_d64_odd ", ": out: error", "FAIL: wrong in 1 of 4"], []),
    "wrong_alignment": (1, ["WRONG OR FAILED plain_d64_chunk ", "FAIL: wrong in 1 of 4"], []),
    "right_in_half_precision --dtype fp16": (0, ["PASS: every answer of "], ["WRONG OR FAILED"]),
    "right_in_half_precision": (1, ["FAIL: wrong in 4 of 4", "judge more problems"], []),
    "plain_squares --dtype fp16": (0, ["in 1 of 4 workloads; it declined the others"], ["WRONG OR FAILED"]),
    "plain_squares": (1, ["TOO LITTLE TO SAY: no workload ran, 4 declined", "add --dtype fp16"], ["judge more"]),
    "crashing --isolate": (
        1,
        ["crashing ended its process in 2 workloads, first in plain_d64 (its process ended by SIGSEGV)",
         "FAIL: wrong in 2 of 4"],
        [],
    ),
    "wrong_gradient": (
        1,
        ["WRONG OR FAILED plain_d64 ", ": dk: error", "alike in plain_d64_causal, plain_d64_odd, plain_d64_chunk",
         "FAIL: wrong in 4 of 4", "--implementation"],
        ["add --dtype fp16"],
    ),
}  # fmt: skip
# Wrong in one workload, right in fp16, wrong in all workloads.
LIKE_OTHERS = "wrong_alignment", "right_in_half_precision --dtype fp16", "right_in_half_precision"


@pytest.mark.usefixtures("copied_children")
@pytest.mark.parametrize("asked", all_but_thorough(SEVEN, LIKE_OTHERS))
def test_bench_says_of_each_of_seven_kernels_whether_it_is_right_wrong_or_declines(asked, capsys) -> None:
    (name, *options), (code, parts, absent) = asked.split(), SEVEN[asked]
    assert main(["bench", "--implementation", f"{FILE}:{name}", *PLAIN_64, *options]) == code
    shown = told(capsys)
    assert [part for part in parts if part not in shown] == [] and [part for part in absent if part in shown] == []


def test_bench_times_a_kernel_beside_the_package_and_rivals(tmp_path, capsys) -> None:
    saved, name = tmp_path / "a.json", f"{FILE}:plain_squares"
    arguments = ["--dtype", "fp16", *PLAIN_64[:-1], "pad_sdpa,sdpa_loop", "--json", str(saved)]
    assert main(["bench", "--implementation", name, *arguments]) == 0
    rows = rows_of(saved)
    assert {who for workload, who in rows if workload == "plain_d64"} == {name, "default", "pad_sdpa", "sdpa_loop"}
    assert rows["plain_d64", name]["both"]["median_ms"] > 0 and rows["plain_d64", name]["verdict"]["ok"]
    assert "geometric mean speed-up over flash_attn_compat: forward" in told(capsys)


def test_bench_times_nobody_on_workloads_that_the_kernel_declines_and_folds_them_by_reason(tmp_path, capsys) -> None:
    saved, name = tmp_path / "a.json", f"{FILE}:right"
    arguments = ["--only", "decode_2x512,alibi", "--repeats", "1", "--json", str(saved)]
    assert main(["bench", "--implementation", name, *arguments]) == 1
    assert {who for _, who in rows_of(saved)} == {name}
    tables = {table["title"]: table["rows"] for table in json.loads(saved.read_text(encoding="utf-8"))["tables"]}
    assert tables[f"Not measured, of {name}"] == [
        ["", "2", "got an unexpected keyword argument 'alibi_slopes'", "alibi_causal, alibi_bidirectional"],
        ["", "8", "has no flash_attn_with_kvcache", f"{', '.join(DECODE_64)} and 5 more"],
    ]  # fmt: skip
    assert ["alibi_causal", "2 x 512, 4/4 heads, head_dim 64, causal, ALiBi"] in tables["Workloads"]
    assert told(capsys).count("has no flash_attn_with_kvcache") == 1


def test_several_contestants_without_figures_are_named_beside_their_reasons() -> None:
    rows = [Row("w", who, False, reason="not here") for who in ("mine", "other")]
    table = bench_report.declined_table(rows)
    assert table.title == "Not measured" and [row[0] for row in table.rows] == ["mine", "other"]


def test_a_workload_that_decodes_is_named_by_the_shape_that_runs() -> None:
    assert all(f"decode_{each.batch}x{each.capacity}" in each.name for each in SMALL if each.decode)


def test_a_contestant_that_serves_every_workload_leaves_no_table_of_declined_ones() -> None:
    assert not bench_report.declined_table([timed_row("default")]).rows


def test_ladder_takes_a_users_kernel_as_a_step(tmp_path, capsys) -> None:
    saved, name = tmp_path / "a.json", f"{FILE}:wrong_at_the_edge"
    assert main([*LADDER, "--n", "24", "100", "--implementation", name, "--json", str(saved)]) == 1
    rows = rows_of(saved)
    assert rows["N = 24", name]["verdict"]["ok"] and rows["N = 24", name]["forward"]["median_ms"] > 0
    assert ("N = 100", "PyTorch SDPA") in rows and "FAIL: wrong in 1 of 2 workloads" in told(capsys)


# ---- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("copied_children")
@pytest.mark.parametrize(("crash", "signal"), [("os.abort()", "SIGABRT"), ("os._exit(3)", "exit code 3")])
def test_a_crash_of_a_file_with_native_code_is_named_without_options(crash, signal, tmp_path, capsys) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        f"import ctypes, os\nfrom tests.verify.seven_kernels import right\ndef crashing(q, k, v, causal=False):\n"
        f"    if q.shape[1] == 128 and causal:\n        {crash}\n    return right(q, k, v, causal)\n"
    )
    cases = ["--quick", "--forward-only", "--device", "cpu", "-k", "plain 128 d64 causal fp16,plain 64 d64"]
    assert main([*cases, "--implementation", f"{kernel}:crashing"]) == 1
    shown = told(capsys)
    assert f"{kernel}:crashing: the process ended once, in func plain 128 d64 causal fp16 on cpu" in shown
    assert f"ended {'with' if 'exit' in signal else 'by'} {signal})" in shown and "FAIL: " in shown


@pytest.mark.usefixtures("copied_children")
def test_ladder_names_a_crash_and_measures_the_other_lengths(tmp_path, capsys) -> None:
    saved, name = tmp_path / "a.json", f"{FILE}:crashing"
    assert main([*LADDER, "--implementation", name, "--isolate", "--json", str(saved)]) == 1
    assert f"{name} ended its process in 1 workload, first in N = 128 (its process ended by SIGSEGV)" in told(capsys)
    assert rows_of(saved)["N = 24", name]["verdict"]["ok"]


@pytest.mark.usefixtures("copied_children")
@pytest.mark.parametrize("command", ["bench", "ladder"])
def test_an_isolated_kernel_that_cannot_be_imported_ends_in_one_line(command, tmp_path, capsys) -> None:
    (tmp_path / "kernel.py").write_text("import ctypes\nraise ValueError('planted')\n")
    assert main([command, "--implementation", f"{tmp_path / 'kernel.py'}:attention"]) == 2
    assert "planted" in capsys.readouterr().err


@pytest.mark.parametrize("who", ["mine", "default"])
def test_the_contestant_that_breaks_the_gpu_in_a_child_has_failed_in_that_workload(who, monkeypatch) -> None:
    def run(plan: Plan, workload: Any, step: bench.Step) -> list[Row]:
        step(f"{workload.name}: tensors")
        if workload.name == "plain_d64":
            step(f"{workload.name}: checking {who}")
            raise DeviceLost("an illegal memory access")
        return [Row(workload.name, "mine", True)]

    monkeypatch.setattr(bench, "run", run)
    contestants = [Contestant("mine", own("kernel.py").prepare, True), Contestant("default", ours().prepare)]
    lost, other = bench.steps(0, Plan([*map(shrunk, PLAIN[:2])], contestants, "cpu", torch.float32))
    assert [(row.contestant, row.ours, row.failed) for row in lost] == [(who, who == "mine", True)]
    assert "it broke the GPU, or found it broken: an illegal memory access" in lost[0].reason
    assert [row.workload for row in other] == ["plain_d64_causal"]


@pytest.mark.parametrize(
    ("asked", "name", "device", "isolated"),
    [
        (None, FILE, "cpu", False),
        (None, FILE, "cuda:1", True),
        (None, None, "cuda", False),
        (None, "ctypes:CDLL", "cpu", True),
        (False, FILE, "cuda", False),
        (True, None, "cpu", True),
    ],
)
def test_a_kernel_is_isolated_on_a_gpu_and_with_native_code_unless_asked_otherwise(
    asked, name, device, isolated
) -> None:
    assert is_isolated(asked, name, device) is isolated


@pytest.mark.parametrize(("file", "is_native"), [("deep/_C.abi3.so", True), ("kernels.pyd", True), ("a.py", False)])
def test_an_installed_package_with_compiled_modules_is_native_code(file, is_native, tmp_path, monkeypatch) -> None:
    compiled = tmp_path / "site" / "their_attention" / file
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    (tmp_path / "site" / "their_attention" / "__init__.py").touch()
    (tmp_path / "kernel.py").write_text("import math, torch, numpy\nfrom their_attention.deep import attention\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert loads_native_code(str(tmp_path / "kernel.py")) is is_native


# ---- figures ---------------------------------------------------------------------------------------------------------


def timed_row(contestant: str, ms: float = 2.0, ok: bool = True, ours: bool = False, spread: float = 0.0) -> Row:
    timing = Timing(ms, ms * (1 - spread), ms * (1 + spread), 3)
    verdict = Check("out", "fp64", 0.5 if ok else 2.0, 1.0)
    return Row("w", contestant, ours, "", timing, timing, 3.0, 3.0, verdict)


def test_a_wrong_answer_counts_in_no_mean_and_its_bars_are_marked_wrong() -> None:
    rows = [timed_row("mine", ok=False, ours=True), timed_row("official")]
    assert bench_report.mean_lines(rows) == []
    pictures = bench_pictures.bars(rows, bench_report.YARDSTICKS)
    assert pictures and all(bar.wrong for picture in pictures for _, bars in picture.groups for bar in bars if bar)


@pytest.mark.parametrize(("spreads", "noisy"), [((0.4, 0.0, 0.0), True), ((0.4, 0, 0, 0, 0), False), ((), False)])
def test_a_run_of_which_a_quarter_of_the_times_scatter_is_said_to_be_noisy(spreads, noisy) -> None:
    lines = bench_report.noise_lines([timed_row("mine", spread=spread) for spread in spreads])
    assert bool(lines) is noisy
    if noisy:
        assert lines[0].startswith("2 of 6 times vary by more than ±25%")


def test_every_workload_says_its_mask_and_features() -> None:
    described = {each.name: each.describe() for each in (*map(shrunk, PLAIN), *SMALL)}
    assert described["plain_d64_chunk"] == "2 x 32x128, 4/4 heads, head_dim 64, causal"
    assert described["mistral_window"] == "1 x 2048, 8/2 heads, head_dim 128, causal, window (128, 0)"
    assert described["decode_1x1024_paged_append"].endswith("causal, pages of 256, a key appended")


def test_bars_say_how_fast_ours_is_beside_each_rival_and_how_much_it_holds():
    rows = [timed("default", 2.0, 6.0, ours=True), timed("official", 1.0), timed("pad_sdpa", 8.0, 12.0)]
    rows = [replace(row, memory_mib=held) for row, held in zip(rows, (30.0, 10.0, 60.0))]
    made = {
        picture.title.partition(":")[0]: picture.groups
        for picture in bench_pictures.bars(rows, bench_report.YARDSTICKS)
    }
    assert made == {
        "Speed beside flash-attn": [("w", [Bar(0.5, "0.50 (2 ms)"), None])],
        "Memory beside flash-attn": [("w", [Bar(3.0, "3.00 (30 MiB)"), None])],
        "Speed beside the fastest way without flash-attn": [("w", [Bar(4.0, "4.00 (2 ms)"), Bar(2.0, "2.00 (6 ms)")])],
        "Memory beside the fastest way without flash-attn": [("w", [Bar(0.5, "0.50 (30 MiB)"), None])],
    }


def test_a_run_over_lengths_has_curves_of_speed_and_memory_and_no_wrong_answer_in_them():
    lengths = of_lengths([16, 32], small=True)
    rows = [
        replace(row, workload=each.name, memory_mib=1.0)
        for each in lengths
        for row in (timed("default", 2.0, ours=True), timed("wrong", 1.0, ok=False))
    ]
    made = {picture.title: picture.lines for picture in bench_pictures.curves(rows, lengths)}
    operations = [2 * each.scores * each.head_dim for each in lengths]
    assert made == {
        "Speed, forward": [("default", [(n, of / 2.0 / 1e9) for n, of in zip((16, 32), operations)])],
        "Peak memory, forward": [("default", [(16, 1.0), (32, 1.0)])],
    }
    assert bench_pictures.curves(rows, lengths[:1]) == []


# ---------------------------------------------------------------- verify's verdict on kernels with one habit or fault


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


# Other rows show the same habit, or unit tests the same words.
LATE = ["with_lse", "raising_once", "without_backward", "through_numpy", "one_head_dim"]


@pytest.mark.parametrize("name", all_but_thorough(MORE, LATE))
def test_a_kernel_with_one_more_habit_or_fault_gets_its_verdict(name, tmp_path, capsys) -> None:
    cases, code, said, unsaid = MORE[name]
    judged = judge(name, tmp_path, capsys, cases)
    assert [part for part in said if part not in judged.told] == [], judged.told
    assert not [part for part in unsaid if part in judged.told] and judged.code == code
    if "--magnitude" in judged.told:  # other advice follows of seven kernels in test_verdicts.py
        assert main(judged.advice) == 1
        capsys.readouterr()
