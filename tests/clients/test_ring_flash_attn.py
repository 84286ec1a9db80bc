"""ring-flash-attn 0.1.8, unmodified, in two processes over gloo: outputs and gradients against the whole sequence."""

from __future__ import annotations

import importlib.util

import pytest

from tests.clients.launch import run_two_processes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ring_flash_attn") is None, reason="ring-flash-attn is not installed"
)
CASES = [
    "ring, causal",
    "ring, full",
    "zigzag, causal",
    "stripe, causal",
    "ring varlen, causal",
    "ring varlen, full",
    "zigzag varlen, causal",
    "llama3 varlen, causal",
    "llama3 varlen, full",
]


def test_every_variant_gives_output_and_gradients_of_the_whole_sequence(tmp_path):
    results = run_two_processes("tests.clients.ring_worker", tmp_path / "errors.json")
    assert results["errors"].keys() == set(CASES)
    assert results["world"] == 2 and results["calls"] >= 2 * len(CASES)
    # fp16 rounds to 5e-4 and each partial gradient is rounded; a mistake would show as 0.1 and more.
    far = {
        case: errors
        for case, errors in results["errors"].items()
        if not (errors["out"] <= 1e-3 and max(errors.values()) <= 5e-3)
    }
    assert far == {}
