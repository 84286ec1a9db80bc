"""bf16 on GPUs whose tensor cores take fp16: every sequence and head keeps its digits, however large the others are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, use_backend
from tests import fused_on_cpu
from tests.support import cumulative, randn

BF16 = torch.bfloat16
LENGTHS, GAP = (40, 0, 33, 27), 3  # of packed sequences, and the tokens before the first and behind the last one
STARTS = (cumulative(*LENGTHS) + GAP).to(torch.int32)


@pytest.fixture(autouse=True)
def on_a_turing_gpu_by_pretence(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch)


def dense(heads: int) -> Tensor:
    return torch.ones(2, 50, heads, 16)


def packed(heads: int) -> Tensor:
    return torch.ones(sum(LENGTHS) + 2 * GAP, heads, 16)


def spread(ones: Tensor, ratio: float, seed: int) -> Tensor:
    """Random numbers; a head in the middle and the first sequence are ``ratio`` times smaller, both that squared."""
    found = ones * randn(*ones.shape, seed=seed)
    found[..., ones.shape[-2] // 2, :] /= ratio
    found[: 1 if ones.dim() == 4 else GAP + LENGTHS[0]] /= ratio
    return found.to(BF16)


def gradients(tensors: list[Tensor], dout: Tensor, **options: Any) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    if leaves[0].dim() == 4:
        out = flash_attn_func(*leaves, **options)
    else:
        out = flash_attn_varlen_func(*leaves, STARTS, STARTS, max(LENGTHS), max(LENGTHS), **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def parts(tensor: Tensor) -> list[Tensor]:
    """(tokens, heads, size) of each sequence that has tokens."""
    if tensor.dim() == 4:
        return list(tensor)
    bounds = STARTS.tolist()
    return [tensor[start:stop] for start, stop in itertools.pairwise(bounds) if stop > start]


def worst(found: Tensor, right: Tensor) -> float:
    """The largest error of any sequence and head, over the largest number that belongs there."""
    return max(
        float((one - other).abs().amax((0, 2)).div(other.abs().amax((0, 2))).max())
        for one, other in zip(parts(found.double()), parts(right), strict=True)
    )


# Heads that share a key head share its powers of two, too.
@pytest.mark.parametrize(("group", "ratio"), [(1, 1.0), (1, 1e5), (1, 1e8), (1, 1e12), (2, 1.0), (2, 1e5), (2, 1e8)])
@pytest.mark.parametrize("small", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("like", [dense, packed])
def test_a_small_head_or_sequence_is_as_exact_as_a_large_one(
    like: Callable[[int], Tensor], group: int, small: str, ratio: float
) -> None:
    heads = {"q": 4, "k": 4 // group, "v": 4 // group, "dout": 4}
    q, k, v, dout = (
        spread(like(heads[name]), ratio if name == small else 1.0, seed) for seed, name in enumerate(heads)
    )
    with use_backend("fused"):
        found = gradients([q, k, v], dout, causal=True)
    with use_backend("reference"):
        right = gradients([q.double(), k.double(), v.double()], dout, causal=True)
        plain = [tensor.to(BF16) for tensor in right]
    for name, one, exact, rounded in zip(("out", "dq", "dk", "dv"), found, right, plain, strict=True):
        # Results are rounded once, operands and probabilities inside some times.
        assert worst(one, exact) <= 3 * worst(rounded, exact) + 2e-3, name


@pytest.mark.parametrize("what", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("like", [dense, packed])
def test_what_is_not_finite_stays_in_its_sequence_and_head(
    like: Callable[[int], Tensor], where: int, what: float
) -> None:
    tensors = [spread(like(4), 1.0, seed) for seed in range(4)]
    with use_backend("fused"):
        right = gradients(tensors[:3], tensors[3], causal=True)
        tensors[where].view(-1, 4, 16)[-GAP - 1, 1, 5] = what  # in the last sequence
        found = gradients(tensors[:3], tensors[3], causal=True)
    for one, other in zip(found, right, strict=True):
        *before, last = zip(parts(one), parts(other), strict=True)
        assert all(torch.equal(*pair) for pair in before)
        assert torch.equal(*(tensor[:, [0, 2, 3]] for tensor in last))


@pytest.mark.parametrize("what", [math.inf, math.nan])
@pytest.mark.parametrize("where", range(4))
def test_rows_that_see_nothing_of_it_keep_their_digits(where: int, what: float) -> None:
    tensors = [randn(1, 200, 2, 16, seed=seed).to(BF16) for seed in range(4)]
    with use_backend("fused"):
        right = gradients(tensors[:3], tensors[3], causal=True)
        tensors[where][0, 190, 1, 5] = what
        found = gradients(tensors[:3], tensors[3], causal=True)
    for one, other in zip(found[:2], right[:2], strict=True):  # out and dq
        assert torch.equal(one[:, :64], other[:, :64])


@pytest.mark.parametrize("what", [math.inf, math.nan, 1e30])
def test_what_lies_outside_of_all_sequences_scales_nothing(what: float) -> None:
    tensors = [spread(packed(4), 1.0, seed) for seed in range(4)]
    with use_backend("fused"):
        right = gradients(tensors[:3], tensors[3], causal=True)
        for tensor in tensors:
            tensor[:GAP] = tensor[-GAP:] = what
        found = gradients(tensors[:3], tensors[3], causal=True)
    assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))
