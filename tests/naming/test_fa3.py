"""FlashAttention-3's name and conventions, where they are asked for."""

from __future__ import annotations

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


@pytest.mark.parametrize("interfaces", [("fa4",), "fa3"])
def test_interfaces_that_nobody_knows_are_refused(interfaces):
    with pytest.raises(ValueError, match="interfaces must be a sequence of names among fa3"):
        flash_attn_compat.patch(interfaces=interfaces)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 0), "softcap": 3.0}], ids=str)
def test_dense_packed_and_cached_calls_are_those_of_flash_attn_2(options):
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
        if name in REFUSED.split() and parameter.default is not parameter.empty
    ],
)
def test_what_is_not_served_is_refused_by_its_name(function, name):
    parameters = inspect.signature(getattr(fa3, function)).parameters
    required = {key: torch.zeros(1) for key, parameter in parameters.items() if parameter.default is parameter.empty}
    given = 4 if name in ("attention_chunk", "num_heads_q") else torch.ones(1)
    with pytest.raises(NotImplementedError, match=f"^{name} of FlashAttention-3 is not served"):
        getattr(fa3, function)(**required, **{name: given})
