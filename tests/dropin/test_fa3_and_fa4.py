"""FlashAttention-3's and 4's names and conventions, where they are asked for, against flash-attn 2's."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import fa3, fa4
from flash_attn_compat import flash_attn_interface as fa2
from tests.forms.inputs import cumulative, ints, qkv, randn
from tests.forms.plain import assert_as_good_as_plain, pairwise
from tests.forms.support import write_package

FA3_NAME = "flash_attn_interface"


def grouped(seqlen_q=5, seqlen_k=5):
    return qkv(2, seqlen_q, seqlen_k, h=4, hk=2, d=8)


def test_the_name_of_flash_attention_3_is_there_only_where_it_is_asked_for():
    flash_attn_compat.patch()
    assert importlib.util.find_spec(FA3_NAME) is None
    flash_attn_compat.patch(interfaces=("fa3",))
    module = importlib.import_module(FA3_NAME)
    for name in ("flash_attn_func", "_flash_attn_forward", "_flash_attn_backward"):
        assert getattr(module, name) is getattr(fa3, name)
    assert importlib.metadata.packages_distributions()[FA3_NAME] == ["flash-attn-3"]
    flash_attn_compat.unpatch()
    assert importlib.util.find_spec(FA3_NAME) is None


def test_a_module_of_that_name_stays(tmp_path, monkeypatch):
    (tmp_path / f"{FA3_NAME}.py").write_text("here = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with flash_attn_compat.patched(interfaces=("fa3",)):
        assert importlib.import_module(FA3_NAME).here
    del sys.modules[FA3_NAME]


@pytest.mark.parametrize("interfaces", [("fa5",), "fa3"])
def test_unknown_interfaces_are_refused(interfaces):
    with pytest.raises(ValueError, match="interfaces must be a sequence of names among fa3, fa4"):
        flash_attn_compat.patch(interfaces=interfaces)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 0), "softcap": 3.0}], ids=str)
def test_dense_packed_and_cached_calls_match_flash_attn_2(options):
    q, k, v = grouped()
    out, lse, _ = fa2.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert torch.equal(fa3.flash_attn_func(q, k, v, **options), out)
    for ours, right in zip(fa3.flash_attn_func(q, k, v, return_attn_probs=True, **options), (out, lse), strict=True):
        torch.testing.assert_close(ours, right)
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    packed = fa3.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts, starts, 5, 5, **options)
    torch.testing.assert_close(packed, out.flatten(0, 1))
    pages, table = torch.cat((k, k)), torch.tensor([[2], [1]], dtype=torch.int32)
    used = torch.tensor([5, 5], dtype=torch.int32)
    cached = fa3.flash_attn_with_kvcache(
        q, pages, torch.cat((v, v)), cache_seqlens=used, page_table=table, return_softmax_lse=True, **options
    )
    for ours, right in zip(cached, (out, lse, None, None), strict=True):
        torch.testing.assert_close(ours, right)
    both = torch.stack((q, q, q), 2)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(both, **options), fa2.flash_attn_func(q, q, q, **options))


def test_rows_that_see_no_key_have_an_lse_of_minus_infinity():
    q, k, v = grouped(seqlen_q=5, seqlen_k=3)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[:, :, :2] == -torch.inf).all() and lse[:, :, 2:].isfinite().all() and not out[:, :2].any()
    q, k, v = grouped(seqlen_q=5, seqlen_k=0)
    assert (fa3.flash_attn_func(q, k, v, return_attn_probs=True)[1] == torch.inf).all()


def test_gradients_flow():
    inputs = [x.requires_grad_() for x in grouped()]
    right, ours = (torch.autograd.grad(fa.flash_attn_func(*inputs, causal=True).sum(), inputs) for fa in (fa2, fa3))
    torch.testing.assert_close(ours, right)


REFUSED = "qv q_descale k_descale v_descale attention_chunk seqused_q seqused_k cu_seqlens_q cu_seqlens_k_new "
REFUSED += "rotary_seqlens num_heads_q"


@pytest.mark.parametrize("function", fa3.__all__)
def test_unsupported_arguments_are_refused_by_name(function):
    parameters = inspect.signature(getattr(fa3, function)).parameters
    required = {key: torch.zeros(1) for key, parameter in parameters.items() if parameter.default is parameter.empty}
    served = required.keys() | ({"k_descale", "v_descale"} if "kvcache" in function else set())  # of 8-bit caches
    refused = [name for name in REFUSED.split() if name in parameters and name not in served]
    assert refused
    for name in refused:
        given = 4 if name in ("attention_chunk", "num_heads_q") else torch.ones(1)
        with pytest.raises(NotImplementedError, match=f"^{name} of FlashAttention-3 is not served"):
            getattr(fa3, function)(**required, **{name: given})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"window_size": (2, 0), "softcap": 3.0}], ids=str)
def test_private_functions_match_flash_attn_2(packed, options):
    q, k, v = (t.flatten(0, 1) for t in grouped()) if packed else grouped()
    starts = torch.tensor([0, 5, 10], dtype=torch.int32) if packed else None
    longest = 5 if packed else None
    causal = not options
    out = torch.full_like(q, 7.0)
    found = fa3._flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out=out, cu_seqlens_q=starts, cu_seqlens_k=starts,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=longest, max_seqlen_k=longest,
        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=causal, **options,
    )  # fmt: skip
    lengths = (starts, starts, longest, longest) if packed else ()
    public = fa2.flash_attn_varlen_func if packed else fa2.flash_attn_func
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, lse, _ = public(*leaves, *lengths, causal=causal, return_attn_probs=True, **options)
    assert found[0] is out and found[2:] == (None, None)
    torch.testing.assert_close(found[:2], (expected.detach(), lse.detach()))

    given = [torch.empty_like(q), None, torch.empty_like(v)]
    *gradients, softmax_d = fa3._flash_attn_backward(
        torch.ones_like(out), q, k, v, *found[:2], *(lengths[:2] or (None, None)), None, None, longest, longest,
        *given, None, causal, **options,
    )  # fmt: skip
    assert gradients[0] is given[0] and gradients[2] is given[2] and softmax_d.dtype == torch.float32
    torch.testing.assert_close(tuple(gradients), torch.autograd.grad(expected.sum(), leaves))


def test_the_private_backward_takes_minus_infinity_of_rows_that_see_no_key():
    q, k, v = grouped(seqlen_q=5, seqlen_k=3)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    nothing = dict.fromkeys(list(inspect.signature(fa3._flash_attn_backward).parameters)[6:16])
    gradients = fa3._flash_attn_backward(torch.ones_like(out), q, k, v, out, lse, **nothing, causal=True)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_private_forward_refuses_cache_arguments_and_packed_sequences_without_their_longest():
    names = list(inspect.signature(fa3._flash_attn_forward).parameters)[3:24]
    nothing = dict.fromkeys(names) | {"causal": False}
    for name in ("k_new", "seqused_k", "page_table", "leftpad_k", "rotary_cos", "q_descale"):
        with pytest.raises(NotImplementedError, match=f"^{name} of FlashAttention-3"):
            fa3._flash_attn_forward(*grouped(), **nothing | {name: torch.ones(1)})
    starts = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cumulative(5, 5))
    with pytest.raises(ValueError, match=r"packed sequences need .* got max_seqlen_q=None"):
        fa3._flash_attn_forward(*(x.flatten(0, 1) for x in grouped()), **nothing | starts)


# ---------------------------------------------------- FlashAttention-4's functions, on each sequence by itself, in fp64

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
    Layout(*axes)
    for axes in itertools.product(("dense", "packed"), ("dense", "packed", "paged"), (False, True), (False, True))
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
    # v is narrower, and groups of two heads share a key head.
    q, k, v = (randn(4, 6, *sizes, seed=seed, dtype=dtype) for seed, sizes in enumerate(((4, 8), (2, 8), (2, 5))))
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


def _lay(x: Tensor, kind: str) -> Tensor:
    if kind == "paged":
        return x.unflatten(1, (-1, PAGE)).flatten(0, 1).flip(0)
    return x.flatten(0, 1) if kind == "packed" else x


def _arguments(layout: Layout) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """The lengths of rows and keys, and the call's arguments for them. Each sequence has 6 places."""
    places: dict[str, Any] = {}
    full = (6,) * 4
    if layout.q == "packed":
        places |= {"cu_seqlens_q": cumulative(*full), "max_seqlen_q": 6}
    if layout.k == "packed":
        places |= {"cu_seqlens_k": cumulative(*full)}
    if layout.k == "paged":
        places |= {"page_table": 11 - torch.arange(12, dtype=torch.int32).unflatten(0, (4, 3))}
    if layout.uses_rows:
        places |= {"seqused_q": ints(*ROWS)}
    if layout.uses_keys:
        places |= {"seqused_k": ints(*KEYS)}
    return (ROWS if layout.uses_rows else full, KEYS if layout.uses_keys else full), places


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


@pytest.mark.parametrize("function", fa4.__all__)
def test_arguments_of_cute_are_refused_by_name(function: str) -> None:
    refused = [name for name in CUTE.split() if name in inspect.signature(getattr(fa4, function)).parameters]
    assert refused
    for name in refused:
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


# ---------------------------------------------------------------- its name

FA4_NAME = "flash_attn.cute"


@pytest.mark.parametrize("imported", [False, True])
def test_the_name_of_flash_attention_4_is_there_only_where_it_is_asked_for(imported: bool) -> None:
    flash_attn_compat.patch()
    if imported:
        importlib.import_module("flash_attn")
    assert importlib.util.find_spec(FA4_NAME) is None
    flash_attn_compat.patch(interfaces=("fa4",))
    assert importlib.import_module(FA4_NAME).flash_attn_func is fa4.flash_attn_func
    assert importlib.import_module(f"{FA4_NAME}.interface").flash_attn_varlen_func is fa4.flash_attn_varlen_func
    assert sorted(importlib.metadata.packages_distributions()["flash_attn"]) == ["flash-attn", "flash-attn-4"]
    assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    flash_attn_compat.unpatch()
    flash_attn_compat.patch()
    assert importlib.util.find_spec(FA4_NAME) is None
    flash_attn_compat.unpatch()


@pytest.mark.parametrize("is_installed", [True, False])
def test_an_installed_flash_attention_4_stays_and_its_early_copy_gives_way(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn 2.8.3 has such a copy, and is no distribution flash-attn-4."""
    write_package(tmp_path, None, cute="answer = 4\n")
    if is_installed:
        info = tmp_path / "flash_attn_4-4.0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    flash_attn_compat.patch(interfaces=("fa4",) if is_installed else ())
    assert importlib.import_module(FA4_NAME).answer == 4
    flash_attn_compat.patch(interfaces=("fa4",))
    assert hasattr(importlib.import_module(FA4_NAME), "answer" if is_installed else "flash_attn_func")
    flash_attn_compat.unpatch()
