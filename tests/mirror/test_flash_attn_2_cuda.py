"""The raw extension's functions by position: they are the private functions, in place where asked."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_2_cuda as raw
from flash_attn_compat import flash_attn_interface, flash_attn_with_kvcache
from tests.forms.inputs import randn

Q, K, V = randn(2, 5, 4, 16), randn(2, 7, 2, 16, seed=1), randn(2, 7, 2, 16, seed=2)
NEW = {"k": randn(2, 5, 2, 16, seed=6), "v": randn(2, 5, 2, 16, seed=7)}
OPTIONS: dict[str, Any] = dict(
    dropout_p=0.0, softmax_scale=0.2, causal=True, window_size_left=4, window_size_right=0, softcap=0.0,
    alibi_slopes=torch.linspace(0.1, 0.4, 4),
)  # fmt: skip
DENSE = dict(q=Q, k=K, v=V, **OPTIONS)
PACKED = DENSE | dict(
    q=Q.flatten(0, 1), k=K.flatten(0, 1), v=V.flatten(0, 1), cu_seqlens_q=torch.tensor([0, 3, 9], dtype=torch.int32),
    cu_seqlens_k=torch.tensor([0, 7, 14], dtype=torch.int32), max_seqlen_q=7, max_seqlen_k=7,
)  # fmt: skip
FORWARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("fwd", DENSE | {"return_softmax": False}),
    "dropout": ("fwd", DENSE | {"dropout_p": 0.3, "return_softmax": True}),
    "packed": ("varlen_fwd", PACKED | {"num_splits": 2}),
    "keys in use": ("varlen_fwd", PACKED | {
        "seqused_k": torch.tensor([6, 4], dtype=torch.int32), "leftpad_k": torch.tensor([2, 0], dtype=torch.int32),
        "alibi_slopes": None, "window_size_left": -1, "zero_tensors": True,
    }),
}  # fmt: skip


def named(parameter: str) -> str:
    """Return an argument's name in the private functions."""
    name = {"p_dropout": "dropout_p", "is_causal": "causal", "is_rotary_interleaved": "rotary_interleaved"}
    return name.get(parameter, parameter.rstrip("_"))


def by_position(name: str, values: dict[str, Any]) -> list[Tensor]:
    parameters = [p for p in inspect.signature(getattr(raw, name)).parameters.values() if p.kind != p.KEYWORD_ONLY]
    defaults = {"return_softmax": False, "zero_tensors": False, "deterministic": False, "num_splits": 0}
    found = getattr(raw, name)(*(values.get(named(p.name), defaults.get(p.name)) for p in parameters))
    assert isinstance(found, list)
    return found


def private(name: str, values: dict[str, Any]) -> Any:
    kind = name.replace("fwd", "forward").replace("bwd", "backward")
    return getattr(flash_attn_interface, f"_flash_attn_{kind}")(**values)


def same(actual: Any, expected: Any) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("case", FORWARDS)
def test_a_forward_is_the_private_one_and_writes_the_out_it_is_given(case: str) -> None:
    name, values = FORWARDS[case]
    out = torch.zeros_like(values["q"].transpose(-3, -2)).transpose(-3, -2)
    torch.manual_seed(0)
    expected = private(name, values)
    for given in ({}, {"out": out}):
        torch.manual_seed(0)
        found = by_position(name, values | given)
        same(found[:3], expected[:3])
        assert not given or found[0] is out


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("name", "values"), [("bwd", DENSE), ("varlen_bwd", PACKED)])
def test_a_backward_is_the_private_one_and_writes_the_gradients_it_is_given(
    name: str, values: dict[str, Any], given: bool
) -> None:
    forward = values | ({"return_softmax": False} if name == "bwd" else {})
    out, lse, _, rng_state = private(name.replace("bwd", "fwd"), forward)
    values = values | dict(dout=randn(*out.shape, seed=5), out=out, softmax_lse=lse, rng_state=rng_state)
    expected = {f"d{name}": torch.empty_like(values[name]) for name in "qkv"}
    softmax_d = private(name, values | {"deterministic": False} | expected)
    packed = torch.zeros(*values["k"].shape[:-2], 2, *values["k"].shape[-2:])
    dk, dv = packed.unbind(-3)
    targets = {"dq": torch.empty_like(values["q"]), "dk": dk, "dv": dv} if given else {}
    found = by_position(name, values | targets)
    same(found, [*expected.values(), softmax_d])
    assert all(a is b for a, b in zip(found, targets.values()))


@pytest.mark.parametrize("preallocated", [False, True])
def test_fwd_kvcache_appends_and_attends(preallocated: bool) -> None:
    caches = [{"k_cache": randn(2, 16, 2, 16, seed=8), "v_cache": randn(2, 16, 2, 16, seed=9)} for _ in range(2)]
    rules = {"softmax_scale": 0.2, "causal": True, "rotary_interleaved": False, "num_splits": 0, "softcap": 0.0}
    values = NEW | rules | {
        "q": Q, "rotary_cos": torch.rand(16, 8), "rotary_sin": torch.rand(16, 8),
        "alibi_slopes": OPTIONS["alibi_slopes"],
    }  # fmt: skip
    lengths, out = torch.tensor([3, 6], dtype=torch.int32), torch.empty_like(Q) if preallocated else None
    expected = flash_attn_with_kvcache(**values, **caches[0], cache_seqlens=lengths, return_softmax_lse=True)
    of_raw = {"kcache": caches[1]["k_cache"], "vcache": caches[1]["v_cache"], "seqlens_k": lengths, "out": out}
    found = by_position("fwd_kvcache", values | of_raw | {"window_size_left": -1, "window_size_right": -1})
    same(found, expected)
    same(caches[0].values(), caches[1].values())
    assert out is None or found[0] is out


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(2, 5, 4, 17), "out must have shape"),
        (torch.empty(2, 5, 4, 16, dtype=torch.float16), "Output must have the same dtype"),
    ],
)
def test_an_out_that_does_not_fit_is_refused_before_a_cache_is_touched(out: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        by_position("fwd", DENSE | {"out": out})
    with pytest.raises(RuntimeError, match="generator"):
        by_position("fwd", DENSE | {"gen": torch.Generator()})
    k_cache, v_cache = torch.zeros(2, 16, 2, 16), torch.zeros(2, 16, 2, 16)
    with pytest.raises(RuntimeError, match=message):
        lengths = torch.zeros(2, dtype=torch.int32)
        by_position("fwd_kvcache", DENSE | NEW | dict(kcache=k_cache, vcache=v_cache, seqlens_k=lengths, out=out))
    assert k_cache.abs().sum() == 0 and v_cache.abs().sum() == 0
