"""verify ladder: every step is right at every size, what it promises of memory is so, and the command says it all."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from tests.support import check_refused_in_one_line
from verify import inputs, ladder
from verify.call import Call
from verify.cli import main
from verify.errors import UsageError
from verify.examination import Examination
from verify.inputs import draw
from verify.steps import STEPS, blocks
from verify.timing import Job, peak_memory

QUICK = ["--repeats", "1", "--heads", "1", "--head-dim", "8"]
BY_NAME = {step.name: step.function for step in STEPS}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "keys", "heads_k"), [(64, 64, 2), (50, 50, 1), (21, 50, 2), (50, 21, 2), (1, 1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_step_is_right_for_blocks_that_do_not_divide_the_lengths(step, dtype, n, keys, heads_k, causal):
    shapes = {"q": (2, n, 2, 24), "k": (2, keys, heads_k, 24), "v": (2, keys, heads_k, 24)}
    examination = Examination(Call("flash_attn_func", {**draw(shapes, dtype, n), "causal": causal}))

    def of_size(q, k, v, causal):
        return step.function(q, k, v, causal=causal, block_rows=12, block_columns=17)

    assert [check for check in examination.checks(examination.ask(of_size)) if not check.ok] == []


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 100), (100, 7), (1000, 1000)])
def test_any_block_size_gives_the_same_answer(rows, columns):
    shape = (1, 40, 1, 8)
    q, k, v = draw({"q": shape, "k": shape, "v": shape}, torch.float64, 0).values()
    expected = BY_NAME["naive"](q, k, v)
    for step in STEPS:
        assert torch.allclose(step.function(q, k, v, block_rows=rows, block_columns=columns), expected), step.name


def test_blocks_cover_everything_once_and_the_last_may_be_shorter():
    assert blocks(10, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert blocks(8, 4) == [slice(0, 4), slice(4, 8)]
    assert blocks(0, 4) == []


@pytest.mark.parametrize(
    ("step", "growth"),
    [("naive", 16), ("blocked matmul", 16), ("fused rows", 4), ("online tiles, FA1", 4), ("online tiles, FA2", 4)],
)
def test_memory_grows_as_the_step_says(step, growth):
    def peak(n: int) -> int:
        shape = (1, n, 1, 8)
        q, k, v = draw({"q": shape, "k": shape, "v": shape}, torch.float32, 0).values()
        found = peak_memory(Job(lambda: BY_NAME[step](q, k, v, block_rows=32, block_columns=32)), "cpu")
        assert found is not None
        return found

    # four times the length: 16 times the memory where all scores are kept, 4 times at most where they are not
    measured = peak(512) / peak(128)
    assert growth / 2 < measured < growth * 1.1 if growth == 16 else measured < growth * 1.1


def test_a_wrong_step_fails(monkeypatch, capsys):
    wrong = ladder.Rung("wrong", lambda q, k, v, causal: q, "", "")
    monkeypatch.setattr(ladder, "rungs", lambda rows, columns: [wrong, ladder.Rung("right", BY_NAME["naive"], "", "")])
    assert main(["ladder", "--n", "32", *QUICK]) == 1
    assert "FAIL: wrong" in capsys.readouterr().out


def test_a_step_without_memory_is_noted_and_one_that_breaks_fails(monkeypatch, capsys):
    def greedy(q, k, v, causal):
        raise torch.cuda.OutOfMemoryError("planted")

    def broken(q, k, v, causal):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ladder, "rungs", lambda rows, columns: [ladder.Rung("greedy", greedy, "", "")])
    assert main(["ladder", "--n", "32", *QUICK]) == 0
    assert "out of memory" in capsys.readouterr().out
    monkeypatch.setattr(ladder, "rungs", lambda rows, columns: [ladder.Rung("broken", broken, "", "")])
    assert main(["ladder", "--n", "32", *QUICK]) == 1
    assert "FAIL: ZeroDivisionError: planted" in capsys.readouterr().out


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_problem_is_checked_in_bands_that_find_a_mistake_in_the_last_row(monkeypatch, causal):
    monkeypatch.setattr(ladder, "CHECKED_ROWS", 64)
    bands = ladder.checked_rows(1000)
    assert bands[0].start == 0 and bands[-1].stop == 1000
    assert sum(band.stop - band.start for band in bands) == 64

    shape = (1, 200, 1, 8)
    tensors = draw({"q": shape, "k": shape, "v": shape}, torch.float32, 0)
    judge = ladder._Judge(tensors, causal)
    out = BY_NAME["naive"](*tensors.values(), causal=causal)
    assert judge.judge(out).ok
    out[0, -1] += 0.1
    assert not judge.judge(out).ok


def test_the_command_writes_every_step_at_every_length_and_draws_it(tmp_path, capsys):
    saved, picture = tmp_path / "a.json", tmp_path / "a.png"
    arguments = ["--n", "40", "--br", "7", "--bc", "9", *QUICK, "--json", str(saved), "--plot", str(picture)]
    assert main(["ladder", *arguments]) == 0
    data = json.loads(saved.read_text())
    found = {(m["step"], m["n"]): m for m in data["measurements"]}
    names = [*(step.name for step in STEPS), "PyTorch SDPA", "flash_attn_compat"]
    assert set(found) == {(name, n) for name in names for n in (10, 20, 40)}  # a curve needs more than one length
    assert all(m["ok"] and m["time_ms"] > 0 and m["peak_bytes"] > 0 for m in found.values())
    assert "tiles of 7 rows x 9 columns" in data["environment"]["problem"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "FA1 alg. 1" in shown and "FA2 alg. 1" in shown and "PASS" in shown


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--br", "0"], "--br: '0' is not a positive whole number"),
        (["--bc", "0"], "--bc: '0' is not a positive whole number"),
        (["--n", "0"], "--n: '0' is not a positive whole number"),
        (["--n", "many"], "--n: 'many' is not a positive whole number"),
        (["--device", "tpu"], "no device 'tpu' here"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--plot", "/no/such/folder/a.png"], "there is no folder"),
        (["--plot", "a.svg"], "ends in .png"),
        (["--bogus"], "unrecognized arguments"),
    ],
)
def test_a_wrong_question_ends_in_one_line_and_exit_code_2(arguments, part, capsys):
    check_refused_in_one_line(main, ["ladder", *arguments], part, capsys)


def test_no_memory_even_for_the_inputs_is_one_line(monkeypatch, capsys):
    def full(*arguments: object, **keywords: object) -> argparse.Namespace:
        raise torch.cuda.OutOfMemoryError("planted")

    monkeypatch.setattr(ladder, "torch_attention", full)
    assert main(["ladder", "--n", "16", *QUICK]) == 2
    assert "N = 16 does not fit" in capsys.readouterr().err


def test_a_missing_matplotlib_or_fp64_is_found_out_before_the_work(monkeypatch):
    with pytest.raises(UsageError, match="mps has no fp64"):
        inputs.check_device("mps", torch.float64)
    inputs.check_device("cuda", torch.float64)
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="matplotlib is not installed"):
        inputs.check_picture(Path("a.png"))
