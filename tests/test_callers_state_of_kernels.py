"""The caller's default dtype, default device and autocast, on the way to and from the GPUs' kernels: no digit changes.

The kernels are their stand-ins for a CPU, so that every cut of a call into launches is seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import flash_attn_interface
from tests import efficient_kernels, fused_on_cpu
from tests.kernels import emulate
from tests.test_torch_flash import newest  # noqa: F401 - a fixture
from verify.drawing import random_problem
from verify.examination import Examination
from verify.judge import of_other_form
from verify.problems import Problem


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "default dtype fp16": functools.partial(default_dtype, torch.float16),
    "default dtype bf16": functools.partial(default_dtype, torch.bfloat16),
    "default dtype fp64": functools.partial(default_dtype, torch.float64),
    "default device meta": functools.partial(torch.device, "meta"),
    "autocast to bf16": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "autocast to fp16": functools.partial(torch.autocast, "cpu", dtype=torch.float16),
}


def answers(examination: Examination) -> list[Tensor]:
    """Everything a problem gives, its caches included, which are put back."""
    torch.manual_seed(0)
    caches = [examination.call.args[name] for name in ("k_cache", "v_cache") if name in examination.call.args]
    before = [cache.clone() for cache in caches]
    try:
        answer = examination.ask(getattr(flash_attn_interface, examination.call.fn))
        assert not of_other_form(examination.call, answer)
        found = (answer.out, answer.softmax_lse, answer.s_dmask, *answer.grads.values(), *caches)
        return [tensor.clone() for tensor in found if tensor is not None]
    finally:
        for cache, values in zip(caches, before, strict=True):
            cache.copy_(values)


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and a.device == b.device and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for a, b in zip(one, other, strict=True)
    )


def check(backend: str, problems: Iterable[Problem]) -> None:
    served = 0
    for problem in problems:
        if backend == "torch_efficient" and problem.dropout_p > 0:  # the stand-in has none
            continue
        examination = Examination(problem)
        with flash_attn_compat.use_backend(backend):
            try:
                expected = answers(examination)
            except flash_attn_compat.BackendNotSupported:
                continue
            served += 1
            for state, enter in STATES.items():
                with enter():
                    found = answers(examination)
                assert are_equal(found, expected), (state, problem)
    assert served >= 5


def test_torch_efficient(monkeypatch: pytest.MonkeyPatch) -> None:
    efficient_kernels.install(monkeypatch)
    check("torch_efficient", map(random_problem, range(60)))


EVEN = Problem(seqlens_q=(90, 90), seqlens_k=(90, 90), group=2, dtype="float16")
PACKED = Problem("varlen", (60, 0, 33), (60, 0, 33), nheads_k=2, dtype="bfloat16")
WAYS = [
    replace(EVEN, causal=True, alibi="h"), replace(EVEN, window=(20, 7), softcap=3.0, dropout_p=0.2),
    replace(PACKED, seqlens_q=(7, 20, 33), alibi="bh", gap=(1, 0)),
    Problem("kvcache", (1, 1), (300, 7), capacity=700, causal=True, group=2, nheads_k=2, dtype="float16"),
    Problem("kvcache", (3, 3), (30, 7), capacity=70, new_keys=3, causal=True, nheads_k=2, dtype="bfloat16"),
]  # fmt: skip


@pytest.mark.skipif(bool(emulate.why_not()), reason=emulate.why_not() or "emulated")
def test_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch)
    check("fused", WAYS)


@pytest.mark.usefixtures("newest")
def test_torch_flash() -> None:
    check("torch_flash", map(random_problem, range(40)))


@pytest.mark.parametrize("backend", ["chunked", "sdpa", "reference"])
def test_backends_of_any_device(backend: str) -> None:
    check(backend, map(random_problem, range(10)))
