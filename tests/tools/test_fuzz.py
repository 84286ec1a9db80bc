"""The fuzzer's command line: its problems, its time limit, and its report of a failure."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import shlex
from pathlib import Path

import pytest
import torch
from rich.console import Console

from flash_attn_compat import flash_attn_interface
from tests import fuzz
from tests.fuzz import Failure, Plan, main, run_all, shrink
from tests.tools.interpreters import CAN_FORK
from tests.verify import mutants
from verify.problems import Problem


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, dict]:
    code = main([*arguments, "--backend", "reference"])
    printed = capsys.readouterr().out
    return code, printed, json.loads(printed.splitlines()[-1])


def test_the_last_line_sums_up_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, found = run(capsys, "--problems", "12")
    assert code == 0
    assert (found["problems"], found["served"], found["failures"]) == (12, 12, 0)
    of_reference = found["backends"]["reference"]
    assert of_reference["served"] == 12 and 0 < float(of_reference["worst"]) < 1


def test_it_stops_after_so_many_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--served", "5")[2]["problems"] == 5


def test_it_stops_when_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--problems", "100000", "--seconds=-1")[2]["problems"] == 1


class DiesOfProblem3(Plan):
    def problem(self, seed: int) -> Problem:
        if seed == 3 and multiprocessing.parent_process():
            os._exit(9)
        return super().problem(seed)


def test_processes_share_the_problems_and_outlive_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if CAN_FORK:  # three copies of one process that has imported this module
        monkeypatch.setattr(fuzz, "_START", "forkserver")
        multiprocessing.set_forkserver_preload([__name__])
    total = run_all(DiesOfProblem3("cpu", ("reference",), None, None), range(8), 2, 1e9, 1e9, Console())
    assert (total.problems, total.served, [failure.seed for failure in total.failures]) == (8, 7, [3])


@pytest.fixture
def wrong_alibi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn_interface, "flash_attn_func", mutants.alibi_sign.flash_attn_func)


def test_a_failure_is_printed_as_one_line_that_repeats_it(
    wrong_alibi: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "found.json"
    code, printed, found = run(
        capsys, "--kind", "dense", "--dtype", "float32", "--problems", "12", "--show", "1", "--json", str(saved)
    )
    assert code == 1 and found["failures"] > 0
    assert len(json.loads(saved.read_text())["failures"]) == found["failures"]
    line = next(line for line in printed.splitlines() if "python -c" in line)
    words = shlex.split(line)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(words[words.index("-c") + 1])
    assert "failures=['" in told.getvalue()


def test_a_failure_is_made_small(wrong_alibi: None) -> None:
    large = Problem(seqlens_q=(20, 20), seqlens_k=(30, 30), nheads_k=2, head_dim=32, alibi="bh", causal=True,
                    sizes=((1.0, 1.0, 1e-3, 1.0), (1.0, 1.0, 1.0, 1.0)))  # fmt: skip
    small = shrink(Failure(0, "reference", large, ["out: error"]), "cpu", attempts=100)
    assert small.alibi and not small.sizes and len(small.seqlens_q) == 1 and small.head_dim == 8
    assert torch.tensor(small.seqlens_q).max() < 20
