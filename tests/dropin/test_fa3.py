"""FlashAttention-3's name and conventions, where they are asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import fa3
from flash_attn_compat import flash_attn_interface as fa2

NAME = "flash_attn_interface"


def qkv(seqlen_q=5, seqlen_k=5):
    return torch.randn(2, seqlen_q, 4, 8), torch.randn(2, seqlen_k, 2, 8), torch.randn(2, seqlen_k, 2, 8)


def test_the_name_is_there_only_where_it_is_asked_for():
    flash_attn_compat.patch()
    assert importlib.util.find_spec(NAME) is None
    flash_attn_compat.patch(interfaces=("fa3",))
    assert importlib.import_module(NAME).flash_attn_func is fa3.flash_attn_func
    assert importlib.metadata.packages_distributions()[NAME] == ["flash-attn-3"]
    flash_attn_compat.unpatch()
    assert importlib.util.find_spec(NAME) is None


def test_a_module_of_that_name_stays(tmp_path, monkeypatch):
    (tmp_path / f"{NAME}.py").write_text("here = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with flash_attn_compat.patched(interfaces=("fa3",)):
        assert importlib.import_module(NAME).here
    del sys.modules[NAME]


@pytest.mark.parametrize("interfaces", [("fa5",), "fa3"])
def test_unknown_interfaces_are_refused(interfaces):
    with pytest.raises(ValueError, match="interfaces must be a sequence of names among fa3, fa4"):
        flash_attn_compat.patch(interfaces=interfaces)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 0), "softcap": 3.0}], ids=str)
def test_dense_packed_and_cached_calls_match_flash_attn_2(options):
    q, k, v = qkv()
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
    q, k, v = qkv(seqlen_q=5, seqlen_k=3)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[:, :, :2] == -torch.inf).all() and lse[:, :, 2:].isfinite().all() and not out[:, :2].any()
    q, k, v = qkv(seqlen_q=5, seqlen_k=0)
    assert (fa3.flash_attn_func(q, k, v, return_attn_probs=True)[1] == torch.inf).all()


def test_gradients_flow():
    inputs = [x.requires_grad_() for x in qkv()]
    right, ours = (torch.autograd.grad(fa.flash_attn_func(*inputs, causal=True).sum(), inputs) for fa in (fa2, fa3))
    torch.testing.assert_close(ours, right)


REFUSED = "qv q_descale k_descale v_descale attention_chunk seqused_q seqused_k cu_seqlens_q cu_seqlens_k_new "
REFUSED += "rotary_seqlens num_heads_q"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (function, name)
        for function in fa3.__all__
        for name, parameter in inspect.signature(getattr(fa3, function)).parameters.items()
        if name in REFUSED.split()
        and parameter.default is not parameter.empty
        and (function, name) not in {("flash_attn_with_kvcache", f"{x}_descale") for x in "kv"}  # of 8-bit caches
    ],
)
def test_unsupported_arguments_are_refused_by_name(function, name):
    parameters = inspect.signature(getattr(fa3, function)).parameters
    required = {key: torch.zeros(1) for key, parameter in parameters.items() if parameter.default is parameter.empty}
    given = 4 if name in ("attention_chunk", "num_heads_q") else torch.ones(1)
    with pytest.raises(NotImplementedError, match=f"^{name} of FlashAttention-3 is not served"):
        getattr(fa3, function)(**required, **{name: given})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"window_size": (2, 0), "softcap": 3.0}], ids=str)
def test_private_functions_match_flash_attn_2(packed, options):
    q, k, v = (t.flatten(0, 1) for t in qkv()) if packed else qkv()
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
    q, k, v = qkv(seqlen_q=5, seqlen_k=3)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    nothing = dict.fromkeys(list(inspect.signature(fa3._flash_attn_backward).parameters)[6:16])
    gradients = fa3._flash_attn_backward(torch.ones_like(out), q, k, v, out, lse, **nothing, causal=True)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", ["k_new", "seqused_k", "page_table", "leftpad_k", "rotary_cos", "q_descale"])
def test_the_private_forward_refuses_cache_arguments(name):
    names = list(inspect.signature(fa3._flash_attn_forward).parameters)[3:24]
    arguments = dict.fromkeys(names) | {name: torch.ones(1), "causal": False}
    with pytest.raises(NotImplementedError, match=f"^{name} of FlashAttention-3"):
        fa3._flash_attn_forward(*qkv(), **arguments)


def test_packed_sequences_without_their_longest_are_refused():
    starts = torch.tensor([0, 5, 10], dtype=torch.int32)
    names = list(inspect.signature(fa3._flash_attn_forward).parameters)[3:24]
    arguments = dict.fromkeys(names) | {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": False}
    with pytest.raises(ValueError, match=r"packed sequences need .* got max_seqlen_q=None"):
        fa3._flash_attn_forward(*(x.flatten(0, 1) for x in qkv()), **arguments)


def test_the_private_functions_stand_under_the_name():
    with flash_attn_compat.patched(interfaces=("fa3",)):
        module = importlib.import_module(NAME)
    assert module._flash_attn_forward is fa3._flash_attn_forward
    assert module._flash_attn_backward is fa3._flash_attn_backward
