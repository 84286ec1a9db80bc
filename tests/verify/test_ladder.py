"""verify ladder: every step is right at every size and within its memory, and the command reports both."""

from __future__ import annotations

import json

import pytest
import torch

from tests.forms.plain import pairwise
from verify import inputs, ladder
from verify.cli import main
from verify.examination import Examination
from verify.problems import Problem
from verify.steps import PAPER, STEPS
from verify.timing import allocations

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
    measured = peak(512) / peak(128)
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
