"""yunchang (long-context-attention) in two processes over gloo: ring, zigzag and Ulysses against the whole sequence."""

from __future__ import annotations

import importlib.util

import pytest

from tests.clients.launch import run_two_processes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("yunchang") is None, reason="yunchang is not installed")
CASES = ["ring, causal", "ring, full", "zigzag, causal", "ulysses, causal"]


def test_every_variant_gives_output_and_gradients_of_the_whole_sequence(tmp_path):
    results = run_two_processes("tests.clients.yunchang_worker", tmp_path / "errors.json")
    assert results["errors"].keys() == set(CASES) and results["calls"] >= 2 * len(CASES)
    # bf16 rounds to 4e-3 and each partial gradient is rounded; a mistake would show as 0.1 and more.
    far = {case: errors for case, errors in results["errors"].items() if not max(errors.values()) <= 2e-2}
    assert far == {}
