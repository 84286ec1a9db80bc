"""benchmarks: its list; and end_to_end in tiny shapes: every program runs, and its table tells right from wrong."""

from __future__ import annotations

import json
import pkgutil
from types import SimpleNamespace

import pytest
import torch

import benchmarks.__main__
import flash_attn_compat
from benchmarks.end_to_end import __main__ as command_line
from benchmarks.end_to_end import worker
from benchmarks.end_to_end.agreement import compared, reference
from benchmarks.end_to_end.programs import PROGRAMS
from tests.interpreters import forked_child


def test_the_list_names_every_benchmark_and_verifys(capsys):
    files = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)} - {"__main__"}
    assert {*benchmarks.__main__.PROGRAMS} == {*files, "bench"}
    assert benchmarks.__main__.main([]) == 0 and benchmarks.__main__.main(["nothing"]) == 2
    shown = capsys.readouterr().out
    assert "\nend_to_end" in shown and "verify bench" in shown


def test_a_name_runs_what_its_module_runs_with_its_options(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])
    for name, said in (("cpu", "--threads"), ("bench", "--rivals")):
        with pytest.raises(SystemExit, match="0"):
            benchmarks.__main__.main([name, "--help"])
        assert said in capsys.readouterr().out


@pytest.fixture
def started_by(monkeypatch):
    """How a worker is started, of its command and environment: a new process would import PyTorch and clients anew."""

    def set_to(run):
        starter = lambda command, env, **options: run(command[3:], env)  # noqa: E731
        monkeypatch.setattr(command_line, "subprocess", SimpleNamespace(run=starter, PIPE=None))

    return set_to


def in_this_process(arguments, env):
    try:
        worker.main(arguments)
    finally:
        flash_attn_compat.unpatch()
    return SimpleNamespace(returncode=0, stderr="")


def in_a_process(arguments, env):
    return forked_child(f"from benchmarks.end_to_end.worker import main; main({arguments!r})", env)


def test_each_program_runs_on_ours_and_agrees_with_eager(tmp_path, started_by):
    started_by(in_this_process)
    written = tmp_path / "figures.json"
    command = ["--tiny", "--device", "cpu", "--repeats", "1", "--implementations", "ours", "eager"]
    assert command_line.main([*command, "--json", str(written)]) == 0
    found = json.loads(written.read_text())["programs"]
    assert list(found["ours"]) == list(found["eager"]) == list(PROGRAMS)
    for program, row in found["ours"].items():
        if "not_here" in row:
            continue  # the client is not installed, says the row
        assert row["served_by"], program
        assert row["reference"] == "eager"
        assert found["eager"][program]["peak_bytes"] > 0


def test_a_program_that_takes_too_long_is_a_row_and_the_next_has_its_turn(tmp_path, started_by):
    started_by(in_a_process)
    written = tmp_path / "figures.json"
    command = ["--tiny", "--device", "cpu", "--implementations", "ours", "--programs", "paged-prefix", "paged-decode"]
    assert command_line.main([*command, "--limit", "0", "--json", str(written)]) == 1
    rows = json.loads(written.read_text())["programs"]["ours"]
    assert {row["error"] for row in rows.values()} == {"took more than 0 s"}
    assert list(rows) == ["paged-prefix", "paged-decode"]


def test_values_beyond_rounding_do_not_agree():
    expected = {"logits": torch.tensor([4.0, 1.0])}
    assert compared({"logits": torch.tensor([4.0, 1.0001])}, expected, torch.float32)[1]
    assert not compared({"logits": torch.tensor([4.0, 1.001])}, expected, torch.float32)[1]


@pytest.mark.parametrize(("margin", "agrees"), [(1e-6, True), (0.3, False)], ids=["at a tie", "elsewhere"])
def test_texts_may_part_at_a_tie_only(margin, agrees):
    expected = {"tokens": torch.tensor([[5, 6, 7], [5, 6, 7]]), "margins": torch.full((2, 3), 0.5)}
    expected["margins"][1, 1] = margin
    told, found = compared({"tokens": torch.tensor([[5, 6, 7], [5, 9, 2]])}, expected, torch.float32)
    assert found is agrees
    assert told.startswith("1 of 2 rows; others part at token 1")


def test_the_reference_is_flash_attn_and_never_ours_while_there_is_another():
    assert reference(["ours@7.5", "eager", "official"]) == "official"
    assert reference(["ours", "sdpa@7.5", "ours@7.5"]) == "sdpa@7.5"
