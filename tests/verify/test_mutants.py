"""Deliberately wrong implementations: `python -m verify` must find each of them, in the quantity that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.verify import mutants
from verify.cli import main

# mutant: the cases to run (-k), and quantities that must be among those found wrong
FOUND = {
    "left_edge_one_too_far": ("window sq", {"out", "dk", "softmax_lse"}),
    "left_edge_one_too_near": ("window sq", {"out", "dk", "softmax_lse"}),
    "right_edge_one_too_far": ("causal sq", {"out", "dk", "softmax_lse"}),
    "right_edge_one_too_near": ("causal sq", {"out", "dk", "softmax_lse"}),
    "top_left_causal": ("causal sq", {"out", "dq", "softmax_lse"}),
    "softcap_before_scale": ("func softcap fp16", {"out", "softmax_lse"}),
    "alibi_sign": ("func alibi fp16", {"out", "softmax_lse"}),
    "alibi_softcapped": ("softcap+alibi", {"out", "softmax_lse"}),
    "tiled_heads": ("func causal gqa fp32", {"out", "dk", "dv"}),
    "log2_lse": ("func softcap fp16", {"softmax_lse"}),
    "fp16_accumulation": ("8192 keys one-sided", {"out"}),
    "unwindowed_backward": ("window sq", {"dq", "dk", "dv"}),
    "stale_key_tile": ("func causal gqa fp32", {"out", "dk"}),
    "stored_maximum_lost": ("func causal gqa fp32", {"softmax_lse"}),
    "cache_one_row_late": ("kv_decode,kvcache decode", {"k_cache", "v_cache", "out"}),
    "dropout_unscaled": ("dropout", {"out"}),
    "dropout_of_scores": ("dropout", {"out"}),
    "dead_rows_average": ("causal sq", {"out"}),
    "dead_rows_minus_inf": ("causal sq", {"softmax_lse"}),
    "scale_of_padded_head_dim": ("head_dim,d52", {"out", "softmax_lse"}),
    "no_maximum_subtracted": ("large logits", {"out"}),
    "rotary_halves_swapped": ("rotary", {"out", "k_cache"}),
    "leftpad_ignored": ("leftpad", {"out"}),
    "aligned_to_longest": ("skewed", {"out", "softmax_lse"}),
    "gradient_of_one_group_head": ("func causal gqa fp32", {"dk", "dv"}),
    "values_share_a_scale": ("func sizes gqa bf16", {"out", "dq"}),
    "upstream_shares_a_scale": ("func sizes gqa bf16", {"dq", "dk", "dv"}),
    "scores_share_a_scale": ("func sizes gqa bf16", {"dq"}),
    "neighbouring_head_leaks": ("func sizes gqa fp32", {"out"}),
    "largest_of_all_sequences": ("of one sequence", {"out", "dq"}),
    "padding_times_zero": ("outside,behind", {"out"}),
}
# These leave the other quantities right, and verify must say so.
UNTOUCHED = {
    "log2_lse": {"out", "dq", "dk", "dv"},
    "unwindowed_backward": {"out", "softmax_lse"},
    "dead_rows_minus_inf": {"out", "dq", "dk", "dv"},
    "gradient_of_one_group_head": {"out", "softmax_lse", "dq"},
    "upstream_shares_a_scale": {"out", "softmax_lse"},
}


def verify(implementation: str, tmp_path: Path, *arguments: str) -> tuple[int, list[dict]]:
    """The exit code and the rows of a quick comparison."""
    saved = tmp_path / "rows.json"
    judged = ["--quick", "--implementation", f"tests.verify.mutants:{implementation}", "--device", "cpu"]
    code = main([*judged, "--json", str(saved), *arguments])
    return code, json.loads(saved.read_text())["rows"]


def test_every_mutant_has_an_expectation():
    defined = {name for name, value in vars(mutants).items() if isinstance(value, mutants.Naive)}
    assert defined == {*FOUND, "correct"}


@pytest.mark.thorough  # CI has `verify --quick` judge the package itself
def test_the_right_implementation_passes_every_quick_case(tmp_path):
    code, rows = verify("correct", tmp_path)
    others = {row["case"]: row["verdict"] for row in rows if row["verdict"] != "pass"}
    assert set(others.values()) == {"declined"} and all("e4m3" in case or "e5m2" in case for case in others)
    assert code == 0 and len(rows) > 62


@pytest.mark.parametrize("mutant", FOUND)
def test_a_wrong_implementation_is_found_in_the_quantity_that_is_wrong(mutant, tmp_path):
    cases, expected = FOUND[mutant]
    code, rows = verify(mutant, tmp_path, "-k", cases)
    wrong = {check["quantity"] for row in rows for check in row["checks"] if not check["ok"]}
    assert code == 1
    assert expected <= wrong
    assert not wrong & UNTOUCHED.get(mutant, set())


def test_the_command_names_the_case_that_a_mutant_fails(tmp_path, capsys):
    assert verify("top_left_causal", tmp_path, "-k", "causal_sq_lt_sk")[0] == 1
    shown = capsys.readouterr().out
    assert "causal_sq_lt_sk" in shown and "FAIL" in shown
