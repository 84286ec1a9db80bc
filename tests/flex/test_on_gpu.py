"""flex_attention on a GPU that counts as 7.5: eager, compiled, in CUDA graphs, and by the public function."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("torch.nn.attention.flex_attention", reason="PyTorch 2.5 brought it")

import flash_attn_compat
from flash_attn_compat import backend_counts, explain, reset_backend_counts, settings
from tests.flex import calls, known_functions

pytestmark = pytest.mark.gpu
TOKENS = 700
NAMES = tuple(known_functions.collection(1, 1, TOKENS)) if torch.cuda.is_available() else ()


@pytest.fixture(autouse=True)
def _as_turing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(settings.CAPABILITY, "7.5")
    torch._dynamo.reset()
    with flash_attn_compat.flex():
        yield
    torch._dynamo.reset()


def qkv(dtype: torch.dtype = torch.float16, dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    return calls.tensors(2, 4, 2, TOKENS, TOKENS, dim, dtype=dtype, device="cuda")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_entry_of_attention_gym_is_right_forward_and_backward(name: str, backend: str) -> None:
    tensors = qkv()
    score_mod, mask_mod, per_head = known_functions.collection(2, 4, TOKENS, "cuda")[name]
    mask = mask_mod and calls.make_mask(mask_mod, *tensors[:2], per_head=per_head)
    reset_backend_counts()
    found = calls.call(tensors, score_mod, mask, backend=backend)
    assert backend_counts() == {"fused": 1}
    calls.assert_close(found, calls.in_fp32(tensors, score_mod, mask), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [32, 96, 128, 256])
def test_head_dims_and_dtypes(dtype: torch.dtype, dim: int) -> None:
    tensors = qkv(dtype, dim)
    mask = calls.make_mask(calls.causal, *tensors[:2])
    found = calls.call(tensors, calls.softcap, mask)
    calls.assert_close(found, calls.in_fp32(tensors, calls.softcap, mask), dtype)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_captured_tensors(dtype: torch.dtype, backend: str) -> None:
    tensors = qkv(dtype)
    table = torch.randn(4, 2 * TOKENS, device="cuda", requires_grad=True)
    mask = calls.make_mask(calls.causal, *tensors[:2])

    def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + table[h, q - kv + TOKENS]

    reset_backend_counts()
    found = calls.call(tensors, relative, mask, backend=backend, more=[table])
    assert backend_counts() == {"fused": 1}
    calls.assert_close(found, calls.in_fp32(tensors, relative, mask, more=[table]), dtype)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_public_function_compiled_trains_as_eager_does(mode: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    leaves = [x.detach().requires_grad_() for x in qkv()]
    mask = calls.make_mask(calls.causal, *leaves[:2])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=calls.softcap, block_mask=mask, enable_gqa=True)

    compiled = torch.compile(attend, mode=mode)
    for _ in range(4):
        reset_backend_counts()
        found = torch.autograd.grad(compiled(*leaves).float().square().sum(), leaves)
    right = torch.autograd.grad(attend(*leaves).float().square().sum(), leaves)
    for x, y in zip(found, right):
        torch.testing.assert_close(x, y, rtol=4e-3, atol=4e-3)


def test_a_number_in_the_cpus_memory_serves_a_gpus_call() -> None:
    offset, tensors = torch.tensor(17), qkv()
    mask = calls.make_mask(lambda b, h, q, kv: q + 17 >= kv, *tensors[:2])
    mask.mask_mod = lambda b, h, q, kv: q + offset >= kv
    reset_backend_counts()
    found = calls.call(tensors, mask=mask, gradients=False)
    assert backend_counts() == {"fused": 1}
    right = calls.in_fp32(tensors, mask=mask, gradients=False)
    torch.testing.assert_close(found.out.float(), right.out, rtol=4e-3, atol=4e-3)


def test_negative_floats_wrap_as_bytes() -> None:
    def distance(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + ((kv - q) * 0.5).to(torch.uint8) * 0.01

    tensors = qkv()
    reset_backend_counts()
    found = calls.call(tensors, distance, gradients=False)
    assert backend_counts() == {"fused": 1}
    calls.assert_close(found, calls.in_fp32(tensors, distance, gradients=False), torch.float16)


def test_explain_says_that_ours_serve() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    assert explain(flex_attention, *qkv(), score_mod=calls.softcap, enable_gqa=True).backend == "fused"


def test_a_newer_gpu_stays_pytorchs_without_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CAPABILITY, "8.0")
    reset_backend_counts()
    calls.call(qkv(), gradients=False)
    assert backend_counts() == {"pytorch": 1}
