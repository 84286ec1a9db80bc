"""examples/blockwise_attention.py: chunks of queries and keys give the output and gradients of the whole sequence."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.plain import attention, check_function
from tests.support import randn

PATH = Path(__file__).resolve().parents[2] / "examples" / "blockwise_attention.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("blockwise_attention_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("chunks", [(16, 16), (16, 7), (5, 16), (100, 100)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunks_give_output_and_gradients_of_the_whole_sequence(example, chunks, causal, dtype):
    """Each block rounds its part of a gradient, hence some epsilons more."""
    check_function(
        lambda *qkv: example.blockwise_attention(*qkv, causal, *chunks),
        lambda *qkv: attention(*qkv, window=(-1, 0 if causal else -1)),
        *(randn(2, 45, heads, 16, seed=heads, dtype=dtype) for heads in (4, 2, 2)),
        epsilons=4,
    )


def test_the_example_runs_as_a_script(example, capsys):
    example.main()
    assert len(capsys.readouterr().out.splitlines()) == 2
