"""The kernel that finds all gradients where one tile holds all keys of a sequence, run by the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import flash_attn_interface
from tests.forms.plain import some
from tests.kernels import emulate, fused_on_cpu
from tests.kernels.test_kernels import DENSE, PACKED, TOGETHER, TRAINING, check

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())

SHORT = replace(DENSE, seqlens_q=(100,), seqlens_k=(57,), nheads_k=2, head_dim=64)
ONE_TILE = {
    name: problem
    for name, problem in TRAINING.items()
    if max(problem.seqlens_k) <= 128 and problem.head_dim <= 64 and problem.dtype == "float16"
} | {
    "64 channels": SHORT,
    "64 channels, many rows": replace(SHORT, seqlens_q=(150,), seqlens_k=(64,), causal=True),
    "64 channels, 90 keys": replace(SHORT, seqlens_k=(90,), window=(40, 3)),
    "64 channels, 128 keys": replace(SHORT, seqlens_k=(128,), causal=True),
    "64 channels, 32 keys": replace(SHORT, seqlens_k=(32,), causal=True),
    "64 channels, all at once": replace(TOGETHER, head_dim=64, group=3),
    "80 channels": replace(SHORT, head_dim=80, window=(20, 3)),
    "96 channels": replace(SHORT, head_dim=96, causal=True),
    "128 channels": replace(SHORT, head_dim=128, causal=True),
    "128 channels, 120 keys": replace(SHORT, seqlens_k=(120,), head_dim=128, causal=True),
    "126 channels, 80 keys, many rows": replace(SHORT, seqlens_q=(150,), seqlens_k=(80,), head_dim=126, group=1),
    "packed, 64 channels": replace(PACKED, head_dim=64, nheads_k=2, causal=True),
    "packed, 48 channels, 40 of values": replace(PACKED, head_dim=48, head_dim_v=40),
    "scores far below 0": replace(DENSE, seqlens_q=(6,), seqlens_k=(1,), magnitude=3.0),
    "scores far below 0, packed": replace(PACKED, seqlens_q=(70, 14), seqlens_k=(1, 2), magnitude=4.0),
    "more rows than keys": replace(PACKED, seqlens_q=(150, 5, 0, 70), seqlens_k=(20, 0, 9, 64), causal=True),
}


@pytest.mark.parametrize("name", some(ONE_TILE, 4))
def test_one_kernel_finds_all_gradients_of_few_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, one_tile=True)
    with flash_attn_compat.use_backend("fused"):
        check(ONE_TILE[name])
    assert launches.entries[1:] == ["dkdv"] and launches.conflicts[-1] == 0


@pytest.mark.parametrize(("rows", "causal"), [(50, True), (50, False), (130, False)])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_short_sequences_load_their_values_with_their_keys(
    head_dim: int, rows: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, one_tile=True)
    problem = replace(DENSE, seqlens_q=(rows,), seqlens_k=(rows + 10 - 2 * (rows == 50),), head_dim=head_dim)
    with flash_attn_compat.use_backend("fused"):
        check(replace(problem, causal=causal))
    (forward,) = [one.variant for one in launches.seen if one.variant.entry == "forward"]
    assert dict(forward.macros).get("LOAD_V_WITH_K") and launches.conflicts[-1] == 0


@pytest.mark.parametrize("half_dtype", ["float16", "bfloat16"])
def test_only_fp16_takes_one_kernel_for_all_gradients(half_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch, one_tile=True)
    q = torch.zeros(1, 20, 2, 64, dtype=getattr(torch, half_dtype), requires_grad=True)
    with flash_attn_compat.use_backend("fused"):
        flash_attn_compat.flash_attn_func(q, q, q).sum().backward()
    assert ("dq" in launches.entries) == (half_dtype == "bfloat16")


def test_dq_is_nan_where_a_sequence_has_more_keys_than_the_caller_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch, one_tile=True)
    q, k, v = (torch.randn(180, 1, 32).half().requires_grad_() for _ in range(3))
    starts = torch.tensor([0, 50, 180], dtype=torch.int32)
    with flash_attn_compat.use_backend("fused"):
        out = flash_attn_interface.flash_attn_varlen_func(q, k, v, starts, starts, 130, 100)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert not dq[:50].isnan().any() and dq[50:].isnan().all()
