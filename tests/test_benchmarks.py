"""benchmarks: the list, the runner's judgement, and that each benchmark runs that needs no GPU."""

from __future__ import annotations

import json
import pkgutil

import pytest
import torch

import benchmarks.__main__
from benchmarks import cpu, end_to_end, head_dims, host_time, sdpa
from benchmarks.fine_tuning import furthest_apart
from benchmarks.runner import Found, Row, disagreement, means, parser, run
from verify.timing import Job, Timing


def test_the_list_names_every_benchmark_and_verifys(capsys):
    files = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)} - {"__main__", "runner"}
    assert {*benchmarks.__main__.PROGRAMS} == {*files, "bench"}
    assert benchmarks.__main__.main([]) == 0 and benchmarks.__main__.main(["nothing"]) == 2
    shown = capsys.readouterr().out
    assert "\nend_to_end" in shown and "verify bench" in shown


def test_a_name_runs_what_its_module_runs_with_its_options(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])
    for name, said in (("cpu", "--threads"), ("bench", "--rivals"), ("kernel_tiles", "--kernels")):
        with pytest.raises(SystemExit, match="0"):
            benchmarks.__main__.main([name, "--help"])
        assert said in capsys.readouterr().out


# ---- the runner ------------------------------------------------------------------------------------------------------


def give(*values: float) -> Job:
    return Job(lambda: torch.tensor(values))


def ran(tmp_path, *rows: Row, clock=None) -> tuple[int, dict]:
    """The exit code, and what is saved."""
    saved = tmp_path / "a.json"
    options = parser("test", "A test.").parse_args(["--repeats", "1", "--json", str(saved)])
    return run("test", rows, options, "cpu", clock), json.loads(saved.read_text())


def test_a_row_has_each_contestants_time_and_the_rivals_over_ours(tmp_path, capsys):
    times = {"ours": Timing(2.0, 2.0, 2.0, 1), "theirs": Timing(3.0, 3.0, 3.0, 1)}
    row = Row("one", lambda: {"ours": give(1.0), "theirs": give(1.0)}, dtype=torch.float32)
    code, data = ran(tmp_path, row, clock=lambda jobs: times)
    assert code == 0 and data["rows"][0]["contestants"]["ours"]["median_ms"] == 2.0
    assert data["rows"][0]["ratios"] == {"theirs": 1.5}
    shown = capsys.readouterr().out
    assert "theirs 3 ms (1.50 x ours)" in shown and "theirs takes 1.500 of our time" in shown


def test_contestants_that_do_not_agree_or_fail_or_are_too_slow_give_exit_code_1(tmp_path):
    def broken():
        raise ValueError("planted")

    rows = (
        Row("other", lambda: {"ours": give(1.0), "theirs": give(1.1)}, dtype=torch.float16),
        Row("broken", lambda: {"ours": Job(broken), "theirs": give(1.0)}, dtype=torch.float16),
        Row("no tensors", broken),
        Row("slow", lambda: {"ours": give(1.0), "theirs": give(1.0)}, at_least={"theirs": 1e6}),
        Row("right", lambda: {"ours": give(1.0), "theirs": give(1.001)}, dtype=torch.float16),
    )
    code, data = ran(tmp_path, *rows)
    wrong = {row["name"].removesuffix(" forward"): row["wrong"] for row in data["rows"]}
    assert code == 1
    assert wrong == {"other": "ours is 9.1e-02 off theirs", "broken": "ours: ValueError: planted",
                     "no tensors": "ValueError: planted", "slow": "theirs below 1e+06", "right": ""}  # fmt: skip


def test_a_nan_agrees_with_a_nan_alone():
    nan, one = [torch.tensor([torch.nan, 1.0])], [torch.tensor([1.0, 1.0])]
    assert disagreement({"ours": nan, "theirs": nan}, torch.float16) == ""
    assert disagreement({"ours": nan, "theirs": one}, torch.float16)
    assert disagreement({"ours": one, "theirs": nan}, torch.float16)


def test_means_are_of_one_group_and_of_right_rows():
    def found(group, theirs, wrong=""):
        times = {"ours": Timing(1.0, 1.0, 1.0, 1), "theirs": Timing(theirs, theirs, theirs, 1)}
        return Found("row", group, times, {}, wrong=wrong)

    lines = [*means([found("a", 2.0), found("a", 8.0), found("b", 3.0), found("b", 9.0, "wrong")])]
    assert [line.partition(" (")[0] for line in lines] == ["a: theirs takes 4.000 of our time",
                                                           "b: theirs takes 3.000 of our time"]  # fmt: skip


# ---- the benchmarks --------------------------------------------------------------------------------------------------


def test_each_program_runs_by_every_implementation_and_agrees(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL", "1")
    saved = tmp_path / "figures.json"
    command = ["--tiny", "--device", "cpu", "--dtype", "float32", "--repeats", "1"]
    assert end_to_end.main([*command, "--json", str(saved)]) == 0
    rows = json.loads(saved.read_text())["rows"]
    assert [row["name"] for row in rows] == [*end_to_end.PROGRAMS]
    for row in rows:
        if row["contestants"]:  # else the client is not installed
            assert all(figures["median_ms"] > 0 and figures["mib"] for figures in row["contestants"].values())
            assert row["served_by"] or "ours" not in row["contestants"]


@pytest.mark.parametrize("name", ["BERT, padded", "Swin", "8 padded prompts, a step"])
def test_the_operators_shapes_run_with_and_without_our_kernels(name, tmp_path):
    saved = tmp_path / "a.json"
    command = ["--only", name, "--longest", "16", "--device", "cpu", "--dtype", "bfloat16", "--repeats", "1"]
    flags = torch.backends.cuda.flash_sdp_enabled()
    assert sdpa.main([*command, "--json", str(saved)]) == 0
    torch.backends.cuda.enable_flash_sdp(flags)
    rows = json.loads(saved.read_text())["rows"]
    assert rows and all({*row["contestants"]} == {"with", "without"} for row in rows)


def test_the_cpus_rows_are_packed_chunked_and_the_hosts():
    labels = [row.label for row in cpu.rows()]
    assert "skewed float32 forward + backward" in labels and len(labels) == 28 == len({*labels})
    assert sum("host" in label for label in labels) == 6 and sum("chunked" in label for label in labels) == 4
    assert all(row.at_least for row in cpu.rows())


def test_head_dims_are_timed_in_each_dtype_and_compared_between_them():
    labels = [row.label for row in head_dims.rows([40], ["float16", "bfloat16"], [1024], "cpu")]
    assert len(labels) == 8 == len({*labels})
    took = [Timing(ms, ms, ms, 1) for ms in (1.0, 1.2)]
    pair = [label for label in labels if "full forward" in label and "backward" not in label]
    found = [Found(label, "forward", {"fused": timing}, {}) for label, timing in zip(pair, took)]
    assert [*head_dims.bf16_beside_fp16(found)] == ["forward, bf16 / fp16: 1.200, worst 1.200"]


def test_the_hosts_time_is_that_of_the_fastest_batch(monkeypatch):
    monkeypatch.setattr(host_time, "BATCHES", 3)
    waits = [0.0, *[0.02] * 10, *[0.001] * 10, *[0.02] * 10]
    assert 1.0 <= host_time.milliseconds(Job(lambda: host_time.time.sleep(waits.pop(0))), "cpu") < 10 and not waits


def test_loss_curves_are_held_against_each_other_in_means_of_ten_steps():
    one = [2.0] * 20
    assert furthest_apart(one, one) == 0
    assert furthest_apart(one, [*one[:10], 3.0, *one[11:]]) == pytest.approx(0.05)
