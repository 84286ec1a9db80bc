"""Tokens that other kernels leave unwritten are cleared in one launch of ours: exactly, with little host time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_varlen_func, settings, use_backend
from flash_attn_compat.backends import torch_flash, unwritten
from flash_attn_compat.backends.fused import clearing
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.judging import self_test
from flash_attn_compat.backends.unwritten import PackedResults
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.mask import Mask
from tests.answers import others_kernels
from tests.forms.inputs import cumulative, randn
from tests.forms.plain import in_turns, some
from tests.kernels import emulate, fused_on_cpu, offline
from tests.kernels.fused_on_cpu import LaunchRecord
from verify.examination import Examination
from verify.problems import Problem

HALF = torch.float16
emulated = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())


@pytest.fixture(params=["torch_flash", "older torch_flash", "official"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A backend whose kernels are stand-ins, on CPU tensors beside our own kernels; "older" pads the LSE."""
    older, _, name = str(request.param).rpartition(" ")
    others_kernels.install(monkeypatch, name, tmp_path, pads_lse=bool(older))
    return name


def only_torch_flash(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = pytest.mark.parametrize("backend", ["torch_flash"], indirect=True)(test)
    return marked


# ---------------------------------------------------------------- the kernel clears what operators clear


def rows_of(total: int, heads: int, width: int, layout: str) -> Tensor:
    if layout == "heads first":
        return ones(heads, total, width).transpose(0, 1)
    return (
        torch.ones(total, 2 * heads, width, dtype=HALF)[:, :heads] if layout == "apart" else ones(total, heads, width)
    )


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=HALF)


# Starts of queries and their total, of keys and their total, and the longest lengths.
LENGTHS: dict[str, tuple[list[int], int, list[int], int, int, int]] = {
    "every token is written": ([0, 20, 64], 64, [0, 30, 31], 31, 44, 30),
    "tokens behind": ([0, 20, 64], 71, [0, 30, 31], 40, 44, 30),
    "tokens in front": ([5, 20, 64], 64, [3, 30, 31], 31, 44, 30),
    "tokens beyond the longest": ([1, 20, 64, 70], 77, [0, 30, 31, 50], 50, 7, 3),
    "empty sequences": ([2, 2, 2, 9, 9], 10, [0, 1, 1, 1, 4], 6, 100, 100),
    "nothing but empty sequences": ([4, 4], 9, [0, 0], 3, 1, 1),
    "no longest length": ([0, 20, 64], 64, [0, 30, 31], 31, 0, 0),
    "starts behind the end": ([0, 20, 80], 64, [0, 30, 90], 31, 20, 30),
    "many tokens": ([9, 900], 2000, [700, 900], 900, 2000, 2000),
}


@emulated
@pytest.mark.parametrize(("lengths", "layout"), in_turns(LENGTHS, ("contiguous", "heads first", "apart")))
def test_one_launch_clears_the_tokens_that_operators_clear(
    monkeypatch: pytest.MonkeyPatch, lengths: str, layout: str
) -> None:
    starts_q, total_q, starts_k, total_k, longest_q, longest_k = LENGTHS[lengths]
    launches = fused_on_cpu.emulate(monkeypatch, 90)
    monkeypatch.setattr(clearing, "_BYTES_PER_BLOCK", 4096)
    clearing._find_layout.cache_clear()
    clear, operators = clearing.find_clear(-1), unwritten.clear_by_operators
    assert clear is not None
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k))
    q, k = ones(total_q, 3, 40), ones(total_k, 1, 40)
    call = AttentionCall(q, k, k, 1.0, Mask(None, None), longest_q, longest_k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)

    def made() -> list[PackedResults]:
        rows, dk, dv = (
            rows_of(total, heads, 40, layout) for total, heads in ((total_q, 3), (total_k, 1), (total_k, 1))
        )
        forward = PackedResults(rows.clone(), torch.ones(3, total_q))
        return [forward, PackedResults(rows, dk=dk, dv=dv), PackedResults(None, torch.ones(3, total_q))]

    for got, right in zip(made(), made()):
        clear(call, got)
        operators(call, right)
        assert all(torch.equal(one, other) for one, other in zip(got, right) if one is not None and other is not None)
    assert launches.entries == ["clear"] * 3 and (lengths != "many tokens" or launches.seen[0].blocks > 20)
    clearing._find_layout.cache_clear()


@emulated
@pytest.mark.parametrize("starts", [[2**31 - 1, -50], [-(2**31), 2**31 - 1], [90, 3, -4], [20, -(2**31), 7]], ids=str)
def test_starts_that_lie_anywhere_let_the_kernel_write_to_no_other_memory(
    monkeypatch: pytest.MonkeyPatch, starts: list[int]
) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, 90)  # which raises for an address outside of all tensors
    clear, x, cu = clearing.find_clear(-1), ones(24, 2, 8), torch.tensor(starts, dtype=torch.int32)
    assert clear is not None
    call = AttentionCall(x, x, x, 1.0, Mask(None, None), 5, 5, cu_seqlens_q=cu, cu_seqlens_k=cu)
    clear(call, PackedResults(x.clone(), torch.ones(2, 24), x.clone(), x.clone()))
    assert launches.entries == ["clear"]


@emulated
@pytest.mark.parametrize("odd", ["LSE by tokens", "odd channels"])
def test_results_in_a_layout_that_the_kernel_cannot_write_are_cleared_by_operators(
    monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, 90)
    clear, width = clearing.find_clear(-1), 12 if odd == "odd channels" else 16
    assert clear is not None
    q, starts = ones(9, 2, width), cumulative(3, 2)
    call = AttentionCall(q, q, q, 1.0, Mask(None, None), 3, 3, cu_seqlens_q=starts, cu_seqlens_k=starts)
    out, lse = ones(9, 2, width), torch.ones(9, 2).t() if odd == "LSE by tokens" else torch.ones(2, 9)
    clear(call, PackedResults(out, lse))
    assert not launches.seen
    for cleared in (out, lse.t()):
        assert cleared[:5].all() and not cleared[5:].any()


# ---------------------------------------------------------------- through the backends

PROBLEM = Problem("varlen", (9, 5, 0, 40, 70, 1), (9, 0, 7, 52, 33, 64), 2, 2, dtype="float16", gap=(3, 2))
SAME = Problem("varlen_qkvpacked", (9, 0, 40), (9, 0, 40), nheads_k=2, dtype="bfloat16", causal=True, gap=(3, 2))


@emulated
@pytest.mark.parametrize("problem", some([PROBLEM, SAME, replace(PROBLEM, causal=True, head_dim=21)], 2))
def test_packed_calls_whose_tokens_one_launch_clears_match_the_oracle(
    monkeypatch: pytest.MonkeyPatch, backend: str, problem: Problem
) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, 90)
    verdict = Examination(problem.build()).judge(backend)
    assert not verdict.failures and not verdict.refused, verdict
    assert {*launches.entries} == {"clear"}


@only_torch_flash
@emulated
@pytest.mark.parametrize("longest", [1, 20, 50])
def test_out_lse_and_gradients_are_zero_beyond_max_seqlen(
    monkeypatch: pytest.MonkeyPatch, backend: str, longest: int
) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, 90)
    q, k, v = (randn(67, 2, 16, seed=seed, dtype=HALF).requires_grad_() for seed in range(3))
    with use_backend(backend):
        starts = cumulative(50, 10)
        out, lse, _ = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, return_attn_probs=True)
        gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
    written = torch.zeros(67, dtype=torch.bool)
    written[: max(2, longest)] = written[50 : 50 + min(max(2, longest), 10)] = True
    for result in (out, lse.t(), gradients[0]):
        assert not result[~written].any() and result[written].flatten(1).any(1).all()
    for result in gradients[1:]:
        assert result.isfinite().all() and not result[60:].any()
    assert launches.entries == ["clear", "clear"]


# ---------------------------------------------------------------- the host's work


def launch_nothing(monkeypatch: pytest.MonkeyPatch, q: Tensor) -> None:
    """PyTorch's two operators return memory and launch no operator."""
    state, lse = torch.zeros(2, dtype=torch.int64), torch.zeros(q.shape[1], q.shape[0])
    out, *gradients = (torch.zeros_like(q) for _ in range(4))
    operators = {
        "_flash_attention_forward": lambda *args, **kwargs: (out, lse, state, state, None),
        "_flash_attention_backward": lambda *args, **kwargs: gradients,
    }
    monkeypatch.setattr(torch_flash, "aten_operator", operators.__getitem__)


def count_operators(work: Callable[[], object]) -> int:
    """Return PyTorch's operators of a call, without those that operators call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    found = [event for event in profile.events() if event.name.startswith("aten::")]
    return sum(event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::") for event in found)


@only_torch_flash
def test_a_packed_call_takes_one_launch_and_no_operator_besides_the_kernels_in_each_direction(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    launches = fused_on_cpu.record(monkeypatch, 90)
    q, k, v = (randn(64, 4, 64, seed=seed, dtype=HALF).requires_grad_() for seed in range(3))
    launch_nothing(monkeypatch, q.detach())
    starts, dout = cumulative(20, 44), torch.ones(64, 4, 64, dtype=HALF)

    def forward() -> Tensor:
        with use_backend(backend):
            return flash_attn_varlen_func(q, k, v, starts, starts, 44, 44, causal=True)

    def both() -> object:
        return torch.autograd.grad(forward(), (q, k, v), dout)

    both()  # prepares the call
    launches.seen.clear()
    assert count_operators(forward) == 0 and launches.entries == ["clear"]
    launches.seen.clear()
    assert count_operators(both) == 0 and launches.entries == ["clear", "clear"]


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("longest", [20, 50])
@pytest.mark.parametrize("width", [21, 64])
def test_on_a_gpu_tokens_that_pytorchs_kernels_leave_unwritten_are_zero(longest: int, width: int) -> None:
    q, k, v = (torch.randn(75, 2, width, dtype=HALF, device="cuda").requires_grad_() for _ in range(3))
    starts = torch.tensor([3, 53, 53, 63], dtype=torch.int32, device="cuda")
    assert clearing.find_clear(q.get_device()) is not None
    torch.full((2**20,), torch.nan, device="cuda")  # which is freed, for results to be allocated there
    with use_backend("torch_flash"):
        out, lse, _ = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, return_attn_probs=True)
        gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
    written = torch.zeros(75, dtype=torch.bool)
    written[3 : 3 + longest] = written[53:63] = True
    for result in (out, lse.t(), *gradients):
        assert not result[~written].any() and result[written].flatten(1).any(1).all()


# ---------------------------------------------------------------- where the kernel cannot run


@only_torch_flash
@pytest.mark.parametrize("reason", ["forbidden", "no NVRTC", "in a capture"])
def test_operators_clear_where_the_kernel_cannot_run(
    monkeypatch: pytest.MonkeyPatch, backend: str, reason: str
) -> None:
    launches = fused_on_cpu.record(monkeypatch, 90)
    if reason == "forbidden":
        monkeypatch.setenv(settings.FUSED, "0")
    if reason == "no NVRTC":
        monkeypatch.setattr(nvrtc, "decline_reason", lambda: "NVRTC is missing")
    if reason == "in a capture":
        monkeypatch.setattr(cuda_capture, "is_capturing", lambda device: True)
    q, starts = randn(70, 2, 16, seed=0, dtype=HALF), cumulative(20, 44)
    with use_backend(backend):
        out = flash_attn_varlen_func(q, q, q, starts, starts, 44, 44)
    assert not launches.seen and out[:64].any() and not out[64:].any()


MUTANTS = {
    "the first token behind stays": (
        "{start_of(starts, p.batch, total), total",
        "{start_of(starts, p.batch, total) + 1, total",
    ),
    "rows within sequences are cleared": ("{start + longest, stop", "{start, stop"),
    "the LSE stays": ("if (p.lse)", "if (false)"),
    "dv stays": ("p.dv, p.dv_s", "p.dk, p.dk_s"),
}


@emulated
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_kernel_that_clears_other_tokens_fails_its_self_test_and_operators_clear(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mutant: str
) -> None:
    text, other = (nvrtc.SOURCES / "clear.cu").read_text(), MUTANTS[mutant]
    assert text.count(other[0]) == 1
    shutil.copytree(nvrtc.SOURCES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "clear.cu").write_text(text.replace(*other))
    fused_on_cpu.emulate(monkeypatch, 90, tried=True, sources=tmp_path)
    monkeypatch.setattr(self_test, "_test_digests", lambda: ())
    with pytest.warns(RuntimeWarning, match="clear .* computes wrong numbers"):
        assert clearing.find_clear(-1) is None


@emulated
def test_the_kernel_passes_its_self_test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: LaunchRecord = fused_on_cpu.emulate(monkeypatch, 90, tried=True)
    assert clearing.find_clear(-1) is not None and clearing.find_clear(-1) is not None
    assert launches.entries == ["clear"]


@pytest.mark.parametrize("architecture", some(["sm_75", "sm_80", "sm_90"], 3))
def test_it_compiles_without_spills(architecture: str) -> None:
    found = offline.compilers()
    if not found:
        pytest.skip("no NVRTC is installed to compile with")
    newest = offline.compiled(found[max(found, key=float)], clearing.VARIANT, architecture)
    assert newest.spilled == 0 and newest.registers <= 64
