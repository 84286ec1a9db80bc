"""verify bench and verify ladder with a user's kernel: its contestants, its verdict, and a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from verify import bench, bench_pictures, bench_report
from verify.bench_run import Plan, Row
from verify.cli import main
from verify.contestants import Contestant, ours
from verify.judge import Check
from verify.native import is_isolated, loads_native_code
from verify.own import own
from verify.tables import counted
from verify.timing import DeviceLost, Timing
from verify.workloads import PLAIN, SMALL, shrunk

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
LIKE_OTHERS = "wrong_alignment", "right_in_half_precision --dtype fp16"  # wrong in one workload; right in fp16


@pytest.mark.usefixtures("copied_children")
@pytest.mark.parametrize(
    "asked", [pytest.param(each, marks=[pytest.mark.thorough] if each in LIKE_OTHERS else []) for each in SEVEN]
)
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


@pytest.mark.parametrize(("count", "words"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_one_thing_is_counted_in_the_singular(count, words) -> None:
    assert counted([None] * count, "row") == words


def test_every_workload_says_its_mask_and_features() -> None:
    described = {each.name: each.describe() for each in (*map(shrunk, PLAIN), *SMALL)}
    assert described["plain_d64_chunk"] == "2 x 32x128, 4/4 heads, head_dim 64, causal"
    assert described["mistral_window"] == "1 x 2048, 8/2 heads, head_dim 128, causal, window (128, 0)"
    assert described["decode_1x1024_paged_append"].endswith("causal, pages of 256, a key appended")
