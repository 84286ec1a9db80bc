"""ring-flash-attn 0.1.8, unmodified, in two processes over gloo: outputs and gradients against the whole sequence."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flash_attn_compat

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


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    output = tmp_path_factory.mktemp("ring") / "errors.json"
    worker = Path(__file__).with_name("ring_worker.py")
    root = os.path.dirname(os.path.dirname(flash_attn_compat.__file__))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker), str(output)]
    command = [sys.executable, "-W", "ignore", "-m", "flash_attn_compat", "run", *launcher]
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_equal_those_of_the_whole_sequence(results, case):
    errors = results["errors"][case]
    # fp16 rounds to 5e-4; the ring variants round each partial gradient, a mistake would show as 0.1 and more.
    assert errors["out"] <= 1e-3, errors
    assert max(errors["dq"], errors["dk"], errors["dv"]) <= 5e-3, errors


def test_every_variant_ran_on_this_package(results):
    assert results["errors"].keys() == set(CASES)
    assert results["world"] == 2 and results["calls"] >= 2 * len(CASES)
