"""The torch_flash backend around PyTorch's operators, acted out on a CPU in the shapes of its versions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flash_attn_compat import (
    BackendNotSupported,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn_compat.backends import base, torch_flash
from flash_attn_compat.engine import outside
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.serving import dispatch
from tests import flash_kernels
from tests.flash_kernels import judge_first_served
from tests.support import cumulative, qkv
from verify.examination import Examination
from verify.problems import KINDS, Problem

HALF = torch.float16


@pytest.fixture
def pads_lse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from _pretended(monkeypatch, request.param)


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from _pretended(monkeypatch, pads_lse=False)


def _pretended(monkeypatch: pytest.MonkeyPatch, pads_lse: bool, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Calls on CPU tensors count as calls on a GPU, and its operators are those of tests/flash_kernels.py.

    What else this machine may have, a GPU or the real flash-attn, takes no part.
    """
    monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", "0")
    monkeypatch.setenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL", "1")
    true_traits = AttentionCall.traits
    monkeypatch.setattr(
        AttentionCall, "traits", lambda call: true_traits(call)._replace(device_type="cuda", capability=capability)
    )
    functions = {"forward": flash_kernels.aten_forward, "backward": flash_kernels.aten_backward}
    operators = {
        f"_flash_attention_{name}": functools.partial(function, pads_lse=pads_lse)
        for name, function in functions.items()
    }
    monkeypatch.setattr(torch_flash, "operator", operators.__getitem__)
    torch_flash._pads_lse.cache_clear()
    dispatch.forget_decisions()
    flash_kernels.calls.clear()
    yield
    torch_flash._pads_lse.cache_clear()
    dispatch.forget_decisions()


def reasons(function: Any = flash_attn_func, *args: Any, **kwargs: Any) -> list[str]:
    return explain(function, *(args or qkv(dtype=HALF)), **kwargs).reasons["torch_flash"]


# Since FlashAttention 2.6 packed rows' LSE is (heads, total_q); before, it was padded.
VERSIONS = [(kind, False) for kind in KINDS] + [(kind, True) for kind in KINDS if kind.startswith("varlen")]


@pytest.mark.usefixtures("pads_lse")
@pytest.mark.parametrize(("kind", "pads_lse"), VERSIONS, indirect=["pads_lse"])
def test_it_agrees_with_the_oracle_wherever_it_serves(kind: str) -> None:
    served, complaints = judge_first_served("torch_flash", kind, enough=6)
    assert not complaints, "\n".join(complaints)
    assert served == 6 and bool(flash_kernels.calls) == (
        kind != "paged"
    )  # where there is nothing to compute, anyone serves


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("problem", flash_kernels.FAR_BEFORE_THE_KEYS, ids=repr)
def test_an_open_window_is_open_to_rows_far_before_the_keys(problem: Problem) -> None:
    verdict = Examination(problem).judge("torch_flash")
    assert verdict.failures == [] and bool(verdict.refused) == (problem.kind != "varlen")


@pytest.mark.usefixtures("pads_lse")
@pytest.mark.parametrize("pads_lse", [False, True], indirect=True)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (4, 5)])
def test_its_backward_takes_an_lse_that_another_forward_left(window: tuple[int, int]) -> None:
    from flash_attn_compat.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

    q, k, v = (x.flatten(0, 1) for x in qkv(b=3, sq=11, sk=11, h=4, hk=2, dtype=HALF))
    starts_q, starts_k = cumulative(11, 2, 20), cumulative(9, 11, 13)
    options = (0.0, 0.25, False, *window, 0.0, None)
    with use_backend("reference"):
        out, lse, *_ = _flash_attn_varlen_forward(q, k, v, starts_q, starts_k, 20, 13, *options)
    dout = torch.randn_like(out)
    found = {}
    for backend in ("reference", "torch_flash"):
        found[backend] = [torch.empty_like(x) for x in (q, k, v)]
        with use_backend(backend):
            _flash_attn_varlen_backward(
                dout, q, k, v, out, lse, *found[backend], starts_q, starts_k, 20, 13, *options, False
            )
    for ours, right in zip(found["torch_flash"], found["reference"]):
        torch.testing.assert_close(ours.float(), right.float(), rtol=2e-3, atol=4e-3)


# ---------------------------------------------------------------- what it refuses


@pytest.mark.usefixtures("newest")
def test_deterministic_gradients_are_another_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator asks PyTorch's switch, which belongs to the whole process: nobody touches it."""
    leaves = [x.requires_grad_() for x in qkv(dtype=HALF)]
    assert any("same to the bit" in reason for reason in reasons(flash_attn_func, *leaves, deterministic=True))
    assert explain(flash_attn_func, *leaves, deterministic=True).backend not in (None, "torch_flash")
    assert explain(flash_attn_func, *leaves).backend == "torch_flash"
    with use_backend("torch_flash"), pytest.raises(BackendNotSupported):
        flash_attn_func(*leaves, deterministic=True)
    monkeypatch.setattr(torch._C, "_set_deterministic_algorithms", lambda *args, **kwargs: pytest.fail("switched"))
    flash_attn_func(*leaves).sum().backward()
    with torch.no_grad():
        assert not reasons(flash_attn_func, *qkv(dtype=HALF), deterministic=True)


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize(
    ("shapes", "kwargs", "word"),
    [
        (dict(d=264), {}, "256"),
        ({}, dict(softcap=3.0), "softcap"),
        ({}, dict(alibi_slopes=torch.ones(2), causal=True), "ALiBi"),
        ({}, dict(dropout_p=0.1, return_attn_probs=True), "S_dmask"),
        (dict(dtype=torch.float32), {}, "does not compute float32"),
    ],
)
def test_what_the_kernels_lack_is_a_reason(shapes: dict[str, int], kwargs: dict[str, Any], word: str) -> None:
    assert any(word in reason for reason in reasons(flash_attn_func, *qkv(**{"dtype": HALF} | shapes), **kwargs))


@pytest.mark.usefixtures("newest")
def test_lengths_over_a_cache_are_another_backends() -> None:
    q, k, v = qkv(dtype=HALF)
    lengths = torch.tensor([3, 2], dtype=torch.int32)
    assert any("seqused_k" in reason for reason in reasons(flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths))
    assert reasons(flash_attn_with_kvcache, q, k, v, cache_seqlens=3) == []


@pytest.mark.usefixtures("newest")
def test_an_operator_without_windows_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "arguments_of", lambda operator: frozenset())
    assert len(reasons()) == 2 and all("window_size_left" in reason for reason in reasons())


@pytest.mark.parametrize(("head_dim", "refused"), [(192, False), (200, True), (256, False)])
def test_a_gpu_with_less_shared_memory_lacks_some_backwards(
    head_dim: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in _pretended(monkeypatch, pads_lse=False, capability=(8, 6)):
        leaves = [x.requires_grad_() for x in qkv(d=head_dim, dtype=HALF)]
        assert any("shared memory" in reason for reason in reasons(flash_attn_func, *leaves)) == refused
        assert not reasons(flash_attn_func, *qkv(d=head_dim, dtype=HALF))


def test_the_installed_pytorch_has_the_operators_in_a_known_form() -> None:
    assert torch_flash.TorchFlash().unavailable_reasons() == []
    starts = cumulative(3, 4)
    found = explain(
        flash_attn_varlen_func, *(torch.zeros(7, 2, 16, dtype=HALF) for _ in range(3)), starts, starts, 4, 4
    )
    assert found.reasons["torch_flash"] == ["runs on CUDA GPUs only"]


# ---------------------------------------------------------------- on a GPU

needs_gpu = pytest.mark.gpu(capability=(8, 0))  # PyTorch's flash kernels


def on_gpu(*lengths: int, spare: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    total = sum(lengths) + spare
    tensors = [torch.randn(total, 2, 64, dtype=HALF, device="cuda") for _ in range(3)]
    return tensors, cumulative(*lengths).cuda()


@needs_gpu
@pytest.mark.parametrize("spare", [0, 20])
def test_tokens_outside_of_all_sequences_are_zero_at_the_first_look_and_later(spare: int) -> None:
    tensors, starts = on_gpu(30, 50, spare=spare)
    for tensor in tensors:
        tensor[80:] = torch.nan
        tensor.requires_grad_()
    for _ in range(3):
        torch.full((400, 2, 64), torch.nan, dtype=HALF, device="cuda")  # what freed memory holds
        with use_backend("torch_flash"):
            out = flash_attn_varlen_func(*tensors, starts, starts, 50, 50, causal=True)
        gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
        for result in (out, *gradients):
            assert result.isfinite().all() and not result[80:].any()
        torch.cuda.synchronize()
    assert outside.may_exist(starts, 80 + spare) == (spare > 0)


@needs_gpu
def test_lengths_that_change_in_place_are_looked_at_again() -> None:
    _, starts = on_gpu(30, 50, spare=0)
    outside.may_exist(starts, 80)
    torch.cuda.synchronize()
    assert not outside.may_exist(starts, 80)
    starts.copy_(cumulative(30, 20))
    assert outside.may_exist(starts, 80)
    torch.cuda.synchronize()
    assert outside.may_exist(starts, 80) and not outside.may_exist(starts, 50)


@needs_gpu
def test_a_captured_call_serves_other_lengths_at_its_replay() -> None:
    tensors, starts = on_gpu(30, 70, spare=0)

    def call() -> torch.Tensor:
        return flash_attn_varlen_func(*tensors, starts, starts, 70, 70, causal=True)

    with torch.no_grad(), use_backend("torch_flash"):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        starts.copy_(cumulative(50, 20))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call()) and not out[70:].any()


@needs_gpu
def test_deterministic_gradients_are_the_same_every_time() -> None:
    leaves = [torch.randn(2, 1500, 4, 64, dtype=HALF, device="cuda", requires_grad=True) for _ in range(3)]
    runs = [
        torch.autograd.grad(flash_attn_func(*leaves, causal=True, deterministic=True).sum(), leaves) for _ in range(8)
    ]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))
