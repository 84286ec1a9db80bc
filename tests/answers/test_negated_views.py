"""The imaginary part of a conjugate holds its numbers with the other sign: PyTorch's operators know, kernels do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from tests.answers import others_kernels
from tests.forms.inputs import cumulative, randn
from tests.kernels import fused_on_cpu

STARTS = cumulative(20)


def negated(tensor: Tensor) -> Tensor:
    """Equal to ``tensor``, over memory that holds it with the other sign."""
    view = torch._neg_view(-tensor)
    assert view.is_neg() and torch.equal(view, tensor)
    return view


def packed(*qkv: Tensor) -> Tensor:
    return flash_attn_varlen_func(*(x[0] for x in qkv), STARTS, STARTS, 20, 20)[None]


def dropping(*qkv: Tensor) -> Tensor:
    return flash_attn_func(*qkv, dropout_p=0.3)


def sloping(*qkv: Tensor) -> Tensor:
    slopes = torch.tensor([0.3, 0.1])
    return flash_attn_func(*qkv, alibi_slopes=negated(slopes) if any(x.is_neg() for x in qkv) else slopes)


@pytest.mark.parametrize("attend", [flash_attn_func, packed, dropping, sloping])
@pytest.mark.parametrize("backend", ["fused", "sdpa", "chunked"])
def test_negated_views_give_the_answers_and_gradients_of_their_values(
    attend: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "sdpa" and attend is dropping:
        pytest.skip("computes no dropout")
    fused_on_cpu.emulate(monkeypatch)
    tensors = [randn(1, 20, 2, 32, seed=seed, dtype=torch.float16) for seed in range(4)]

    def answers(*given: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        leaves = [x.requires_grad_() for x in given[:3]]
        with use_backend(backend):
            out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, given[3])]

    expected = answers(*(x.clone() for x in tensors))
    for which in range(4):
        for _ in range(2):  # the second one by what was kept of the first
            found = answers(*(negated(x) if index == which else x.clone() for index, x in enumerate(tensors)))
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", ["fused", "official", "chunked"])
def test_a_private_backward_reads_and_writes_negated_views(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if backend == "official":
        others_kernels.install(monkeypatch, backend, tmp_path)
    else:
        fused_on_cpu.emulate(monkeypatch)
    dout, q, k, v = (randn(1, 20, 2, 32, seed=seed, dtype=torch.float16) for seed in range(4))
    options = 0.0, 0.2, True, -1, -1, 0.0
    slopes = torch.tensor([0.3, 0.1])

    def answers(which: int = -1) -> list[Tensor]:
        def seen(*tensors: Tensor) -> list[Tensor]:
            return [negated(x) if index == which else x for index, x in enumerate(tensors)]

        with use_backend(backend):
            out, lse, _, _ = _flash_attn_forward(q, k, v, *options, seen(slopes)[0], False)
            given = seen(slopes, dout, q, k, v, out, lse, *map(torch.zeros_like, (q, k, v)))
            softmax_d = _flash_attn_backward(*given[1:], *options, given[0], False)
        return [softmax_d, *given[7:]]

    expected = answers()
    for which in range(10):
        for _ in range(2):  # the second one by what was kept of the first
            assert all(map(torch.equal, answers(which), expected)), which


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
