"""What surrounds attention compiles in one graph, forward and backward, and is what it is without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func
from flash_attn_compat.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn_compat.losses.cross_entropy import CrossEntropyLoss
from flash_attn_compat.ops import activations as act
from flash_attn_compat.ops.rms_norm import rms_norm
from flash_attn_compat.ops.triton.layer_norm import layer_norm_fn
from tests.support import cumulative, qkv, randn

COS, SIN = randn(9, 5).cos(), randn(9, 5).sin()
OFFSETS, STARTS = torch.tensor([1, 3]), cumulative(4, 6)
ROTARY = RotaryEmbedding(8)
LABELS = torch.tensor([1, 4, -100, 0])


def norms(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    y: Any
    y, h = layer_norm_fn(x, weight, None, residual=residual, prenorm=True)
    return y + h + rms_norm(x, weight, 1e-5)


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "rotary": (lambda x: apply_rotary_emb(x * 2, COS, SIN, seqlen_offsets=OFFSETS), [randn(2, 5, 3, 16)]),
    "rotary of packed sequences in place": (
        lambda x: apply_rotary_emb(
            x * 2, COS, SIN, inplace=True, seqlen_offsets=OFFSETS, cu_seqlens=STARTS, max_seqlen=6
        ),
        [randn(10, 3, 16)],
    ),
    "rotary module": (lambda x: ROTARY(x * 1.0), [randn(2, 5, 3, 3, 16)]),
    "norms": (norms, [randn(3, 24), randn(3, 24, seed=1), randn(24)]),
    "cross entropy": (lambda x: CrossEntropyLoss(label_smoothing=0.1)(x * 1.0, LABELS), [randn(4, 7)]),
    "activations": (
        lambda x, y, b: act.swiglu(x, y) + act.bias_gelu_impl(x, b) + act.fast_gelu_impl(y),
        [randn(4, 8), randn(4, 8, seed=1), randn(8)],
    ),
    "attention sinks": (
        lambda q, k, v, sinks: flash_attn_func(q, k, v, causal=True, s_aux=sinks), [*qkv(sq=5, sk=9), randn(2)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_without_a_compiler(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = call(*leaves)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right)
