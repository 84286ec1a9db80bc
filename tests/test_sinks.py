"""Attention sinks against a softmax with one more column, dropped before the product with v."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.plain import attention, attention_and_lse, check_function
from tests.support import cumulative, on_backend, on_general_backends, qkv, randn

B, SQ, SK, H, HK, D = 2, 5, 9, 4, 2, 16
SINKS = torch.tensor([-2.0, 0.0, 1.5, 6.0])
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (2, 0)},
    "softcap and scale": {"softcap": 1.5, "softmax_scale": 0.7},
}
on_cases = pytest.mark.parametrize(
    ("case", "dtype"),
    [("plain", torch.float32), ("causal", torch.float16), ("causal", torch.bfloat16), ("window", torch.bfloat16),
     ("softcap and scale", torch.float32), ("softcap and scale", torch.float16)],
)  # fmt: skip


def plain(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, causal: bool = False, window_size: Any = (-1, -1), **more: Any
) -> Tensor:
    more["scale"] = more.pop("softmax_scale", None)
    return attention(q, k, v, sinks=sinks, window=(window_size[0], 0 if causal else window_size[1]), **more)


def inputs(dtype: torch.dtype, sq: int = SQ, sk: int = SK) -> tuple[Tensor, ...]:
    return (*qkv(B, sq, sk, H, HK, D, dtype), SINKS.to(dtype))


@on_cases
@on_general_backends
def test_dense_values_and_gradients(backend: str, case: str, dtype: torch.dtype) -> None:
    """Gradients of q, k, v and the sinks."""
    options = CASES[case]

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out: Tensor = on_backend(backend, flash_attn_func, q, k, v, **options, s_aux=sinks)
        return out

    with flash_attn_compat.use_backend(backend):
        # The sinks' gradients are sums over all rows, in which larger terms cancel.
        check_function(ours, lambda *given: plain(*given, **options), *inputs(dtype), epsilons=16)


@on_cases
def test_packed_values_and_gradients(case: str, dtype: torch.dtype) -> None:
    """Lengths of every kind, an empty sequence of keys included."""
    options, lengths_q, lengths_k = CASES[case], (3, 5, 1, 2), (6, 5, 0, 4)
    q, k, v = (
        randn(sum(n), h, D, seed=s, dtype=dtype)
        for s, (n, h) in enumerate(((lengths_q, H), (lengths_k, HK), (lengths_k, HK)))
    )

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        starts = cumulative(*lengths_q), cumulative(*lengths_k)
        return flash_attn_varlen_func(q, k, v, *starts, 5, 6, **options, s_aux=sinks)

    def each(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
        return torch.cat([plain(*(t[None] for t in part), sinks, **options)[0] for part in parts])

    check_function(ours, each, q, k, v, SINKS.to(dtype), epsilons=8)


def test_the_log_sum_exp_counts_the_sink_and_rows_without_keys_stay_zero() -> None:
    q, k, v, sinks = inputs(torch.float32, sq=SK, sk=SQ)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, s_aux=sinks)
    _, without, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    dead = slice(0, SK - SQ)
    assert (out[:, dead] == 0).all() and torch.isposinf(lse[..., dead]).all()
    live = slice(SK - SQ, None)
    expected = torch.logaddexp(without[..., live], sinks[:, None])
    torch.testing.assert_close(lse[..., live], expected)
    leaves = [t.requires_grad_() for t in (q, k, v, sinks)]
    for grad in torch.autograd.grad(flash_attn_func(q, k, v, causal=True, s_aux=sinks).sum(), leaves):
        assert grad.isfinite().all()


@on_general_backends
def test_dropout_drops_keys_and_never_the_sink(backend: str) -> None:
    """The mask of the forward is the one of the backward."""
    p, leaves = 0.5, [t.requires_grad_() for t in inputs(torch.float32)]
    torch.manual_seed(0)
    with flash_attn_compat.use_backend(backend):
        out, _, dmask = on_backend(
            backend, flash_attn_func, *leaves[:3], dropout_p=p, return_attn_probs=True, s_aux=leaves[3]
        )
        grads = torch.autograd.grad(out.sin().sum(), leaves)
    keep = dmask[..., :SQ, :SK] >= 0
    expected = plain(*leaves, keep=keep, dropout_p=p)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for found, right in zip(grads, torch.autograd.grad(expected.sin().sum(), leaves), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_cache_is_read_with_sinks(return_lse: bool) -> None:
    q, k, v, sinks = inputs(torch.float32, sq=1)
    caches = [torch.zeros(B, SK + 4, HK, D) for _ in range(2)]
    for cache, new in zip(caches, (k, v)):
        cache[:, : SK - 1] = new[:, :-1]
    found = flash_attn_with_kvcache(
        q, *caches, k[:, -1:], v[:, -1:], cache_seqlens=torch.full((B,), SK - 1, dtype=torch.int32), causal=True,
        return_softmax_lse=return_lse, s_aux=sinks,
    )  # fmt: skip
    out = found[0] if return_lse else found
    torch.testing.assert_close(out, plain(q, k, v, sinks), rtol=1e-4, atol=1e-5)
    if return_lse:
        _, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, s_aux=sinks)
        torch.testing.assert_close(found[1], lse)


def test_pages_are_read_with_sinks() -> None:
    lengths_q, lengths_k, page = (1, 2), (5, 3), 256
    q = randn(sum(lengths_q), H, D)
    pages_k, pages_v = randn(2, page, HK, D, seed=1), randn(2, page, HK, D, seed=2)
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    arguments = (cumulative(*lengths_q), cumulative(*lengths_k), 2, 5)
    out = flash_attn_varlen_func(q, pages_k, pages_v, *arguments, causal=True, block_table=table, s_aux=SINKS)
    for i, rows in enumerate(q.split(lengths_q)):
        keys, values = (t[table[i, 0], : lengths_k[i]][None] for t in (pages_k, pages_v))
        expected = plain(rows[None], keys, values, SINKS, causal=True)[0]
        torch.testing.assert_close(out.split(lengths_q)[i], expected, rtol=1e-4, atol=1e-5)
    leaves = [x.requires_grad_() for x in (q, SINKS.clone())]
    out = flash_attn_varlen_func(q, pages_k, pages_v, *arguments, block_table=table, s_aux=leaves[1])
    rows = zip(q.split(lengths_q), table[:, 0].tolist(), lengths_k)
    right = torch.cat([plain(x[None], pages_k[i, :n][None], pages_v[i, :n][None], leaves[1])[0] for x, i, n in rows])
    for found, expected in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (out, right)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("s_aux", "options", "part"),
    [
        (torch.zeros(3), {}, r"shape \(nheads,\) = \(4,\), got torch.float32 of shape \(3,\)"),
        (torch.zeros(4, dtype=torch.int64), {}, "floating-point"),
        (0.5, {}, "got float"),
        (torch.zeros(4, device="meta"), {}, "on q's device"),
        (torch.zeros(4), {"alibi_slopes": torch.ones(4)}, "alibi_slopes cannot be combined"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    s_aux: Any, options: dict[str, Any], part: str
) -> None:
    q, k, v, _ = inputs(torch.float32)
    with pytest.raises(RuntimeError, match=part):
        flash_attn_func(q, k, v, **options, s_aux=s_aux)
    caches = torch.zeros(B, SK, HK, D), torch.zeros(B, SK, HK, D)
    with pytest.raises(RuntimeError, match=part):
        flash_attn_with_kvcache(q, *caches, k[:, :1], v[:, :1], cache_seqlens=0, **options, s_aux=s_aux)
    assert not any(cache.any() for cache in caches)


def test_second_derivatives_and_transforms_are_those_of_the_plain_formula() -> None:
    given = tuple(x.double() for x in inputs(torch.float32))

    def ours(*x: Tensor) -> Tensor:
        return flash_attn_func(*x[:3], causal=True, s_aux=x[3])

    def right(*x: Tensor) -> Tensor:
        return plain(*x, causal=True)

    found, expected = (torch.func.jacrev(f, (0, 1, 2, 3))(*given) for f in (ours, right))
    torch.testing.assert_close(found, expected)
    tangents = tuple(x.cos() for x in given)
    found, expected = (torch.func.jvp(f, given, tangents) for f in (ours, right))
    torch.testing.assert_close(found, expected)
    answers = []
    for f in (ours, right):
        leaves = [x.detach().requires_grad_() for x in given]
        first = torch.autograd.grad(f(*leaves).square().sum(), leaves, create_graph=True)
        answers.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    torch.testing.assert_close(*answers)


def test_the_log_sum_exp_with_sinks_has_a_gradient() -> None:
    def ours(*x: Tensor) -> list[Tensor]:
        return list(flash_attn_func(*x[:3], causal=True, return_attn_probs=True, s_aux=x[3])[:2])

    def right(*x: Tensor) -> tuple[Tensor, Tensor]:
        return attention_and_lse(*x[:3], window=(-1, 0), sinks=x[3])

    check_function(ours, right, *inputs(torch.float32), epsilons=16)
