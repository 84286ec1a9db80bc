"""What sdpa does about the versions of PyTorch's CPU kernel, half precision and biases."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat import flash_attn_func, use_backend
from flash_attn_compat.backends import sdpa
from flash_attn_compat.engine import alibi
from flash_attn_compat.engine.layout import Block
from flash_attn_compat.engine.mask import Range
from verify.examination import Examination
from verify.problems import Problem


@pytest.mark.parametrize("window_size", [(-1, -1), (9, 3)])
def test_key_heads_are_repeated_where_the_kernel_cannot_share_them(monkeypatch, window_size):
    q, k, v = torch.randn(2, 40, 4, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)
    found = {}
    for name, shares in (("sdpa", False), ("chunked", True)):
        monkeypatch.setattr(sdpa, "_SHARES_KEY_HEADS", shares)
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        with use_backend(name):
            out = flash_attn_func(*inputs, window_size=window_size)
            found[name] = (out, *torch.autograd.grad(out.square().sum(), inputs))
    for ours, expected in zip(*found.values()):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keeps_scores", sorted({sdpa._KEEPS_SCORES, False}))
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 3)}], ids=str)
def test_scores_too_large_for_fp16_are_no_trouble(monkeypatch, keeps_scores, options):
    monkeypatch.setattr(sdpa, "_KEEPS_SCORES", keeps_scores)
    torch.manual_seed(0)
    q, k, v = ((torch.randn(2, 40, 4, 16) * size).half() for size in (150, 150, 1))
    found = []
    for inputs in ([q, k, v], [q.double(), k.double(), v.double()]):
        inputs = [tensor.requires_grad_() for tensor in inputs]
        with use_backend("sdpa"):
            out, lse, _ = flash_attn_func(*inputs, softmax_scale=1e-4, return_attn_probs=True, **options)
            found.append((out, lse, *torch.autograd.grad(out.square().sum(), inputs)))
    assert (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1)).abs().max() > torch.finfo(torch.float16).max
    for ours, exact in zip(*found):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_causal_rows_behind_a_long_cache_are_right(dtype: str) -> None:
    problem = Problem(seqlens_q=(150,) * 2, seqlens_k=(2000,) * 2, nheads_k=2, group=2, causal=True, dtype=dtype)
    assert sdpa._is_far_behind(Block(torch.empty(2, 150, 4, 8), *[torch.empty(2, 2000, 2, 8)] * 2, None, range(2)))
    assert Examination(problem).judge("sdpa").failures == []


@pytest.mark.parametrize("slow", [True, False], ids=["without hardware for it", "with"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_what_the_cpu_multiplies_fast(monkeypatch, dtype, slow):
    monkeypatch.setattr(sdpa, "_SLOW", frozenset({dtype} if slow else ()))
    seen = []
    for name in ("_FORWARD", "_BACKWARD"):
        kernel = getattr(sdpa, name)
        monkeypatch.setattr(sdpa, name, lambda *a, kernel=kernel, **kw: seen.append(a[0].dtype) or kernel(*a, **kw))
    q = torch.randn(2, 40, 4, 16, dtype=dtype, requires_grad=True)
    with use_backend("sdpa"):
        out = flash_attn_func(q, q, q)
        out.sum().backward()
    converts_forward = dtype == torch.float16 and (slow or not sdpa._KEEPS_SCORES)
    converts_backward = slow or converts_forward
    assert seen == [torch.float32 if converted else dtype for converted in (converts_forward, converts_backward)]
    assert out.dtype == q.grad.dtype == dtype


def test_sequences_that_share_slopes_share_their_bias(monkeypatch):
    shapes = []
    bias = sdpa._bias
    monkeypatch.setattr(sdpa, "_bias", lambda *a: shapes.append(bias(*a).shape) or bias(*a))
    q = torch.randn(3, 40, 4, 16)
    for slopes in (torch.rand(4), torch.rand(3, 4)):
        with use_backend("sdpa"):
            flash_attn_func(q, q, q, alibi_slopes=slopes)
    assert shapes == [(1, 4, 40, 40), (3, 4, 40, 40)]


@pytest.mark.parametrize(
    ("options", "share"),
    [({"causal": True}, 1.2), ({"window_size": (300, 0)}, 1.9), ({"window_size": (300, 20)}, 1.9)],
    ids=str,
)
def test_a_bias_is_of_keys_that_its_rows_see(monkeypatch, options, share):
    tiles = []
    bias = sdpa._bias
    monkeypatch.setattr(
        sdpa,
        "_bias",
        lambda mask, block, rows, keys: tiles.append(rows.size * keys.size) or bias(mask, block, rows, keys),
    )
    q, slopes = torch.randn(1, 2048, 1, 16), torch.tensor([0.1])
    with use_backend("sdpa"):
        flash_attn_func(q, q, q, alibi_slopes=slopes, **options)
    left, right = options.get("window_size", (2048, 0))
    rows = torch.arange(2048)
    visible = (rows + right).clamp(max=2047) - (rows - left).clamp(min=0) + 1
    assert sum(tiles) <= share * int(visible.sum())


@pytest.mark.parametrize("first", [0, 2**24 - 3, 2**24 + 1, 2**30])
def test_distances_of_far_positions_are_exact(first):
    rows, keys = Range(5, 9), Range(first, first + 6)
    gap = alibi.gap(rows, keys, first, torch.device("cpu"), torch.float32)
    assert gap.tolist() == [[abs(key - row - first) for key in range(*keys)] for row in range(*rows)]
