"""FlashAttention-4's functions against flash-attn 2's on each sequence by itself, in fp64."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat import fa4
from flash_attn_compat import flash_attn_interface as fa2
from tests.forms.inputs import cumulative, ints, qkv, randn
from tests.forms.plain import assert_as_good_as_plain, pairwise

ROWS, KEYS, PAGE = (3, 0, 5, 1), (4, 2, 3, 0), 2
SINK = torch.tensor([-1.0, 0.5, 2.0, 0.0])
# FlashAttention-4's options, and flash-attn 2's that mean the same.
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (None, 0)}, {"causal": True}),
    ({"window_size": (2, None)}, {"window_size": (2, -1)}),
    ({"window_size": (1, 1), "softcap": 3.0, "softmax_scale": 0.7},) * 2,
    ({"window_size": (1, 4), "causal": True, "learnable_sink": SINK}, {"window_size": (1, 0), "s_aux": SINK}),
    ({"window_size": (-1, -1), "num_splits": 3, "pack_gqa": True, "deterministic": True}, {}),
    ({"window_size": (1, -3), "softcap": None}, {}),
]


class Layout(NamedTuple):
    """How q and k lie in memory, and whether only a part of each sequence is used."""

    q: str  # dense or packed
    k: str  # dense, packed or paged
    uses_rows: bool
    uses_keys: bool


LAYOUTS = [
    Layout(q, k, uses_rows, uses_keys)
    for q in ("dense", "packed")
    for k in ("dense", "packed", "paged")
    for uses_rows in (False, True)
    for uses_keys in (False, True)
]


def test_dense_calls_and_gradients_match_flash_attn_2() -> None:
    for ours, theirs in OPTIONS:
        leaves = [x.requires_grad_() for x in qkv(sq=5, sk=4, h=4, hk=2, d=8)]
        leaves[2] = randn(2, 4, 2, 5).requires_grad_()
        out, lse = fa4.flash_attn_func(*leaves, return_lse=True, **ours)
        expected, expected_lse, _ = fa2.flash_attn_func(*leaves, return_attn_probs=True, **theirs)
        torch.testing.assert_close(
            (out, lse), (expected, expected_lse.masked_fill(expected_lse == torch.inf, -torch.inf))
        )
        weights = randn(*out.shape), torch.where(lse.isfinite(), randn(*lse.shape), 0.0)
        found, right = (torch.autograd.grad(pair, leaves, weights) for pair in ((out, lse), (expected, expected_lse)))
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("layout", "option", "dtype"), pairwise(LAYOUTS, (0, 1, 3, 4, 5), (torch.float32, torch.bfloat16)), ids=str
)
def test_each_layout_matches_each_sequence_by_itself(layout: Layout, option: int, dtype: torch.dtype) -> None:
    ours, theirs = OPTIONS[option]
    q, k, v = _sequences(dtype)
    lengths, places = _arguments(layout)
    leaves = [x.requires_grad_(layout.k != "paged") for x in (_lay(q, layout.q), _lay(k, layout.k), _lay(v, layout.k))]
    out, lse = fa4.flash_attn_varlen_func(*leaves, return_lse=True, **places, **ours)
    assert lse is not None
    exact, rounded = (_each_by_itself(leaves, layout, lengths, theirs, wide) for wide in (torch.float64, dtype))
    used = exact[1].isfinite() & (exact[2] > 0)
    for found, plain, right in zip(
        (out, torch.where(used, lse, 0.0)), rounded, (exact[0], torch.where(used, exact[1], 0.0))
    ):
        assert_as_good_as_plain(found, torch.where(right == 0, 0.0, plain).to(plain.dtype), right)
    assert (lse[(exact[1] == torch.inf) & (exact[2] > 0)] == -torch.inf).all()
    if layout.k == "paged":
        return
    weights = randn(*out.shape, dtype=dtype), torch.where(used, randn(*lse.shape), 0.0)
    grads = torch.autograd.grad((out, lse), leaves, weights)
    rights = torch.autograd.grad(exact[:2], leaves, [weight.double() for weight in weights])
    for found, right in zip(grads, rights):
        limit = 2e-6 if dtype is torch.float32 else 4e-2
        torch.testing.assert_close(
            found.double(), right.double(), rtol=0, atol=limit * max(1.0, float(right.abs().max()))
        )


def _sequences(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as (batch, seqlen, heads, head_dim); v is narrower, and groups of two heads share a key head."""
    return (
        randn(4, 6, 4, 8, dtype=dtype),
        randn(4, 6, 2, 8, seed=1, dtype=dtype),
        randn(4, 6, 2, 5, seed=2, dtype=dtype),
    )


def _lay(x: Tensor, kind: str) -> Tensor:
    if kind == "paged":
        return x.unflatten(1, (-1, PAGE)).flatten(0, 1).flip(0)
    return x.flatten(0, 1) if kind == "packed" else x


def _arguments(layout: Layout) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """The lengths of rows and keys, and the call's arguments for them. Each sequence has 6 places."""
    places: dict[str, Any] = {}
    if layout.q == "packed":
        places |= {"cu_seqlens_q": cumulative(6, 6, 6, 6), "max_seqlen_q": 6}
    if layout.k == "packed":
        places |= {"cu_seqlens_k": cumulative(6, 6, 6, 6)}
    if layout.k == "paged":
        places |= {"page_table": 11 - torch.arange(12, dtype=torch.int32).unflatten(0, (4, 3))}
    if layout.uses_rows:
        places |= {"seqused_q": ints(*ROWS)}
    if layout.uses_keys:
        places |= {"seqused_k": ints(*KEYS)}
    return (ROWS if layout.uses_rows else (6,) * 4, KEYS if layout.uses_keys else (6,) * 4), places


def _each_by_itself(
    leaves: list[Tensor], layout: Layout, lengths: tuple[Any, Any], options: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """out, the LSE and 1 at the used rows, in the call's layout."""
    q, k, v = leaves
    if layout.q == "packed":
        q = q.unflatten(0, (4, 6))
    if layout.k == "packed":
        k, v = k.unflatten(0, (4, 6)), v.unflatten(0, (4, 6))
    if layout.k == "paged":
        k, v = (x.flip(0).unflatten(0, (4, 3)).flatten(1, 2) for x in (k, v))
    outs, lses, used = [], [], []
    for index, (rows, keys) in enumerate(zip(*lengths)):
        parts = [x[index : index + 1, :length].to(dtype) for x, length in ((q, rows), (k, keys), (v, keys))]
        out, lse, _ = fa2.flash_attn_func(*parts, return_attn_probs=True, **options)
        behind = (0, 0, 0, 0, 0, 6 - rows)
        outs.append(torch.nn.functional.pad(out, behind))
        lses.append(torch.nn.functional.pad(lse, (0, 6 - rows)))
        used.append((torch.arange(6) < rows).expand_as(lses[-1]))
    if layout.q == "packed":
        return torch.cat(outs, 1)[0], torch.cat(lses, 2)[0], torch.cat(used, 2)[0].int()
    return torch.cat(outs), torch.cat(lses), torch.cat(used).int()


def test_without_gradients_the_lse_is_none_unless_asked_for() -> None:
    q, k, v = qkv()
    assert fa4.flash_attn_func(q, k, v)[1] is None and fa4.flash_attn_varlen_func(q, k, v)[1] is None
    out, lse = fa4.flash_attn_func(q.requires_grad_(), k, v)
    assert lse is not None and not lse.requires_grad and out.requires_grad


def test_keys_that_are_the_values_have_the_lse_of_their_own_layout() -> None:
    q, k, _ = qkv(sq=3, sk=4, h=4, hk=1, d=512)
    out, lse = fa4.flash_attn_func(q, k, k, return_lse=True)
    expected, expected_lse, _ = fa2.flash_attn_func(q, k, k, return_attn_probs=True)
    torch.testing.assert_close((out, lse), (expected, expected_lse.transpose(1, 2)))


CUTE = "qv gather_kv_indices score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors "
CUTE += "block_sparse_tensors_bwd"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (function, name)
        for function in fa4.__all__
        for name in inspect.signature(getattr(fa4, function)).parameters
        if name in CUTE.split()
    ],
)
def test_arguments_of_cute_are_refused_by_name(function: str, name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"^{name} of FlashAttention-4 is not served"):
        getattr(fa4, function)(*qkv(), **{name: (torch.ones(1),)})


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"window_size": (3, -1)}, NotImplementedError, r"window_size=\(3, -1\) .* a negative bound moves the window"),
    ({"window_size": (3,)}, ValueError, "window_size must be two bounds"),
    ({"learnable_sink": torch.ones(3)}, ValueError, r"learnable_sink must have shape \(nheads,\) = \(2,\), got \(3,\)"),
    ({"cu_seqlens_q": cumulative(7, 7)}, ValueError, r"q must have shape \(total, heads, headdim\) with cu_seqlens_q"),
    ({"seqused_q": ints(1)}, ValueError, r"seqused_q must be int32 of shape \(batch,\) = \(2,\)"),
    ({"page_table": ints(0, 1)[:, None], "cu_seqlens_k": cumulative(7, 7)}, ValueError, "page_table is not supported"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), WRONG, ids=[str(list(wrong[0])) for wrong in WRONG])
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fa4.flash_attn_varlen_func(*qkv(), **arguments)
