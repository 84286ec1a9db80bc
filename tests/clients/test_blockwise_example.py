"""examples/blockwise_attention.py: chunks of queries and keys give the output and gradients of the whole sequence."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from verify import oracle

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
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 45, heads, 16).to(dtype) for heads in (4, 2, 2, 4))
    arguments = {"q": q, "k": k, "v": v, "causal": causal}
    exact, plain = oracle.answer("flash_attn_func", arguments, dout), oracle.plain("flash_attn_func", arguments, dout)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = example.blockwise_attention(*inputs, causal, *chunks)
    gradients = torch.autograd.grad(out, inputs, dout)
    assert error(out.detach(), exact.out) <= 2 * error(plain.out, exact.out) + 1e-7
    for name, gradient in zip(("q", "k", "v"), gradients):
        # Each block rounds its part of a gradient, hence the wider bound.
        assert error(gradient, exact.grads[name]) <= 4 * error(plain.grads[name], exact.grads[name]) + 1e-6


def test_the_example_runs_as_a_script(example, capsys):
    example.main()
    assert len(capsys.readouterr().out.splitlines()) == 2


def error(got, exact):
    return float((got.double() - exact).abs().max())
