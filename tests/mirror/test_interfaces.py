"""Every function has flash-attn's arguments, by signatures.txt; the raw extension, and the private functions."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import flash_attn_compat
from flash_attn_compat import flash_attn_2_cuda as raw
from flash_attn_compat import (
    flash_attn_func,
    flash_attn_interface,
    flash_attn_with_kvcache,
)
from flash_attn_compat.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    maybe_contiguous,
)
from tests.forms.inputs import cumulative, qkv, randn
from tests.forms.plain import pairwise
from tests.forms.support import GENERAL, close, on_backend, on_general_backends
from tests.kernels import fused_on_cpu
from verify import oracle

LINES = [line for line in (Path(__file__).parent / "signatures.txt").read_text().splitlines() if line[0] != "#"]
SIGNATURES = dict(line[:-1].split("(", 1) for line in LINES if "::" not in line)
SCHEMAS = [line for line in LINES if "::" in line]
PRIVATE = [name for name in SIGNATURES if ".flash_attn_interface._flash" in name and "2_6" not in name]


def found(name: str) -> object:
    module, _, attribute = name.removesuffix(".forward").rpartition(".")
    value: object = getattr(importlib.import_module(module), attribute)
    return value.forward if name.endswith(".forward") else value  # type: ignore[attr-defined]


@functools.cache
def extensions() -> set[str]:
    """Keywords that a function documents as ours: at the end, without effect unless given."""
    docs = "\n".join(inspect.getdoc(found(name)) or "" for name in SIGNATURES)
    lines = re.findall(r"^ *([a-z_, ]+) \[not in flash-attn", docs, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_match_flash_attn(name: str) -> None:
    parameters = list(inspect.signature(found(name)).parameters.values())  # type: ignore[arg-type]
    ours = [p for p in parameters if p.kind == inspect.Parameter.KEYWORD_ONLY]
    assert all(p.name in extensions() and p.default is None for p in ours)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters if p not in ours]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"


@pytest.mark.parametrize("name", PRIVATE)
def test_getfullargspec_finds_the_arguments_as_ring_attention_looks_for_them(name: str) -> None:
    function = found(name)
    spec = inspect.getfullargspec(function if inspect.isfunction(function) else function._init_fn)  # type: ignore[attr-defined]
    assert spec.args == [part.split("=")[0] for part in SIGNATURES[name].split(", ")]
    assert spec.varargs is None and extensions().issuperset(spec.kwonlyargs)
    assert len(spec.defaults or ()) == SIGNATURES[name].count("=")


def test_the_package_has_the_interfaces_functions() -> None:
    for name in (name.rpartition(".")[2] for name in SIGNATURES if ".flash_attn_interface.flash_attn" in name):
        assert getattr(flash_attn_compat, name) is getattr(flash_attn_interface, name)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_operators_have_flash_attns_schema(schema: str) -> None:
    with flash_attn_compat.patched():
        importlib.import_module("flash_attn")
        operator = getattr(torch.ops.flash_attn, schema.partition("::")[2].partition("(")[0])
    assert str(operator.default._schema) == schema


# ------------------------------------------- the raw extension by position: the private functions, in place where asked

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
def test_a_backward_is_the_private_one_and_writes_given_gradients(
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
    k_cache, v_cache = torch.zeros(2, 16, 2, 16), torch.zeros(2, 16, 2, 16)
    with pytest.raises(RuntimeError, match=message):
        lengths = torch.zeros(2, dtype=torch.int32)
        by_position("fwd_kvcache", DENSE | NEW | dict(kcache=k_cache, vcache=v_cache, seqlens_k=lengths, out=out))
    assert k_cache.abs().sum() == 0 and v_cache.abs().sum() == 0


@pytest.mark.parametrize("name", ["fwd", "varlen_fwd", "bwd", "varlen_bwd"])
def test_a_raw_function_given_a_generator_raises_flash_attns_words(name: str) -> None:
    function = getattr(raw, name)
    arguments: dict[str, Any] = dict.fromkeys(inspect.signature(function).parameters)
    arguments["gen_"] = torch.Generator()
    with pytest.raises(RuntimeError, match="RNG `generator` argument is no longer supported and must be None"):
        function(**arguments)


# ------------------------------------------------------------------------------------------------ the private functions


def test_maybe_contiguous_copies_only_a_strided_last_dimension() -> None:
    x = randn(4, 6)
    assert maybe_contiguous(x) is x and maybe_contiguous(x[:, :3]).data_ptr() == x.data_ptr()
    assert maybe_contiguous(x.t()).is_contiguous() and maybe_contiguous(None) is None


def test_the_key_block_is_that_of_the_common_gpus() -> None:
    sizes = [_get_block_size_n(torch.device("cpu"), d, p, False) for d in (32, 64, 96, 128, 256) for p in (False, True)]
    assert sizes == [128, 128, 128, 64, 64, 64, 64, 32, 64, 64]
    with pytest.raises(AssertionError):
        _get_block_size_n(torch.device("cpu"), 257, False, False)


RULES: dict[str, Any] = dict(
    dropout_p=0.0, softmax_scale=0.25, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None,
)  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _flash_attn_forward(q, k, v, **RULES | {"return_softmax": False} | changes)


def backward(*tensors: Tensor | None, **changes: Any) -> Tensor:
    """Of dout, q, k, v, out, softmax_lse, dq, dk, dv."""
    return _flash_attn_backward(*tensors, **RULES | {"deterministic": False} | changes)


@on_general_backends
def test_the_forward_returns_out_lse_an_empty_s_dmask_and_a_random_state(backend: str) -> None:
    q, k, v = qkv(sq=5, sk=9)
    out, lse, s_dmask, rng_state = on_backend(backend, forward, q, k, v, causal=True)
    right, right_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    close(out, right)
    close(lse, right_lse)
    assert s_dmask.shape == (0,) and s_dmask.dtype == q.dtype
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
    with pytest.raises(RuntimeError, match=r"return_softmax is only supported when p_dropout > 0.0"):
        on_backend(backend, forward, q, k, v, return_softmax=True)


def empty_grads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.full_like(x, torch.nan) for x in (q, k, v))


MASKS = {
    "plain": {},
    "softcap": dict(softcap=2.0),
    "alibi": dict(alibi_slopes=torch.tensor([0.3, 0.1, 0.2, 0.0])),
    "causal": dict(causal=True),
    "causal_alibi": dict(causal=True, alibi_slopes=torch.tensor([0.3, 0.1, 0.2, 0.0])),
}


def as_half(x: Tensor) -> Tensor:
    return x.half()


def without_memory(x: Tensor) -> Tensor:
    """As a sharded parameter between its uses."""
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lse", as_half, "softmax_lse must"),
        ("lse", torch.Tensor.double, "softmax_lse must"),
        ("lse", lambda x: x.to("meta"), "softmax_lse must"),
        ("dk", as_half, "dk must have the same dtype as q"),
        ("dv", without_memory, "dv reaches beyond its memory"),
        ("dout", torch.Tensor.to_sparse, "dout must be a dense tensor, got layout torch.sparse_coo"),
    ],
)
def test_unreadable_layouts_are_refused_before_any_write(name: str, change: Any, message: str) -> None:
    q, k, v = qkv()
    out, lse, _, _ = forward(q, k, v)
    backward(q, q, k, v, out, lse, *empty_grads(q, k, v))  # whose like is known from then on
    given = dict(dout=q, lse=lse, **{f"d{name}": grad for name, grad in zip("qkv", empty_grads(q, k, v))})
    given[name] = change(given[name])
    with pytest.raises(RuntimeError, match=message):
        backward(given.pop("dout"), q, k, v, out, *given.values())
    assert all(given[name].isnan().all() for name in ("dq", "dk", "dv") if given[name].untyped_storage().nbytes())


@on_general_backends
@pytest.mark.parametrize("mask", MASKS)
def test_a_shard_of_the_keys_gives_its_exact_share_through_the_strides_it_is_given(backend: str, mask: str) -> None:
    q, k, v = qkv(sq=9, sk=20, h=4, hk=2)
    dout, kwargs = randn(*q.shape, seed=5), MASKS[mask]
    out, lse, _, _ = forward(q, k, v, **kwargs)
    wide_dq, dkv = torch.full((2, 18, 4, 16), 7.0), torch.full((2, 20, 3, 2, 16), 7.0)
    total = torch.zeros_like(q)
    # Where positions count, a shard of some keys is another problem.
    for keys in (slice(0, 7), slice(7, 20)) if mask in ("plain", "softcap") else (slice(0, 20),):
        grads = wide_dq[:, 9:], dkv[:, keys, 0], dkv[:, keys, 1]
        on_backend(backend, backward, dout, q, k[:, keys], v[:, keys], out, lse, *grads, **kwargs)
        total += grads[0]
    right = oracle.answer("flash_attn_func", dict(q=q, k=k, v=v, **kwargs), dout)
    for name, ours in (("q", total), ("k", dkv[:, :, 0]), ("v", dkv[:, :, 1])):
        close(ours, right.grads[name], right.magnitude(name))
    assert (wide_dq[:, :9] == 7).all() and (dkv[:, :, 2] == 7).all()


@on_general_backends
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_gradient_that_is_none_is_left_out(backend: str, missing: int) -> None:
    q, k, v = qkv()
    dout = randn(*q.shape, seed=5)
    out, lse, _, _ = forward(q, k, v)
    whole, partial = empty_grads(q, k, v), list(empty_grads(q, k, v))
    partial[missing] = None
    for grads in (whole, partial):
        on_backend(backend, backward, dout, q, k, v, out, lse, *grads)
    assert all(torch.equal(found, right) for found, right in zip(partial, whole) if found is not None)


@on_general_backends
def test_a_row_with_plus_inf_lse_gets_and_sends_nothing(backend: str) -> None:
    q, k, v = qkv()
    out, lse, _, _ = forward(q, k, v)
    lse, out = lse.clone(), out.clone()
    lse[:, :, 2], out[:, 2] = torch.inf, 0
    dout = torch.zeros_like(q)
    dout[:, 2] = 1
    grads = empty_grads(q, k, v)
    on_backend(backend, backward, dout, q, k, v, out, lse, *grads)
    assert not any(grad.any() for grad in grads)


@on_general_backends
def test_rng_state_reproduces_the_dropout_mask_and_softmax_d_is_of_kept_scores(backend: str) -> None:
    q, k, v = qkv(sq=130, sk=9)
    dout = randn(*q.shape, seed=5)
    torch.manual_seed(3)
    out, lse, s_dmask, rng_state = on_backend(backend, forward, q, k, v, dropout_p=0.4, return_softmax=True)
    torch.manual_seed(99)
    grads, options = empty_grads(q, k, v), dict(dropout_p=0.4, rng_state=rng_state)
    softmax_d = on_backend(backend, backward, dout, q, k, v, out, lse, *grads, **options)
    right = oracle.answer("flash_attn_func", dict(q=q, k=k, v=v, dropout_p=0.4), dout, keep=s_dmask >= 0)
    for name, ours in zip("qkv", grads, strict=True):
        close(ours, right.grads[name], right.magnitude(name))
    assert softmax_d.shape == (2, 2, 256) and softmax_d.dtype == torch.float32
    close(softmax_d[:, :, :130], (dout * out).sum(-1).transpose(1, 2) * (1 - 0.4), 16)


@on_general_backends
@pytest.mark.parametrize("causal", [False, True])
def test_the_varlen_backward_writes_each_sequences_gradients_and_zeros_outside(backend: str, causal: bool) -> None:
    """Of two sequences, and one token of q and one of k outside of both."""
    tensors = dict(q=randn(9, 4, 16, seed=1), k=randn(12, 2, 16, seed=2), v=randn(12, 2, 16, seed=3))
    lengths = dict(cu_seqlens_q=cumulative(3, 5), cu_seqlens_k=cumulative(4, 7), max_seqlen_q=5, max_seqlen_k=7)
    call, rules = tensors | lengths, RULES | {"causal": causal}
    out, lse, _, _ = _flash_attn_varlen_forward(**call, **rules)
    dout, grads = randn(9, 4, 16, seed=4), dict(zip(("dq", "dk", "dv"), empty_grads(*tensors.values())))
    given = dict(dout=dout, out=out, softmax_lse=lse, deterministic=False) | grads
    softmax_d = on_backend(backend, _flash_attn_varlen_backward, **call, **rules, **given)
    right = oracle.answer("flash_attn_varlen_func", call | dict(causal=causal), dout)
    for name in "qkv":
        close(grads[f"d{name}"], right.grads[name], right.magnitude(name))
    # Each sequence starts 128 columns later.
    products = (dout * out).sum(-1).t()
    assert softmax_d.shape == (4, 9 + 128 * 2) and softmax_d.dtype == torch.float32
    close(softmax_d[:, :3], products[:, :3], 16)
    close(softmax_d[:, 3 + 128 : 8 + 128], products[:, 3:8], 16)


@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
def test_softmax_d_is_0_outside_of_sequences(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels leave tokens outside of all sequences unwritten."""
    if backend == "fused":
        fused_on_cpu.emulate(monkeypatch)
    starts = cumulative(3, 0, 130, 0)
    q, k, v, dout = randn(4, 140, 2, 16).half()
    call = (starts, starts, 130, 130, 0.0, 0.25, True, -1, -1, 0.0, None)
    out, lse, *_ = on_backend(backend, _flash_attn_varlen_forward, q, k, v, *call)
    dout[133:], out[133:] = torch.nan, 1.0
    given = dout, q, k, v, out, lse, None, None, None, *call, False
    softmax_d = on_backend(backend, _flash_attn_varlen_backward, *given)
    products, expected = (dout.float() * out).sum(-1).t(), torch.zeros(2, 140 + 4 * 128)
    expected[:, :3], expected[:, 3 + 2 * 128 : 133 + 2 * 128] = products[:, :3], products[:, 3:133]
    close(softmax_d, expected, 16)


def test_softmax_d_is_fp32_for_any_type_of_dropout_p() -> None:
    q, k, v = qkv()
    for dropout_p in (0.5, torch.tensor([0.5], dtype=torch.float64)):
        out, lse, _, rng_state = forward(q, k, v, dropout_p=dropout_p)
        softmax_d = backward(out, q, k, v, out, lse, None, None, None, dropout_p=dropout_p, rng_state=rng_state)
        assert softmax_d.dtype == torch.float32
        close(softmax_d[:, :, :7], (out * out).sum(-1).transpose(1, 2) / 2, 16)


def test_the_autograd_functions_take_the_arguments_of_flash_attn() -> None:
    q, k, v = qkv()
    cu = cumulative(7, 7)
    options = (0.0, None, True, (-1, -1), 0.0, None, False, False)
    right = flash_attn_func(q, k, v, causal=True)
    for packed in (False, True):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v)) if packed else (q, k, v)
        dim = 1 if packed else 2
        kv, all_in_one = torch.stack([k, v], dim), torch.stack([q, k, v], dim)
        name, both, one, more = ("Varlen", (cu, cu, 7, 7), (cu, 7), (None,)) if packed else ("", (), (), ())
        functions = [
            getattr(flash_attn_interface, f"FlashAttn{name}{kind}Func") for kind in ("", "KVPacked", "QKVPacked")
        ]
        close(functions[0].apply(q, k, v, *both, *options, *more, True), right.view_as(q))
        close(functions[1].apply(q, kv, *both, *options, True), right.view_as(q))
        close(functions[2].apply(all_in_one, *one, *options, True), right.view_as(q))


LENGTHS = dict(cu_seqlens_q=cumulative(4, 6), cu_seqlens_k=cumulative(11, 7), max_seqlen_q=6, max_seqlen_k=11)
FORMS: dict[str, dict[str, Any]] = {"": dict(zip("qkv", qkv(sq=5, sk=9, h=4, hk=2)))}
FORMS["_varlen"] = {name: x.flatten(0, 1) for name, x in FORMS[""].items()} | LENGTHS


def recorded(values: dict[str, Any]) -> dict[str, Any]:
    """The same with tensors that ask for gradients."""
    wants = {name: isinstance(x, Tensor) and x.is_floating_point() for name, x in values.items()}
    return {name: x.detach().requires_grad_() if wants[name] else x for name, x in values.items()}


@pytest.mark.parametrize(("backend", "form", "mask"), pairwise((*GENERAL, "fused"), FORMS, ("plain", "causal_alibi")))
def test_nothing_is_recorded_and_gradients_through_a_forward_are_flash_attns_error(
    backend: str, form: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callers' gradients stay leaves, of a compiled backward too."""
    if backend == "fused":
        fused_on_cpu.emulate(monkeypatch)
    forward, backward = (getattr(flash_attn_interface, f"_flash_attn{form}_{name}") for name in ("forward", "backward"))
    dtype, saved = torch.float16 if backend == "fused" else torch.float32, []
    values: dict[str, Any] = FORMS[form] | {name: FORMS[form][name].to(dtype) for name in "qkv"} | RULES | MASKS[mask]

    def run(values: dict[str, Any], backward: Any = backward) -> tuple[Tensor, ...]:
        out, lse, *rest = on_backend(backend, forward, **values, return_softmax=False)
        grads = dict(zip(("dq", "dk", "dv"), empty_grads(*(values[name].detach() for name in "qkv"))))
        upstream = recorded({"dout": out.detach().cos(), "out": out, "softmax_lse": lse, "deterministic": False})
        return out, lse, rest[0], on_backend(backend, backward, **values, **upstream, **grads), *grads.values()

    right = run(values)
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        answers = [run(recorded(values))]
        if backend == "reference":  # a graph calls the same operator whoever serves it
            answers.append(run(recorded(values), torch.compile(backward, backend="eager")))
    for found in answers:
        close(found[3], right[3], 16)  # softmax_d: kernels and operators add up in another order
        alike = [index for index in range(len(right)) if index != 3]
        assert all(torch.equal(found[index], right[index]) for index in alike)
        assert not any(x.requires_grad for x in found[3:])
        for result in found[:2]:
            with pytest.raises(RuntimeError, match=r"[Tt]rying to backward through .* no autograd formula was regist"):
                result.sum().backward()
    assert not saved
