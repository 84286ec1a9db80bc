"""The imaginary part of a conjugate holds its numbers with the other sign: PyTorch's operators know, kernels do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused import launcher
from tests import fused_on_cpu
from tests.support import cumulative, randn

STARTS = cumulative(20)


def negated(tensor: Tensor) -> Tensor:
    """Equal to ``tensor``, over memory that holds it with the other sign."""
    view = torch._neg_view(-tensor)
    assert view.is_neg() and torch.equal(view, tensor)
    return view


def packed(*qkv: Tensor) -> Tensor:
    return flash_attn_varlen_func(*(x[0] for x in qkv), STARTS, STARTS, 20, 20)[None]


@pytest.mark.parametrize("attend", [flash_attn_func, packed])
def test_kernels_get_memory_that_holds_what_the_caller_sees(attend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, given = fused_on_cpu.record(monkeypatch), []
    addresses = launcher.Plan.addresses

    def noted(plan: launcher.Plan, tensors: tuple[Tensor | None, ...]) -> list[int]:
        given.extend(tensor for tensor in tensors if tensor is not None)
        return addresses(plan, tensors)

    monkeypatch.setattr(launcher.Plan, "addresses", noted)
    tensors = [randn(1, 20, 2, 32, seed=seed, dtype=torch.float16) for seed in range(4)]
    for which in range(4):
        *qkv, dout = [negated(x) if index == which else x for index, x in enumerate(tensors)]
        leaves = [x.requires_grad_() for x in qkv]
        for _ in range(2):
            given.clear()
            with use_backend("fused"):
                torch.autograd.grad(attend(*leaves), leaves, dout)
            assert len(given) >= 6 and not any(tensor.is_neg() for tensor in given)
            for seen, right in zip(given[:3], tensors):
                assert torch.equal(seen.reshape(right.shape), right)
    assert "dq" in launches.entries


def test_a_negated_gradient_is_what_it_reads_as() -> None:
    *leaves, dout = (randn(1, 5, 2, 8, seed=seed).requires_grad_(seed < 3) for seed in range(4))
    expected, found = (torch.autograd.grad(flash_attn_func(*leaves), leaves, x) for x in (dout, negated(dout)))
    assert all(map(torch.equal, found, expected))


def test_a_negated_cache_is_written_by_pytorch_and_refused_for_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [randn(1, 20, 2, 16, seed=seed) for seed in range(2)]
    views = [negated(tensor) for tensor in plain]
    new, lengths = randn(1, 1, 2, 16), torch.tensor([4], dtype=torch.int32)
    expected = flash_attn_with_kvcache(new, *plain, new, new, cache_seqlens=lengths)
    assert torch.equal(flash_attn_with_kvcache(new, *views, new, new, cache_seqlens=lengths), expected)
    assert all(map(torch.equal, views, plain))
    launches = fused_on_cpu.record(monkeypatch)
    halves, new = [negated(x.half()) for x in plain], new.half()
    with use_backend("fused"), pytest.raises(RuntimeError, match="negated"):
        flash_attn_with_kvcache(new, *halves, new, new, cache_seqlens=lengths)
    assert all(torch.equal(half, x.half()) for half, x in zip(halves, plain)) and not launches.seen
