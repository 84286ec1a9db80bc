"""Every function has flash-attn's arguments, by signatures.txt; the raw extension; Triton's functions; refusals."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash_attn_compat
from flash_attn_compat import (
    bert_padding,
    flash_attn_2_cuda,
    flash_attn_interface,
    flash_attn_triton,
    flash_attn_with_kvcache,
)
from flash_attn_compat import flash_attn_2_cuda as raw
from flash_attn_compat.flash_attn_triton import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from flash_attn_compat.layers.patch_embed import PatchEmbed
from flash_attn_compat.layers.rotary import RotaryEmbedding, apply_rotary_emb_qkv_
from flash_attn_compat.losses.cross_entropy import CrossEntropyLoss
from flash_attn_compat.modules.block import Block, StochasticDepth
from flash_attn_compat.modules.embedding import ParallelGPT2Embeddings
from flash_attn_compat.modules.mha import MHA
from flash_attn_compat.modules.mlp import FusedMLP
from flash_attn_compat.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn_compat.ops.triton.layer_norm import layer_norm_fn
from flash_attn_compat.ops.triton.linear import triton_dgrad_act, triton_linear_act
from flash_attn_compat.ops.triton.mlp import FusedDenseSqreluDense
from flash_attn_compat.ops.triton.rotary import apply_rotary
from flash_attn_compat.utils import benchmark, testing
from flash_attn_compat.utils.generation import GenerationMixin, InferenceParams
from tests.forms.inputs import ints, randn
from tests.forms.plain import attention, check_function, pairwise

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
    assert (
        spec.varargs is None
        and extensions().issuperset(spec.kwonlyargs)
        and len(spec.defaults or ()) == SIGNATURES[name].count("=")
    )


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


# ------------------------------------------------------------- what 2.8.4, the head of flash-attn's repository, changed

TABLE = torch.stack((ints(4, 0), ints(1, 3)))
RAW = ("fwd", "varlen_fwd", "bwd", "varlen_bwd")


@pytest.mark.parametrize("name", RAW)
def test_a_raw_function_given_a_generator_raises_flash_attns_words(name: str) -> None:
    function = getattr(flash_attn_2_cuda, name)
    arguments: dict[str, Any] = dict.fromkeys(inspect.signature(function).parameters)
    arguments["gen_"] = torch.Generator()
    with pytest.raises(RuntimeError, match="RNG `generator` argument is no longer supported and must be None"):
        function(**arguments)


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_an_int_cache_seqlens_is_the_length_of_each_sequence_of_q(appends: bool, paged: bool) -> None:
    """The cache has more rows, or pages, than q has sequences."""
    q, caches = randn(2, 1, 4, 16), randn(2, 5, 8, 2, 16)
    where = {"block_table": TABLE} if paged else {"cache_batch_idx": ints(4, 1)}
    new = dict(zip("kv", randn(2, 2, 1, 2, 16))) if appends else {}
    found, expected = (
        (flash_attn_with_kvcache(q, *mine, cache_seqlens=lengths, causal=True, **where, **new), mine)
        for mine, lengths in ((caches.clone(), 6), (caches.clone(), ints(6, 6)))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("as_int", [False, True])
def test_a_length_beyond_the_block_table_raises_before_anything_is_written(appends: bool, as_int: bool) -> None:
    """Two pages of 8 for each sequence: 16 slots, of which an append of one needs the last."""
    q, caches = randn(2, 1, 4, 16), randn(2, 5, 8, 2, 16)
    new = dict(zip("kv", randn(2, 2, 1, 2, 16))) if appends else {}
    longest = 16 if appends else 17
    lengths = longest if as_int else ints(3, longest)
    before = caches.clone()
    words = r"max\(seqlens_k\) \+ seqlen_knew \(= 17\) exceeds the capacity addressable by block_table"
    with pytest.raises(RuntimeError, match=words):
        flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=TABLE, **new)
    assert torch.equal(caches, before)


# ----------------------------------------------- flash_attn_triton: attention with a bias, which is added to the scores

B, H, D = 2, 3, 16


def plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False, scale: Any = None
) -> Tensor:
    """Causal from the first row and key on."""
    above = torch.full((q.shape[1], k.shape[1]), -torch.inf if causal else 0.0, dtype=torch.float64).triu(1)
    return attention(q, k, v, scale=scale, bias=above.to(q.dtype) if bias is None else bias + above.to(bias.dtype))


@pytest.mark.parametrize(
    ("dtype", "causal", "rows", "shape", "bias_dtype", "block"),
    pairwise(
        (torch.float32, torch.float16, torch.bfloat16), (False, True), (False, True),
        (None, (1, H), (B, 1), (B, H)), (None, torch.float32), (256, 3),
    ),
)  # fmt: skip
def test_the_bias_is_added_to_the_scores(
    dtype: torch.dtype, causal: bool, rows: bool, shape: Any, bias_dtype: Any, block: int, monkeypatch: Any
) -> None:
    """All gradients, the bias's too; a fp32 bias of half inputs is used as it is. Blocks that hold all and that cut."""
    monkeypatch.setattr(flash_attn_triton, "_ROWS", block)
    for seqlen_q, seqlen_k in ((7, 7), (4, 9), (9, 4), (1, 6)):
        q, k, v = (randn(B, n, H, D, seed=s, dtype=dtype) for s, n in enumerate((seqlen_q, seqlen_k, seqlen_k)))
        bias = None
        if shape is not None:
            bias = 3 * randn(*shape, seqlen_q if rows else 1, seqlen_k, seed=5, dtype=bias_dtype or dtype)
        check_function(
            lambda *given: flash_attn_func(*given, causal), lambda *given: plain(*given, causal), q, k, v, bias
        )


def test_a_large_fp32_bias_is_not_rounded_to_half() -> None:
    q, k, v = (torch.zeros(1, 4, 1, D, dtype=torch.float16) for _ in range(3))
    v[0, :, 0, 0] = torch.arange(4.0)
    bias = torch.tensor([4096.0, 4096.5, 4097.0, 4097.5]).view(1, 1, 1, 4)  # fp16 has steps of 4 there
    expected = (bias.flatten().double().softmax(-1) * torch.arange(4.0)).sum()
    torch.testing.assert_close(
        flash_attn_func(q, k, v, bias)[0, :, 0, 0].double(), expected.expand(4), rtol=1e-3, atol=0
    )


def test_packed_forms_take_q_k_and_v_from_their_places() -> None:
    q, k, v = (randn(B, 5, H, D, seed=s) for s in range(3))
    bias = randn(1, H, 1, 5)
    expected = flash_attn_func(q, k, v, bias, True, 0.3)
    torch.testing.assert_close(expected, plain(q, k, v, bias, True, 0.3), rtol=1e-5, atol=1e-6)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack((k, v), dim=2), bias, True, 0.3), expected)
    assert torch.equal(flash_attn_qkvpacked_func(torch.stack((q, k, v), dim=2), bias, True, 0.3), expected)


def test_autocast_rounds_nothing() -> None:
    q, k, v = (randn(B, 5, H, D, seed=s).requires_grad_() for s in range(3))
    expected = flash_attn_func(q, k, v)
    expected_grads = torch.autograd.grad(expected.sum(), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(q, k, v)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    for ours, right in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert torch.equal(ours, right)


# ---------------------------------------------------------------- refusals of the modules around attention

X, W = randn(2, 8), randn(6, 8)
LOGITS, LABELS = randn(12, 37), torch.arange(12)
MASK = torch.ones(2, 6, dtype=torch.bool)


def mha(given: dict[str, Any], **options: Any) -> Any:
    return MHA(64, 4, **options)(randn(2, 6, 64), **given)


def block(**options: Any) -> Any:
    linear = partial(nn.Linear, out_features=8)
    return Block(8, linear, linear, **options)(X, X)


def norm(**given: Any) -> Any:
    return layer_norm_fn(**{"x": randn(3, 24), "weight": torch.ones(24), "bias": None, **given})


def biased(**given: Any) -> Any:
    q, k, v = randn(2, 4, 3, 16), randn(2, 6, 3, 16), randn(2, 6, 3, 16)
    return flash_attn_triton.flash_attn_func(**{"q": q, "k": k, "v": v, **given})


def rotated(**given: Any) -> None:
    cos, sin = randn(9, 8).cos(), randn(9, 8).sin()
    arguments: dict[str, Any] = {"x": randn(2, 5, 4, 16), "cos": cos, "sin": sin, "inplace": True} | given
    kept = arguments["x"].clone()
    try:
        apply_rotary(**arguments)
    finally:
        assert torch.equal(arguments["x"], kept), "written to"


def too_long_for_its_cache() -> Any:
    cache = InferenceParams(max_seqlen=5, max_batch_size=2)
    return mha({"inference_params": cache}, causal=True, layer_idx=0)


REFUSED: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    AssertionError: [
        ("ALiBi code path requires flash_attn", lambda: mha({}, use_alibi=True)),
        ("requires flash_attn", lambda: mha({}, window_size=(2, 0))),
        ("divisible by num_heads_kv", lambda: mha({}, num_heads_kv=3)),
        ("key_padding_mask excludes", lambda: mha({"key_padding_mask": MASK}, use_flash_attn=True)),
        ("for cross-attention", lambda: mha({"x_kv": randn(2, 6, 64)})),
        ("does not fit into the cache", too_long_for_its_cache),
        ("fused_dropout_add_ln needs", lambda: block(norm_cls=nn.Identity, fused_dropout_add_ln=True)),
        ("only compatible with prenorm", lambda: block(prenorm=False, residual_in_fp32=True)),
        ("residual is for prenorm", lambda: block(prenorm=False)),
        (r"Input image height \(4\) doesn't match model \(8\)", lambda: PatchEmbed(8, 4, 3, 6)(randn(1, 3, 4, 8))),
        (r"Input image width \(12\) doesn't match model \(8\)", lambda: PatchEmbed(8, 4, 3, 6)(randn(1, 3, 8, 12))),
        ("process_group is required", lambda: ParallelGPT2Embeddings(6, 11, 9, None)),  # type: ignore[arg-type]
        (r"residual has shape \(2, 24\)", lambda: norm(residual=randn(2, 24))),
        (r"weight has shape \(23,\)", lambda: norm(weight=torch.ones(23))),
        (r"rowscale has shape \(2,\)", lambda: norm(rowscale=torch.ones(2))),
        ("rowscale is not supported with parallel", lambda: norm(x1=randn(3, 24), rowscale=torch.ones(3))),
        ("'tanh'", lambda: triton_linear_act(X, W, activation="tanh")),
        ("weight has dtype", lambda: triton_linear_act(X.half(), W)),
        ("bias has dtype", lambda: triton_linear_act(X, W, randn(6).half())),
        ("expected 8 in the last axis", lambda: triton_linear_act(X[:, :7], W)),
        ("act_input is required", lambda: triton_dgrad_act(X[:, :6], W, "gelu")),
        ("without bias", lambda: FusedDenseSqreluDense(8, bias1=False)),
        ("at least 2 dimensions", lambda: bert_padding.IndexFirstAxis.apply(torch.zeros(4), torch.tensor([0]))),
        ("at least 2 dimensions", lambda: bert_padding.index_first_axis_residual(torch.zeros(4), torch.tensor([0]))),
        ("values has shape", lambda: bert_padding.IndexPutFirstAxis.apply(torch.zeros(4), torch.tensor([0]), 4)),
        ("rotary_dim must be <= headdim", lambda: rotated(x=randn(2, 5, 4, 8))),
        ("seqlen_ro must be >= seqlen", lambda: rotated(x=randn(2, 10, 4, 16))),
        ("sin has shape", lambda: rotated(sin=randn(9, 4))),
        ("seqlen_offsets", lambda: rotated(seqlen_offsets=5)),
        ("seqlen_offsets", lambda: rotated(seqlen_offsets=-1)),
        ("seqlen_offsets has shape", lambda: rotated(seqlen_offsets=torch.zeros(3, dtype=torch.int32))),
        ("seqlen_offsets has dtype", lambda: rotated(seqlen_offsets=torch.zeros(2))),
        ("If cu_seqlens is passed in, then max_seqlen must be", lambda: rotated(cu_seqlens=torch.tensor([0, 3]))),
        (r"expected \(total, nheads, headdim", lambda: rotated(cu_seqlens=torch.tensor([0, 3]), max_seqlen=3)),
        ("num_heads_q must be passed", lambda: apply_rotary_emb_qkv_(randn(2, 5, 8, 16), *randn(2, 9, 8))),
        (
            r"nheads_q \+ 2 nheads_k",
            lambda: apply_rotary_emb_qkv_(randn(2, 5, 8, 16), *randn(2, 9, 8), num_heads_q=3),
        ),
        (r"labels has shape \(11,\)", lambda: cross_entropy_loss(LOGITS, LABELS[1:])),
        (r"expected \(n_rows, vocab_size\)", lambda: cross_entropy_loss(LOGITS[None], LABELS)),
        ("logit_scale must be positive", lambda: cross_entropy_loss(LOGITS, LABELS, logit_scale=0.0)),
        ("precomputed_lse has shape", lambda: cross_entropy_loss(LOGITS, LABELS, LABELS[1:].float())),
        ("k has shape", lambda: biased(k=randn(2, 6, 1, 16))),
        ("v has shape", lambda: biased(v=randn(2, 5, 3, 16))),
        ("same type", lambda: biased(k=randn(2, 6, 3, 16).half())),
        ("bias has dtype", lambda: biased(bias=randn(1, 3, 1, 6).double())),
        ("'half'", lambda: testing.generate_random_padding_mask(4, 2, "cpu", "half")),
    ],
    RuntimeError: [
        ("bias has shape", lambda: biased(bias=randn(1, 3, 4, 5))),
        ("bias has shape", lambda: biased(bias=randn(1, 2, 1, 6))),
        ("bias has shape", lambda: biased(bias=randn(3, 4, 6))),
        (
            r"Grad shape \(3,\) does not match output shape \(2, 8\)",
            lambda: benchmark.benchmark_backward(torch.sin, X.clone().requires_grad_(), grad=torch.ones(3)),
        ),
    ],
    ValueError: [
        ("p must lie", lambda: StochasticDepth(1.5, "row")),
        ("mode must be", lambda: StochasticDepth(0.5, "column")),
        (r"attention_mask has shape \(2, 6\)", lambda: bert_padding.unpad_input(randn(2, 5, 2), MASK)),
        (
            "add up to 7",
            lambda: bert_padding.unpad_input_for_concatenated_sequences(randn(1, 3, 2), torch.tensor([[4, 3, 0]])),
        ),
        ("pass max_seqlen", lambda: RotaryEmbedding(8)(randn(2, 1, 3, 4, 8), seqlen_offset=torch.tensor([4, 1]))),
    ],
    NotImplementedError: [
        ("'swish'", lambda: FusedMLP(4, activation="swish")),
        ("median", lambda: CrossEntropyLoss(reduction="median")),
        ("allocate_inference_cache", lambda: GenerationMixin().allocate_inference_cache(1, 1)),
    ],
}


@pytest.mark.parametrize(
    ("error", "told", "call"), [(error, *case) for error, cases in REFUSED.items() for case in cases]
)
def test_mismatched_arguments_are_refused_by_name(error: type[Exception], told: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=told):
        call()


def test_a_directory_without_weights_is_named(tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    from flash_attn_compat.utils.pretrained import state_dict_from_pretrained

    with pytest.raises(OSError, match="was not found"):
        state_dict_from_pretrained(tmp_path)
