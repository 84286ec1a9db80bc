"""What torch_efficient refuses, on any machine; what its kernel gets wrong and how calls get round it, on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, use_backend
from flash_attn_compat.backends import efficient_launch, torch_efficient
from flash_attn_compat.backends.efficient_launch import CAUSAL_BOTTOM_RIGHT, Launch
from flash_attn_compat.backends.torch_efficient import TorchEfficient
from flash_attn_compat.engine.features import Feature, Traits

PLAIN = Traits(
    device_type="cuda", capability=(7, 5), dtype=torch.float16, head_dim=64, head_dim_v=64, sq_vs_sk="=",
    one_query=False, aligned=True, features=0,
)  # fmt: skip
WINDOW = Feature.CAUSAL | Feature.WINDOW_LEFT


def reasons(features: int = 0, **changes: object) -> list[str]:
    return TorchEfficient().extra_reasons(PLAIN._replace(features=int(features), **changes))


def test_a_window_over_fewer_queries_than_keys_is_refused_for_gradients_before_pytorch_2_15(monkeypatch):
    monkeypatch.setattr(torch_efficient, "_OLD_WINDOW_BACKWARD", True)
    assert any("before 2.15" in reason for reason in reasons(WINDOW | Feature.BACKWARD, sq_vs_sk="<"))
    assert reasons(WINDOW, sq_vs_sk="<") == []
    monkeypatch.setattr(torch_efficient, "_OLD_WINDOW_BACKWARD", False)
    assert reasons(WINDOW | Feature.BACKWARD, sq_vs_sk="<") == []


def test_gradients_of_a_window_over_sequences_of_unknown_lengths_are_refused():
    assert reasons(WINDOW | Feature.VARLEN | Feature.BACKWARD, sq_vs_sk="?")
    assert reasons(WINDOW | Feature.VARLEN | Feature.BACKWARD, sq_vs_sk="=") == []


def test_a_left_window_without_a_causal_mask_is_refused():
    assert any("without a causal mask" in reason for reason in reasons(Feature.WINDOW_LEFT))


@pytest.mark.parametrize(
    "feature",
    [
        Feature.ALIBI,
        Feature.SOFTCAP,
        Feature.WINDOW_RIGHT,
        Feature.SEQUSED_K,
        Feature.PAGED,
        Feature.SHARED_DROPOUT_MASK,
    ],
)
def test_what_takes_more_than_one_launch_is_left_to_others(feature):
    assert TorchEfficient().reasons(PLAIN._replace(features=int(feature)))


def test_bf16_is_left_to_others_on_gpus_without_it():
    assert any("8.0" in reason for reason in reasons(dtype=torch.bfloat16))
    assert reasons(dtype=torch.bfloat16, capability=(8, 0)) == []


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def causal_fp64(q, k, v):
    """(seqlen, heads, d) in fp64 under bottom-right causal, rows without keys 0."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[0] - q.shape[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0), v)


@pytest.mark.gpu
def test_the_kernel_alone_is_wrong_for_more_queries_than_keys_and_the_backend_is_not():
    q, k, v = random(1, 130, 2, 64), random(1, 70, 2, 64), random(1, 70, 2, 64)
    expected = causal_fp64(*(tensor[0].double() for tensor in (q, k, v)))
    bare, _ = efficient_launch.forward(Launch(q, k, v, 64**-0.5, CAUSAL_BOTTOM_RIGHT), keep_lse=True)
    with use_backend("torch_efficient"):
        ours, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (ours[0] - expected).abs().max() < 5e-3
    assert torch.equal(lse[0, 0] == math.inf, torch.arange(130, device="cuda") < 60)
    assert (bare[0] - expected).abs().max() > 0.1, "the kernel is right now: the rows need not be left out"


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 192])
def test_rows_of_sequences_without_keys_get_zeros_even_in_dirty_memory(head_dim):
    q, k, v = (random(100, 2, head_dim).requires_grad_() for _ in range(3))
    starts_q = torch.tensor([0, 40, 100], dtype=torch.int32, device="cuda")
    starts_k = torch.tensor([0, 0, 100], dtype=torch.int32, device="cuda")
    dirty = [torch.full((100, 2, head_dim), math.nan, device="cuda", dtype=torch.float16) for _ in range(8)]
    del dirty
    with use_backend("torch_efficient"):
        out = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 60, 100)
        dirty = [torch.full((100, 2, head_dim), math.nan, device="cuda", dtype=torch.float16) for _ in range(8)]
        del dirty
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert out[:40].eq(0).all() and dq[:40].eq(0).all()
    assert all(tensor.isfinite().all() for tensor in (out, dq, dk, dv))


@pytest.mark.gpu
def test_pytorchs_own_autograd_of_a_windowed_call_is_wrong_before_2_15_and_ours_is_not():
    q, k, v = (random(1, 200, 2, 64).requires_grad_() for _ in range(3))
    dout = random(1, 200, 2, 64)
    with use_backend("chunked"):
        expected = torch.autograd.grad(flash_attn_func(q, k, v, causal=True, window_size=(16, 0)), (q, k, v), dout)
    with use_backend("torch_efficient"):
        ours = torch.autograd.grad(flash_attn_func(q, k, v, causal=True, window_size=(16, 0)), (q, k, v), dout)
    out = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, None, None, None, None, 0.0, CAUSAL_BOTTOM_RIGHT, True, scale=64**-0.5, window_size=17
    )[0]
    theirs = torch.autograd.grad(out, (q, k, v), dout)
    assert all((a - b).abs().max() < 2e-2 for a, b in zip(ours, expected))
    if torch.__version__ < (2, 15):
        assert max((a - b).abs().max() for a, b in zip(theirs, expected)) > 0.1


@pytest.mark.gpu
def test_gradients_of_grouped_heads_do_not_depend_on_how_out_is_strided():
    q, k, v = random(1, 128, 4, 64).requires_grad_(), random(1, 128, 1, 64).requires_grad_(), random(1, 128, 1, 64)
    dout = random(1, 128, 4, 64)
    found = {}
    for name in ("torch_efficient", "chunked"):
        with use_backend(name):
            found[name] = torch.autograd.grad(flash_attn_func(q, k, v, causal=True), (q, k), dout)
    assert all((a - b).abs().max() < 2e-2 for a, b in zip(*found.values()))


@pytest.mark.gpu
def test_packed_calls_can_be_captured_in_a_cuda_graph():
    q, k, v = random(96, 4, 64), random(96, 4, 64), random(96, 4, 64)
    starts = torch.tensor([0, 33, 96], dtype=torch.int32, device="cuda")

    def call():
        with use_backend("torch_efficient"):
            return flash_attn_varlen_func(q, k, v, starts, starts, 63, 63, causal=True)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    q.copy_(random(96, 4, 64))
    graph.replay()
    torch.testing.assert_close(captured, call())
