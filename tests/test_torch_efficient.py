"""What torch_efficient refuses, on any machine; what its kernel gets wrong and how calls get round it, on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends import efficient_bias, efficient_launch, torch_efficient
from flash_attn_compat.backends.efficient_launch import CAUSAL_BOTTOM_RIGHT, Launch
from flash_attn_compat.backends.torch_efficient import TorchEfficient
from flash_attn_compat.engine import alibi, elementwise
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.features import Feature, Traits
from flash_attn_compat.engine.mask import Mask, Range

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs the kernel, needs a CUDA device")

PLAIN = Traits(
    device_type="cuda", capability=(7, 5), dtype=torch.float16, head_dim=64, head_dim_v=64, sq_vs_sk="=",
    one_query=False, aligned=True, features=0,
)  # fmt: skip
WINDOW = Feature.CAUSAL | Feature.WINDOW_LEFT


def reasons(features: Feature = Feature(0), **changes: object) -> list[str]:
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


def test_a_bias_of_alibi_is_refused_where_bf16_would_round_it():
    assert any("bfloat16" in reason for reason in reasons(Feature.ALIBI, dtype=torch.bfloat16, capability=(8, 0)))
    assert reasons(Feature.ALIBI, dtype=torch.float16, capability=(8, 0)) == []
    assert reasons(Feature.ALIBI, dtype=torch.bfloat16) == []  # goes through fp16
    assert reasons(Feature.ALIBI | Feature.CAUSAL, dtype=torch.bfloat16, capability=(8, 0)) == []


def test_packed_causal_alibi_in_fp32_is_refused():
    assert reasons(Feature.ALIBI | Feature.CAUSAL | Feature.VARLEN, dtype=torch.float32)
    assert reasons(Feature.ALIBI | Feature.CAUSAL | Feature.VARLEN) == []


@pytest.mark.parametrize("feature", [Feature.ALIBI, Feature.BACKWARD, Feature.DROPOUT, Feature.VARLEN])
def test_a_cache_with_more_than_reading_is_refused(feature):
    assert reasons(Feature.SEQUSED_K, one_query=True) == []
    assert reasons(Feature.SEQUSED_K | feature, one_query=True)


def test_a_cache_that_would_have_to_be_copied_is_refused():
    assert any("copy a cache" in reason for reason in reasons(Feature.PAGED, aligned=False, one_query=True))
    assert any("copy a cache" in reason for reason in reasons(Feature.PAGED, head_dim=100, one_query=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seqlen_k", [1, 63, 64, 4097, 65537, 200000])
def test_alibi_channels_multiply_to_slope_times_position(dtype, seqlen_k):
    slopes, scale = torch.tensor([2.0**-8, 0.1, 0.84, 1.0]), 96**-0.5
    positions = torch.arange(0, seqlen_k, max(1, seqlen_k // 1000))
    keys = alibi.key_channels(positions, scale, seqlen_k, dtype).double()
    queries = alibi.query_channels(slopes, scale, seqlen_k, dtype).double()
    products = scale * queries @ keys.T
    # A slope that is off by 2^-15 of itself moves a weight exp(-slope * distance) by less than 2^-16.
    torch.testing.assert_close(products, slopes.double()[:, None] * positions.double(), rtol=2**-15, atol=0)
    assert queries.isfinite().all() and keys.isfinite().all()


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def causal_fp64(q, k, v):
    """(seqlen, heads, d) in fp64 under bottom-right causal, rows without keys 0."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[0] - q.shape[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0), v)


@needs_gpu
def test_the_kernel_alone_is_wrong_for_more_queries_than_keys_and_the_backend_is_not():
    q, k, v = random(1, 130, 2, 64), random(1, 70, 2, 64), random(1, 70, 2, 64)
    expected = causal_fp64(*(tensor[0].double() for tensor in (q, k, v)))
    bare, _ = efficient_launch.forward(Launch(q, k, v, 64**-0.5, CAUSAL_BOTTOM_RIGHT), keep_lse=True)
    with use_backend("torch_efficient"):
        ours, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (ours[0] - expected).abs().max() < 5e-3
    assert torch.equal(lse[0, 0] == math.inf, torch.arange(130, device="cuda") < 60)
    assert (bare[0] - expected).abs().max() > 0.1, "the kernel is right now: the rows need not be left out"


@needs_gpu
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


@needs_gpu
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


@needs_gpu
def test_gradients_of_grouped_heads_do_not_depend_on_how_out_is_strided():
    q, k, v = random(1, 128, 4, 64).requires_grad_(), random(1, 128, 1, 64).requires_grad_(), random(1, 128, 1, 64)
    dout = random(1, 128, 4, 64)
    found = {}
    for name in ("torch_efficient", "chunked"):
        with use_backend(name):
            found[name] = torch.autograd.grad(flash_attn_func(q, k, v, causal=True), (q, k), dout)
    assert all((a - b).abs().max() < 2e-2 for a, b in zip(*found.values()))


@needs_gpu
def test_packed_and_decode_calls_can_be_captured_in_a_cuda_graph(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    q, k, v = random(96, 4, 64), random(96, 4, 64), random(96, 4, 64)
    starts = torch.tensor([0, 33, 96], dtype=torch.int32, device="cuda")
    cache, row = random(2, 512, 2, 64), random(2, 1, 4, 64)
    lengths = torch.tensor([100, 401], dtype=torch.int32, device="cuda")

    def calls():
        packed = flash_attn_varlen_func(q, k, v, starts, starts, 63, 63, causal=True)
        return packed, flash_attn_with_kvcache(row, cache, cache, cache_seqlens=lengths, causal=True)

    assert flash_attn_compat.explain(calls).backend == "torch_efficient"
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    q.copy_(random(96, 4, 64))
    lengths.copy_(torch.tensor([512, 7], dtype=torch.int32))
    graph.replay()
    for replayed, eager in zip(captured, calls()):
        torch.testing.assert_close(replayed, eager)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_from_one_kernel_is_that_of_plain_operators(monkeypatch, dtype):
    assert elementwise.bias_is_usable(torch.device("cuda", 0), dtype)
    slopes = torch.tensor([[0.3, -0.7, 0.0], [-1e-3, 1.9, 60.0]], device="cuda")
    q, k = random(2, 37, 3, 8, dtype=dtype), random(2, 2049, 3, 8, dtype=dtype)
    call = AttentionCall(q, k, k, 1.0, Mask(None, None), 37, 2049, alibi_slopes=slopes)
    bias = efficient_bias._Alibi.of(call, call.alibi_slopes)
    rows, columns = slice(5, 30), Range(1001, 2049)
    one = bias.table(rows, columns, dtype)
    monkeypatch.setattr(elementwise, "bias_is_usable", lambda device, dtype: False)
    assert one.shape == (2, 3, 25, 1048)
    # The kernel multiplies and adds in one step, so the last bit may differ.
    torch.testing.assert_close(one, bias.table(rows, columns, dtype), rtol=torch.finfo(dtype).eps, atol=0)


@needs_gpu
def test_a_turing_gpu_gets_no_flash_kernel_and_bf16_through_fp16(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    q, k, v = (random(2, 64, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    found = flash_attn_compat.explain(flash_attn_func, q, k, v, causal=True)
    assert found.backend == "torch_efficient"
    assert any("8.0" in reason for reason in found.reasons["torch_flash"])
    expected = causal_fp64(*(tensor[0].double() for tensor in (q, k, v)))
    assert (flash_attn_func(q, k, v, causal=True)[0] - expected).abs().max() < 2e-2


@needs_gpu
@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 1.0, 1e2, 1e4])
def test_bf16_gradients_neither_overflow_nor_vanish_on_a_turing_gpu(monkeypatch, magnitude):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    q, k = (random(1, 256, 2, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    v = (random(1, 256, 2, 64, dtype=torch.bfloat16) * magnitude).requires_grad_()
    dout = random(1, 256, 2, 64, dtype=torch.bfloat16) * magnitude
    ours = torch.autograd.grad(flash_attn_func(q, k, v, causal=True), (q, k, v), dout)
    wide = [tensor.detach()[0].double().requires_grad_() for tensor in (q, k, v)]
    expected = torch.autograd.grad(causal_fp64(*wide), wide, dout[0].double())
    for got, truth in zip(ours, expected):
        assert (got[0].double() - truth).abs().max() < 2e-2 * truth.abs().max()
