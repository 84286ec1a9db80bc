"""benchmarks.end_to_end in tiny shapes: every program runs, and its table tells right from wrong."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.end_to_end.__main__ import main
from benchmarks.end_to_end.agreement import compared, reference


def test_a_program_runs_on_ours_and_its_row_says_who_served(tmp_path):
    """One that loads fast; tests/gpu.py runs them all beside eager ones, tests/clients the same models."""
    written = tmp_path / "figures.json"
    command = ["--tiny", "--device", "cpu", "--repeats", "1", "--implementations", "ours", "--programs", "paged-prefix"]
    assert main([*command, "--json", str(written)]) == 0
    (row,) = json.loads(written.read_text())["programs"]["ours"].values()
    assert row["served_by"] and row["agrees"] and row["peak_bytes"] > 0


def test_a_program_that_takes_too_long_is_a_row_and_the_next_has_its_turn(tmp_path, capsys):
    written = tmp_path / "figures.json"
    command = ["--tiny", "--device", "cpu", "--implementations", "ours", "--programs", "paged-prefix", "paged-decode"]
    assert main([*command, "--limit", "0", "--json", str(written)]) == 1
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
