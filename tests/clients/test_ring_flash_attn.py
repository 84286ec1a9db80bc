"""ring-flash-attn 0.1.8, unmodified, in two processes over gloo: outputs and gradients against the whole sequence."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys

import pytest

from tests.clients import ring_worker
from tests.clients.ring_worker import Outcome, capabilities
from tests.interpreters import forked_group, free_port

CASES = {
    "ring, causal",
    "ring, full",
    "zigzag, causal",
    "stripe, causal",
    "ring varlen, causal",
    "ring varlen, full",
    "zigzag varlen, causal",
    "llama3 varlen, causal",
    "llama3 varlen, full",
}


def worker(rank, port, output):
    """As torchrun starts it under `flash-attn-compat run`."""
    import flash_attn_compat

    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    sys.argv[1:] = [output]
    flash_attn_compat.patch()
    sys.exit(ring_worker.main())


@pytest.mark.skipif(importlib.util.find_spec("ring_flash_attn") is None, reason="ring-flash-attn is not installed")
def test_every_variant_gives_output_and_gradients_of_the_whole_sequence(tmp_path):
    forked_group(worker, free_port(), str(tmp_path / "errors.json"))
    results = json.loads((tmp_path / "errors.json").read_text())
    outcomes = [Outcome(**each) for each in results["outcomes"]]
    assert {each.case for each in outcomes} == CASES and results["world"] == 2
    assert [each.line("float16") for each in outcomes if not each.right("float16")] == []
    # A forward and a backward on each process at least.
    assert [each.case for each in outcomes if sum(each.served_by.values()) < 4] == []


@pytest.mark.parametrize(
    ("errors", "right"),
    [
        ({"out": 9e-4, "dq": 4e-3}, True),
        ({"out": 2e-3, "dq": 4e-3}, False),
        ({"out": 9e-4, "dq": 6e-3}, False),
        ({"out": math.nan, "dq": 4e-3}, False),
        ({"out": 9e-4, "dq": math.nan}, False),
    ],
)
def test_a_case_beyond_its_bound_or_no_number_is_called_wrong(errors, right):
    outcome = Outcome("ring, causal", "as it is", errors, {"sdpa": 4})
    assert outcome.right("float16") is right
    assert outcome.line("float16").startswith("right" if right else "WRONG")


def test_a_gpu_is_tried_as_it_is_and_as_a_turing_gpu_unless_the_environment_decides(monkeypatch):
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CAPABILITY", raising=False)
    assert capabilities("cuda") == [None, "7.5"] and capabilities("cpu") == [None]
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.0")
    assert capabilities("cuda") == [None]
