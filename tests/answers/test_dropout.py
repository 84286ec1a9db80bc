"""Dropout: reproducible, the same mask forward and backward, honest in its probability, reported in S_dmask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func
from flash_attn_compat.core.arguments import checked_call
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import DenseInputs, Options, PackedInputs
from flash_attn_compat.flash_attn_interface import _get_block_size_n
from tests.forms.inputs import cumulative, qkv, randn
from tests.forms.support import on_backend
from verify import oracle

DROPPING = pytest.mark.parametrize("backend", ["reference", "chunked"])


def dropped(backend: str, seed: int, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return on_backend(backend, flash_attn_func, *args, **kwargs)


@DROPPING
def test_the_mask_is_that_of_the_seed_whether_it_is_asked_for_or_not(backend: str) -> None:
    q, k, v = qkv()
    first, again, other = (dropped(backend, seed, q, k, v, dropout_p=0.3) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(other, on_backend(backend, flash_attn_func, q, k, v, dropout_p=0.3))
    assert torch.equal(first, dropped(backend, 1, q, k, v, dropout_p=0.3, return_attn_probs=True)[0])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_call_that_is_not_recorded_goes_to_the_backend_of_its_recorded_one(
    is_packed: bool, deterministic: bool
) -> None:
    """A reentrant checkpoint records its recomputation only, and two backends may draw two masks."""
    tensors, options = DenseInputs(*qkv()), Options(dropout_p=0.1, deterministic=deterministic)
    if is_packed:
        tensors = PackedInputs(*(x.flatten(0, 1) for x in qkv()), None, cumulative(7, 7), cumulative(7, 7))
        options = options._replace(max_seqlen_q=7, max_seqlen_k=7)
    unrecorded, recorded = (checked_call(tensors, options._replace(use=use)).traits() for use in (0, Feature.BACKWARD))
    assert unrecorded == recorded


@DROPPING
@pytest.mark.parametrize("p", [0.1, 0.17, 0.5, 0.9])
def test_each_probability_is_kept_by_a_random_byte_of_its_own(backend: str, p: float) -> None:
    """Iff byte <= floor(255 (1 - p)); within 4.5 standard deviations of a binomial count, 5 of neighbours' products."""
    q, k, v = qkv(b=2, sq=250, sk=250, h=4, d=8)
    _, _, s_dmask = dropped(backend, 5, q, k, v, dropout_p=p, return_attn_probs=True)
    wanted = (math.floor(255 * (1 - p)) + 1) / 256
    x = ((s_dmask[:, :, :250, :250] >= 0).double() - wanted) / math.sqrt(wanted * (1 - wanted))
    for axes, what in (((0, 1, 2, 3), "all"), ((0, 2, 3), "head"), ((2, 3), "matrix"), ((0, 1, 3), "row")):
        means = x.mean(axes)
        assert means.abs().max() < 4.5 / math.sqrt(x.numel() / means.numel()), what
    pairs = {
        "keys": (x[..., 1:], x[..., :-1]), "rows": (x[:, :, 1:], x[:, :, :-1]), "heads": (x[:, 1:], x[:, :-1]),
        "sequences": (x[0], x[1]), "diagonal": (x[..., 1:, 1:], x[..., :-1, :-1]), "mirror": (x, x.transpose(2, 3)),
    }  # fmt: skip
    for name, (a, b) in pairs.items():
        assert (a * b).mean().abs() < 5 / math.sqrt(a.numel() / 2), name


# ---------------------------------------------------------------- S_dmask


@DROPPING
def test_s_dmask_of_packed_sequences_has_a_mask_for_each_padded_from_the_longest(backend: str) -> None:
    args = dict(
        q=randn(24, 2, 8, seed=1), k=randn(149, 2, 8, seed=2), v=randn(149, 2, 8, seed=3),
        cu_seqlens_q=cumulative(12, 12), cu_seqlens_k=cumulative(137, 12), max_seqlen_q=12, max_seqlen_k=137,
    )  # fmt: skip
    _, _, s_dmask = on_backend(backend, flash_attn_varlen_func, **args, dropout_p=0.5, return_attn_probs=True)
    assert s_dmask.shape == (2, 2, 128, 256)
    assert (s_dmask[0, :, :12, :137] != 0).all() and (s_dmask[1, :, :12, :12] != 0).all()
    keep = s_dmask[:, :, :12, :12] >= 0
    assert not torch.equal(keep[0], keep[1]) and not torch.equal(keep[0, 0], keep[0, 1])


@DROPPING
@pytest.mark.parametrize(
    ("d", "kwargs"),
    [
        (8, {}),
        (64, dict(causal=True)),
        (100, dict(window_size=(20, 9))),
        (128, dict(alibi_slopes=torch.tensor([0.2, 0.05]))),
        (8, dict(alibi_slopes=torch.tensor([0.2, 0.05]), causal=True)),
    ],
    ids=["plain", "causal", "window", "alibi", "alibi_causal"],
)
def test_s_dmask_is_exp_of_score_minus_the_running_maximum_of_key_blocks_from_the_right(
    backend: str, d: int, kwargs: Any
) -> None:
    q, k, v = qkv(b=1, sq=60, sk=200, h=2, d=d)
    _, _, s_dmask = dropped(backend, 0, q, k, v, dropout_p=0.2, return_attn_probs=True, **kwargs)
    block = _get_block_size_n(q.device, d, True, kwargs.get("causal", False))
    scores = torch.einsum("qhd,khd->hqk", q[0], k[0]).double() * d**-0.5
    if "alibi_slopes" in kwargs:
        distance = (torch.arange(60)[:, None] + 140 - torch.arange(200)).abs()
        scores = scores - kwargs["alibi_slopes"].double()[:, None, None] * distance
    seen = oracle.keys_visible(60, 200, kwargs.get("causal", False), kwargs.get("window_size", (-1, -1)), "cpu")
    scores = scores.masked_fill(~seen, -torch.inf)
    right = torch.zeros_like(scores)
    running = torch.full((2, 60), -torch.inf, dtype=torch.float64)
    for start in reversed(range(0, 200, block)):
        columns = slice(start, start + block)
        running = torch.maximum(running, scores[:, :, columns].amax(-1))
        right[:, :, columns] = (scores[:, :, columns] - running.masked_fill(running == -torch.inf, 0)[..., None]).exp()
    assert s_dmask.shape == (1, 2, 128, 256) and s_dmask.dtype == q.dtype
    torch.testing.assert_close(s_dmask[0, :, :60, :200].abs().double(), right, rtol=1e-5, atol=1e-6)
