"""Tensors may reach farther than 32 bits count elements; untouched memory in between is never allocated here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_interface, use_backend
from flash_attn_compat.dispatch import call_cache
from tests.forms.plain import some, some_of
from tests.kernels import emulate, fused_on_cpu
from tests.kernels.emulate import EmulationError
from tests.kernels.fused_on_cpu import LaunchRecord, sparse
from tests.kernels.test_backend import mutated
from verify.call import Call, solve
from verify.problems import Problem

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())

TRAINED = Problem(seqlens_q=(70, 70), seqlens_k=(70, 70), nheads_k=4, head_dim=32, dtype="float16", causal=True)
CACHED = replace(TRAINED, kind="kvcache", seqlens_q=(1, 1), seqlens_k=(150, 9), capacity=192, new_keys=2, rotary_dim=32)
PROMPT = replace(CACHED, seqlens_q=(30, 30), new_keys=30)
CALLS = {
    "trained": TRAINED,
    "trained, converted": replace(TRAINED, dtype="bfloat16"),
    "trained, odd channels": replace(TRAINED, head_dim=31),
    "gradients given": TRAINED,
    "packed": replace(TRAINED, kind="varlen", seqlens_q=(61, 79), seqlens_k=(61, 79)),
    "decoding": CACHED,
    "many new keys": replace(CACHED, new_keys=20),
    "many rows": PROMPT,
    "decoding over pages": replace(CACHED, page_size=16),
    "many rows over pages": replace(PROMPT, page_size=16),
}


ALONE = {
    "one sequence of one head": replace(TRAINED, seqlens_q=(9,), seqlens_k=(9,), nheads_k=1, alibi="bh"),
    "a step of one sequence": replace(CACHED, seqlens_q=(1,), seqlens_k=(9,), nheads_k=1, new_keys=1, page_size=16),
}


def far(x: Tensor, dim: int) -> Tensor:
    """A copy whose last element along ``dim`` lies nearly 2^32 elements behind the first."""
    dim = max(dim, -x.ndim)
    if not x.is_floating_point() or x.shape[dim] < 2:
        return x.clone()
    strides = list(x.contiguous().stride())
    strides[dim] = 2**32 // (x.shape[dim] - 1) // 8 * 8
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    return sparse(last + 1, x.dtype).as_strided(x.shape, strides).copy_(x)


def answers(name: str, move: Callable[[Tensor], Tensor]) -> list[Tensor]:
    call = (CALLS | ALONE)[name].build()
    args = {name: move(x) if isinstance(x, Tensor) else x for name, x in call.args.items()}
    dout = None if call.dout is None else move(call.dout)
    if name != "gradients given":
        return list(solve(getattr(flash_attn_interface, call.fn), Call(call.fn, args, dout)).parts.values())
    q, k, v = (args[name] for name in "qkv")
    rules: tuple[Any, ...] = (0.0, 0.2, True, -1, -1, 0.0, None, False)
    out, lse, *_ = flash_attn_interface._flash_attn_forward(q, k, v, *rules)
    places = [move(torch.full_like(x, torch.nan)) for x in (q, k, v)]
    flash_attn_interface._flash_attn_backward(dout, q, k, v, move(out), lse, *places, *rules)
    return places


# Along a tensor's first dimension, its rows (the second one where there are four) and its heads.
@pytest.mark.parametrize(("name", "dim"), some_of(itertools.product(CALLS, (-4, -3, -2)), 4))
def test_answers_have_the_same_bits_however_far_their_tensors_reach(turing: LaunchRecord, name: str, dim: int) -> None:
    check(turing, name, dim)


def check(launches: LaunchRecord, name: str, dim: int) -> None:
    expected, found = answers(name, torch.clone), answers(name, lambda x: far(x, dim))
    assert all(map(torch.equal, found, expected))
    half = len(launches.entries) // 2
    assert launches.entries[:half] == launches.entries[half:]


@pytest.mark.usefixtures("turing")
@pytest.mark.parametrize("stride", [0, 3, 2**33])
@pytest.mark.parametrize("name", ALONE)
def test_calls_that_differ_in_strides_that_lead_nowhere_are_alike(name: str, stride: int) -> None:
    def moved(x: Tensor) -> Tensor:
        return x.as_strided(x.shape, [own if size > 1 else stride for size, own in zip(x.shape, x.stride())])

    for moves in (torch.clone, moved), (moved, torch.clone):
        call_cache.forget()
        assert all(map(torch.equal, *(answers(name, move) for move in moves)))
        assert len(call_cache.current().calls) == 1


WRONG = {
    "rows of Q": ("base/sequences.cuh", "x + b * s.batch + (i64)row * s.row", "packed", -3),
    "heads of the backward": ("gradients/backward.cuh", "(i64)(head + which) * s.head", "trained", -2),
    "rows of keys": ("base/tiles.cuh", "(i64)(first_slot + row) * s.row", "many rows", -3),
    "rows of gradients": ("base/tiles.cuh", "out + (i64)(first_row + row) * row_stride", "gradients given", -3),
}


@pytest.mark.parametrize("name", some(WRONG, 4))
def test_an_offset_of_32_bits_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, offset, call, dim = WRONG[name]
    sources = mutated(tmp_path, file, offset, offset.replace("(i64)", ""))
    launches = fused_on_cpu.emulate(monkeypatch, sources=sources)
    with use_backend("fused"), pytest.raises((EmulationError, AssertionError)):
        check(launches, call, dim)
