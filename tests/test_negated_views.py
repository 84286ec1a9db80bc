"""The imaginary part of a conjugate holds its numbers with the other sign: PyTorch's operators know, kernels do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused import launcher
from flash_attn_compat.flash_attn_interface import _flash_attn_backward
from tests import fused_on_cpu
from tests.fused_on_cpu import Launches
from tests.support import randn


def negated(tensor: Tensor) -> Tensor:
    """Equal to ``tensor``, over memory that holds it with the other sign."""
    view = torch._neg_view(-tensor)
    assert view.is_neg() and torch.equal(view, tensor)
    return view


def half(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, seed=seed, dtype=torch.float16)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return fused_on_cpu.record(monkeypatch)


@pytest.mark.parametrize("packed", [False, True])
def test_kernels_get_memory_that_holds_what_the_caller_sees(launches: Launches, packed: bool) -> None:
    q, k, v = (half(1, 20, 2, 32, seed=seed) for seed in range(3))
    starts = torch.tensor([0, 20], dtype=torch.int32)
    given = []

    def attend(*tensors: Tensor) -> None:
        if packed:
            flash_attn_varlen_func(*(tensor[0] for tensor in tensors), starts, starts, 20, 20)
        else:
            flash_attn_func(*tensors)

    with torch.no_grad(), use_backend("fused"), pytest.MonkeyPatch.context() as patch:
        address = launcher.address
        patch.setattr(
            launcher, "address", lambda name, tensor, *rest: given.append(tensor) or address(name, tensor, *rest)
        )
        for tensors in [(q, k, v), (negated(q), k, v), (q, negated(k), v), (q, k, negated(v))]:
            given.clear()
            attend(*tensors)
            attend(*tensors)
            assert len(given) >= 6 and not any(tensor.is_neg() for tensor in given)
            for seen, right in zip(given[:3], (q, k, v)):
                assert torch.equal(seen.reshape(right.shape), right)


def test_a_negated_gradient_is_what_it_reads_as() -> None:
    q, k, v, dout = (randn(1, 5, 2, 8, seed=seed) for seed in range(4))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    expected = torch.autograd.grad(flash_attn_func(*leaves), leaves, dout)
    found = torch.autograd.grad(flash_attn_func(*leaves), leaves, negated(dout))
    assert all(map(torch.equal, found, expected))


def test_a_backward_launches_over_no_negated_gradient(launches: Launches) -> None:
    q, k, v, dout = (half(1, 20, 2, 32, seed=seed) for seed in range(4))
    out, lse, into = torch.zeros_like(q), torch.zeros(1, 2, 20), [torch.empty_like(q) for _ in range(3)]
    with use_backend("fused"):
        _flash_attn_backward(negated(dout), q, k, v, out, lse, *into, 0.0, 0.1, False, -1, -1, 0.0, None, False)
    assert "dq" in launches.entries


def test_a_cache_that_a_kernel_cannot_write_is_refused_and_left_alone(launches: Launches) -> None:
    k_cache, v_cache = negated(half(1, 20, 2, 32)), half(1, 20, 2, 32)
    before = k_cache.clone(), v_cache.clone()
    lengths = torch.tensor([4], dtype=torch.int32)
    new = half(1, 1, 2, 32)
    with use_backend("fused"), pytest.raises(RuntimeError, match="negated"):
        flash_attn_with_kvcache(new, k_cache, v_cache, new, new, cache_seqlens=lengths)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1]) and not launches.seen


def test_a_negated_cache_is_written_where_pytorch_does_it() -> None:
    plain = [randn(1, 20, 2, 16, seed=seed) for seed in range(2)]
    views = [negated(tensor) for tensor in plain]
    new, lengths = randn(1, 1, 2, 16), torch.tensor([4], dtype=torch.int32)
    expected = flash_attn_with_kvcache(new, *plain, new, new, cache_seqlens=lengths)
    assert torch.equal(flash_attn_with_kvcache(new, *views, new, new, cache_seqlens=lengths), expected)
    assert all(map(torch.equal, views, plain))
