"""Tensors may reach farther than 32 bits count elements. What is never touched between them takes no memory here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from tests import fused_on_cpu
from tests.fused_on_cpu import Launches, sparse
from tests.kernels import emulate
from tests.kernels.emulate import EmulationError
from tests.test_fused_backend import mutated

pytestmark = pytest.mark.skipif(bool(emulate.why_not()), reason=emulate.why_not())

HEADS, DIM, ROWS = 4, 32, 70
Move = Callable[[Tensor], Tensor]


def far(x: Tensor, dim: int) -> Tensor:
    """A copy whose last element along ``dim`` lies nearly 2^32 elements behind the first."""
    strides = list(x.contiguous().stride())
    strides[dim] = 2**32 // (x.shape[dim] - 1) // 8 * 8
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    return sparse(last + 1, x.dtype).as_strided(x.shape, strides).copy_(x)


def randn(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)), dtype=dtype)


def trained(move: Move, dim: int = DIM, dtype: torch.dtype = torch.float16) -> Iterator[Tensor]:
    q, k, v, dout = (move(x) for x in randn(4, 2, ROWS, HEADS, dim, dtype=dtype).unbind())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, causal=True)
    yield out.detach()
    yield from torch.autograd.grad(out, leaves, dout)


def packed(move: Move) -> Iterator[Tensor]:
    q, k, v, dout = (move(x) for x in randn(4, 2 * ROWS, HEADS, DIM).unbind())
    leaves, starts = [x.requires_grad_() for x in (q, k, v)], torch.tensor([0, ROWS - 9, 2 * ROWS], dtype=torch.int32)
    out = flash_attn_varlen_func(*leaves, starts, starts, ROWS + 9, ROWS + 9, causal=True)
    yield out.detach()
    yield from torch.autograd.grad(out, leaves, dout)


def given(move: Move) -> Iterator[Tensor]:
    """What the caller gives to be written."""
    q, k, v, dout, *found = (move(x) for x in randn(7, 2, ROWS, HEADS, DIM).unbind())
    options = dict(dropout_p=0.0, softmax_scale=0.2, causal=True, window_size_left=-1, window_size_right=-1)
    options |= dict(softcap=0.0, alibi_slopes=None)
    out, lse, *_ = _flash_attn_forward(q, k, v, **options, return_softmax=False)
    _flash_attn_backward(dout, q, k, v, move(out), lse, *found, **options, deterministic=False)
    yield from found


def cached(move: Move, rows: int = 1, new_keys: int = 2, page_size: int | None = None) -> Iterator[Tensor]:
    lengths = torch.tensor([150, 9], dtype=torch.int32)
    slots = (2, 192) if page_size is None else (384 // page_size, page_size)
    table = None if page_size is None else torch.arange(slots[0], dtype=torch.int32).flip(0).view(2, -1)
    k_cache, v_cache = (move(randn(*slots, HEADS, DIM) + extra) for extra in (0, 1))
    q, *new = (move(randn(2, count, HEADS, DIM)) for count in (rows, new_keys, new_keys))
    tables = (move(randn(192, 1, DIM // 2)).squeeze(1) for _ in range(2))
    yield flash_attn_with_kvcache(q, k_cache, v_cache, *new, *tables, lengths, block_table=table, causal=True)
    yield from (k_cache, v_cache)


CALLS: dict[str, Callable[[Move], Iterator[Tensor]]] = {
    "trained": trained,
    "trained, converted": lambda move: trained(move, dtype=torch.bfloat16),
    "trained, odd channels": lambda move: trained(move, dim=31),
    "gradients given": given,
    "packed": packed,
    "decoding": lambda move: cached(move, new_keys=2),
    "many new keys": lambda move: cached(move, new_keys=20),
    "many rows": lambda move: cached(move, rows=30, new_keys=30),
    "decoding over pages": lambda move: cached(move, page_size=16),
    "many rows over pages": lambda move: cached(move, rows=30, new_keys=30, page_size=16),
}


# Along a tensor's first dimension, its rows (the second one where there are four) and its heads.
@pytest.mark.parametrize("dim", [-4, -3, -2])
@pytest.mark.parametrize("name", CALLS)
def test_answers_have_the_same_bits_however_far_their_tensors_reach(turing: Launches, name: str, dim: int) -> None:
    check(turing, name, dim)


def check(launches: Launches, name: str, dim: int) -> None:
    def move(x: Tensor) -> Tensor:
        along = max(dim, -x.ndim)
        return far(x, along) if x.shape[along] > 1 else x

    expected, found = list(CALLS[name](torch.clone)), list(CALLS[name](move))
    assert all(map(torch.equal, found, expected))
    half = len(launches.entries) // 2
    assert launches.entries[:half] == launches.entries[half:]


WRONG = {
    "rows of Q": ("common.cuh", "x + b * s.batch + (i64)row * s.row", "packed", -3),
    "heads of the backward": ("backward.cuh", "(i64)(head + which) * s.head", "trained", -2),
    "rows of keys": ("common.cuh", "(i64)(first_slot + row) * s.row", "many rows", -3),
    "rows of gradients": ("common.cuh", "out + (i64)(first_row + row) * row_stride", "gradients given", -3),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_offset_of_32_bits_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, offset, call, dim = WRONG[name]
    sources = mutated(tmp_path, file, offset, offset.replace("(i64)", ""))
    launches = fused_on_cpu.emulate(monkeypatch, sources=sources)
    with use_backend("fused"), pytest.raises((EmulationError, AssertionError)):
        check(launches, call, dim)
