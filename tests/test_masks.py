"""What the oracle is not asked for: masks, positions in the LSE and the form of results, written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import explain, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.flash_attn_interface import _flash_attn_varlen_forward
from tests.support import close, cumulative, on_backend, on_general_backends, qkv, randn
from verify import oracle


def visible_keys(backend: str, sq: int, sk: int, **kwargs: Any) -> list[list[int]]:
    """Which keys each row sees: equal scores and v = identity make the output the row's probabilities."""
    q, k = torch.zeros(1, sq, 1, 8), randn(1, sk, 1, 8)
    out = on_backend(backend, flash_attn_func, q, k, torch.eye(sk)[None, :, None], **kwargs)
    return [row.nonzero().flatten().tolist() for row in out[0, :, 0]]


CAUSAL: dict[str, Any] = {"causal": True}
SEEN: list[tuple[int, int, dict[str, Any], list[list[int]]]] = [
    (2, 5, CAUSAL, [[0, 1, 2, 3], [0, 1, 2, 3, 4]]),
    (5, 2, CAUSAL, [[], [], [], [0], [0, 1]]),
    (3, 3, CAUSAL | {"window_size": (1, 2)}, [[0], [0, 1], [1, 2]]),
    (3, 5, {"window_size": (1, 0)}, [[1, 2], [2, 3], [3, 4]]),
    (3, 5, {"window_size": (0, 0)}, [[2], [3], [4]]),
    (3, 5, {"window_size": (0, 1)}, [[2, 3], [3, 4], [4]]),
    (3, 5, {"window_size": (-1, 0)}, [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
    (3, 5, {"window_size": (1, -1)}, [[1, 2, 3, 4], [2, 3, 4], [3, 4]]),
    (3, 5, {"window_size": (-1, 1)}, [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
    (3, 5, {"window_size": (-2, -7)}, [[0, 1, 2, 3, 4]] * 3),
    (3, 5, {"window_size": (100, 100)}, [[0, 1, 2, 3, 4]] * 3),
    (5, 2, {"window_size": (1, -1)}, [[0, 1]] * 5),
    (3, 5, {"window_size": (2**31, 2**63)}, [[0, 1, 2, 3, 4]] * 3),
    (3, 5, {"window_size": (2**32, 0)}, [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
    (9, 3, {"window_size": (-1, 4)}, [[], [], [0], [0, 1]] + [[0, 1, 2]] * 5),
]


@on_general_backends
@pytest.mark.parametrize(("sq", "sk", "options", "seen"), SEEN)
def test_masks_are_aligned_to_the_bottom_right_and_windows_count_inclusively(
    backend: str, sq: int, sk: int, options: dict[str, Any], seen: list[list[int]]
) -> None:
    assert visible_keys(backend, sq, sk, **options) == seen


def test_window_size_may_be_numpy_integers() -> None:
    np = pytest.importorskip("numpy")
    assert visible_keys("chunked", 3, 3, window_size=tuple(np.array([1, 0]))) == [[0], [0, 1], [1, 2]]


# ---------------------------------------------------------------- scores


def _alibi_lse_shift(backend: str, **kwargs: Any) -> Tensor:
    """Returned minus true LSE, (sq,), of a call with slope 0.5, sq = 3, sk = 5."""
    q, k, v = qkv(b=1, sq=3, sk=5, h=1)
    slopes = torch.tensor([0.5])
    _, lse, _ = on_backend(backend, flash_attn_func, q, k, v, alibi_slopes=slopes, return_attn_probs=True, **kwargs)
    i, j = torch.arange(3)[:, None] + 2, torch.arange(5)[None]
    scores = q[0, :, 0] @ k[0, :, 0].T / 4 - 0.5 * (i - j).abs()
    window = tuple(kwargs.get("window_size", (-1, -1)))
    seen = oracle.keys_visible(3, 5, kwargs.get("causal", False), window, "cpu")
    return (lse[0, 0] - scores.masked_fill(~seen, -torch.inf).logsumexp(-1)).round(decimals=4)


@on_general_backends
@pytest.mark.parametrize(
    ("options", "shift"),
    [
        (dict(causal=True), [1.0, 1.5, 2.0]),
        (dict(window_size=(-1, 0)), [1.0, 1.5, 2.0]),
        (dict(causal=True, window_size=(5, 0)), [1.0, 1.5, 2.0]),
        (dict(causal=True, window_size=(9, 9)), [1.0, 1.5, 2.0]),
        ({}, [0.0] * 3),
        (dict(causal=True, window_size=(4, 0)), [0.0] * 3),
        (dict(window_size=(-1, 1)), [0.0] * 3),
    ],
)
def test_the_lse_of_pure_causal_alibi_carries_slope_times_position_and_no_other(
    backend: str, options: dict[str, Any], shift: list[float]
) -> None:
    assert _alibi_lse_shift(backend, **options).tolist() == shift


def _calls(kind: str) -> tuple[Any, tuple[Any, ...]]:
    q, k, v = qkv(sq=40, sk=40)
    if kind == "dense":
        return flash_attn_func, (q, k, v)
    if kind == "packed":
        starts = cumulative(40, 40)
        return flash_attn_varlen_func, (*(x.flatten(0, 1) for x in (q, k, v)), starts, starts, 40, 40)
    return flash_attn_with_kvcache, (q, k, v)


@pytest.mark.parametrize("kind", ["dense", "packed", "cache"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, dict(softcap=3.0), dict(alibi_slopes=torch.tensor([0.5, 0.25]))])
def test_an_idle_window_takes_the_path_of_the_call_without_it(kind: str, causal: bool, options: Any) -> None:
    fn, args = _calls(kind)
    idle = explain(fn, *args, causal=causal, window_size=(4096, 4096), **options)
    assert idle == explain(fn, *args, causal=causal, **options)


@on_general_backends
@pytest.mark.parametrize("length", [7, torch.tensor([7, 7], dtype=torch.int32)], ids=["int", "tensor"])
@pytest.mark.parametrize("left", [6, 7, 8, 11, 12, 13])
def test_the_lse_of_alibi_over_a_cache_knows_the_windows_the_capacity_makes_idle(
    backend: str, left: int, length: Any
) -> None:
    q, k, v = qkv(sq=3, sk=12)
    slopes = torch.tensor([0.5, 0.25])
    _, true_lse, _ = flash_attn_func(q, k[:, :7], v[:, :7], window_size=(7 - 1, 0), alibi_slopes=slopes,
                                     return_attn_probs=True)  # fmt: skip
    _, lse = on_backend(
        backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=length, causal=True, window_size=(left, -1),
        alibi_slopes=slopes, return_softmax_lse=True,
    )  # fmt: skip
    shift = slopes[:, None] * torch.arange(4, 7) if left >= 12 else 0.0
    close(lse, true_lse + shift)


def test_alibi_slopes_get_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    slopes = torch.tensor([0.5, 1.0], requires_grad=True)
    flash_attn_func(q, k, v, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is None and q.grad is not None


# ---------------------------------------------------------------- results


@on_general_backends
@pytest.mark.parametrize("d", [16, 20])
def test_the_output_is_contiguous_so_that_heads_can_be_viewed_as_one_dimension(backend: str, d: int) -> None:
    q, k, v = torch.stack(qkv(d=d), 2).unbind(2)
    assert on_backend(backend, flash_attn_func, q, k, v).view(2, 7, 2 * d).shape == (2, 7, 2 * d)


@on_general_backends
def test_sequences_may_share_a_page(backend: str) -> None:
    k, v, q = randn(1, 16, 2, 8, seed=1), randn(1, 16, 2, 8, seed=2), randn(4, 2, 8)
    lengths = dict(cu_seqlens_q=cumulative(2, 2), cu_seqlens_k=cumulative(16, 10), max_seqlen_q=2, max_seqlen_k=16)
    table = torch.zeros(2, 1, dtype=torch.int32)
    out = on_backend(backend, flash_attn_varlen_func, q, k, v, block_table=table, **lengths)
    for b, length in enumerate((16, 10)):
        close(out[2 * b : 2 * b + 2], flash_attn_func(q[None, 2 * b : 2 * b + 2], k[:, :length], v[:, :length])[0])


def test_zero_tensors_marks_tokens_outside_every_sequence_with_minus_inf_lse() -> None:
    q, k = randn(7, 2, 16), randn(10, 2, 16)
    out, lse, _, _ = _flash_attn_varlen_forward(
        q, k, k, cumulative(3, 2), cumulative(4, 4), 3, 4, 0.0, 0.25, False, zero_tensors=True
    )
    assert not out[5:].any() and (lse[:, 5:] == -torch.inf).all() and lse[:, :5].isfinite().all()


def test_a_row_whose_scores_are_all_minus_infinity_is_one_without_keys_to_chunked() -> None:
    q, k = torch.full((1, 3, 1, 8), 1e20), torch.full((1, 20_000, 1, 8), -1e20)  # more keys than a tile has
    leaves = [tensor.bfloat16().requires_grad_() for tensor in (q, k, torch.ones_like(k))]
    with use_backend("chunked"):
        out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True)
        gradients = torch.autograd.grad(out.sum(), leaves)
    assert not out.any() and bool((lse == torch.inf).all()) and not any(gradient.any() for gradient in gradients)
