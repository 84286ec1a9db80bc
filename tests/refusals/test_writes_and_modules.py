"""No call writes to memory that overlaps itself; mismatched arguments of the modules around attention are named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_compat import (
    bert_padding,
    fa3,
    flash_attn_2_cuda,
    flash_attn_triton,
    flash_attn_with_kvcache,
)
from flash_attn_compat.core.inputs import CacheInputs, Options, PackedInputs
from flash_attn_compat.core.overlap import overlaps_itself, strides_overlap
from flash_attn_compat.dispatch import kvcache, raw
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_forward
from flash_attn_compat.layers.patch_embed import PatchEmbed
from flash_attn_compat.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
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
from tests.forms.inputs import ORDINARY, OVERLAPPING, copied, cumulative, ints, randn
from tests.forms.support import Serve, close

# ---------------------------------------------------------------- which memory overlaps itself


def test_small_strides_overlap_where_two_elements_have_one_offset() -> None:
    for shape in itertools.product((1, 2, 3, 4), repeat=3):
        for strides in itertools.product((0, 1, 2, 3, 5, 6), repeat=3):
            steps = [range(0, size * stride, stride) if stride else [0] * size for size, stride in zip(shape, strides)]
            offsets = [sum(where) for where in itertools.product(*steps)]
            assert strides_overlap(shape, strides) == (len(set(offsets)) < len(offsets)), (shape, strides)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_layouts_do_not_overlap(name: str) -> None:
    assert not overlaps_itself(ORDINARY[name]())


@pytest.mark.parametrize("name", OVERLAPPING)
def test_views_that_share_addresses_overlap(name: str) -> None:
    x = torch.empty(1000)[:192].view(2, 6, 2, 8)
    assert overlaps_itself(OVERLAPPING[name](x)) and not overlaps_itself(x)


def test_strides_without_order_over_much_memory_count_as_overlapping() -> None:
    assert strides_overlap((2**20, 2**20), (2, 2**20 - 1))


# ---------------------------------------------------------------- what a call writes to


def check_refused(name: str, call: Callable[[], object], *untouched: Tensor) -> None:
    """Assert that the error names the argument, its shape and its strides, and that nothing is written."""
    before = [x.clone() for x in untouched]
    for _ in range(2):  # a refusal is never prepared
        with pytest.raises(RuntimeError, match=rf"^{name} must not overlap itself.* shape \(.* strides \("):
            call()
    assert all(map(torch.equal, untouched, before))


@pytest.mark.parametrize("name", OVERLAPPING)
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize("backend", ["sdpa", "fused"])
def test_an_append_to_an_overlapping_cache_is_refused(backend: str, which: str, name: str, serve: Serve) -> None:
    caches = {cache: randn(2, 6, 2, 8, seed=1, dtype=torch.float16) for cache in ("k_cache", "v_cache")}
    caches[which] = OVERLAPPING[name](randn(1000, seed=2, dtype=torch.float16)[:192].view(2, 6, 2, 8))
    q = randn(2, 1, 2, 8, dtype=torch.float16)
    with serve(backend):
        call = lambda length: flash_attn_with_kvcache(q, **caches, k=q, v=q, cache_seqlens=length)  # noqa: E731
        check_refused(which, lambda: call(ints(2, 3)), *caches.values())
        check_refused(which, lambda: call(2), *caches.values())
        none = q[:, :0]
        read = flash_attn_with_kvcache(q, **caches, k=none, v=none, cache_seqlens=ints(2, 3))
        copies = {cache: copied(x) for cache, x in caches.items()}
        close(read, flash_attn_with_kvcache(q, **copies, cache_seqlens=ints(2, 3)), 3.0)


@pytest.mark.parametrize("layout", ["pages", "chosen rows"])
def test_an_append_to_overlapping_pages_or_chosen_rows_is_refused(layout: str) -> None:
    q, k = randn(2, 1, 2, 8), randn(1, 6, 2, 8).expand(3, 6, 2, 8)
    where = {"block_table": ints(0, 2)[:, None]} if layout == "pages" else {"cache_batch_idx": ints(0, 2)}
    v = torch.zeros(3, 6, 2, 8)
    check_refused("k_cache", lambda: flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=ints(1, 1), **where), k, v)


CACHES = (
    "contiguous", "heads first", "part of a packed qkv", "keys beside values, NHD", "keys beside values, HND",
    "pages of every second block", "steps that mesh over channels in a cache",
)  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
def test_an_append_takes_every_cache_of_an_ordinary_layout(name: str) -> None:
    k, v = ORDINARY[name]().zero_(), ORDINARY[name]().zero_()
    new = randn(1, 1, *k.shape[2:])
    flash_attn_with_kvcache(new, k, v, new, 2 * new, cache_seqlens=1)
    assert torch.equal(k[0, 1], new[0, 0]) and torch.equal(v[0, 1], 2 * new[0, 0])
    assert not k[0, 0].any() and not k[0, 2:].any() and not k[1:].any()


@pytest.mark.parametrize("which", ["dq", "dk", "dv"])
@pytest.mark.parametrize("by", ["sdpa", "fused", "official", "a dispatch mode"])
def test_a_private_backward_refuses_overlapping_gradients(by: str, which: str, serve: Serve) -> None:
    q, k, v, dout = (randn(2, 6, 2, 8, seed=seed, dtype=torch.float16) for seed in range(4))
    options = 0.0, 0.3, False, -1, -1, 0.0, None, False
    with FlopCounterMode(display=False) if by == "a dispatch mode" else serve(by):
        out, lse, _, _ = _flash_attn_forward(q, k, v, *options)
        for name in OVERLAPPING:
            written = {gradient: torch.zeros_like(q) for gradient in ("dq", "dk", "dv")}
            written[which] = OVERLAPPING[name](torch.zeros(1000).half()[:192].view(2, 6, 2, 8))
            check_refused(
                which,
                lambda: _flash_attn_backward(dout, q, k, v, out, lse, *written.values(), *options),
                *written.values(),
            )


SHAPE, LENGTHS = (2, 6, 2, 8), ints(2, 3)
Write = Callable[[Tensor, Tensor, Tensor], object]  # from (out, q, the cache of both keys and values)


def raw_over_cache(out: Tensor, q: Tensor, cache: Tensor) -> object:
    tables = (None,) * 6  # rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, alibi_slopes
    return flash_attn_2_cuda.fwd_kvcache(
        q, cache, cache.clone(), q[:, :1], q[:, :1], LENGTHS, *tables, out, 0.3, False, -1, -1, 0.0, True, 0
    )


def pages_into(out: Tensor, q: Tensor, cache: Tensor) -> object:
    table, new = ints(0, 1)[:, None], (q[:, :1], q[:, :1])
    x = CacheInputs(q, cache, cache.clone(), None, LENGTHS, None, table, None, None, *new)
    return kvcache.attend_into(out, x, Options())


WRITES: dict[str, Write] = {
    "flash_attn_2_cuda.fwd": lambda out, q, cache: flash_attn_2_cuda.fwd(
        q, cache, cache, out, None, 0.0, 0.3, False, -1, -1, 0.0, False, None
    ),
    "flash_attn_2_cuda.fwd_kvcache": raw_over_cache,
    "attend_into": pages_into,
    "fa3": lambda out, q, cache: fa3._flash_attn_forward(
        q, cache, cache, None, None, None, out, *(None,) * 16, 0.3, False
    ),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("backend", ["sdpa", "fused"])
def test_an_overlapping_out_is_refused_before_anything_is_written(backend: str, name: str, serve: Serve) -> None:
    q, cache = randn(*SHAPE, dtype=torch.float16), randn(*SHAPE, seed=1, dtype=torch.float16)
    with serve(backend):
        for view in OVERLAPPING.values():
            out = view(torch.zeros(1000).half()[:192].view(SHAPE))
            check_refused("out", lambda: WRITES[name](out, q, cache), out, cache)
        out = torch.zeros(2, 2, 6, 8).half().transpose(1, 2)
        WRITES[name](out, q, cache)
        assert out.any()


def test_a_rotation_in_place_refuses_overlapping_memory() -> None:
    cos = randn(6, 4)
    x, qkv = randn(1, 6, 2, 8).expand(2, 6, 2, 8), randn(2, 6, 1, 2, 8).expand(2, 6, 3, 2, 8)
    check_refused("x", lambda: apply_rotary_emb(x, cos, cos, inplace=True), x)
    check_refused("qkv", lambda: apply_rotary_emb_qkv_(qkv, cos, cos), qkv)
    check_refused("kv", lambda: apply_rotary_emb_kv_(qkv[:, :, :2], cos, cos), qkv)
    close(apply_rotary_emb(x, cos, cos), apply_rotary_emb(copied(x), cos, cos))


def test_a_compiled_append_to_an_overlapping_cache_is_refused(fresh_compiler: None) -> None:
    q, k, v = randn(2, 1, 2, 8), randn(1000, seed=1)[:192].view(SHAPE), torch.zeros(SHAPE)
    append = torch.compile(
        lambda k: flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=2), backend="aot_eager", fullgraph=True
    )
    windows = OVERLAPPING["sliding windows of rows"](k)
    before = windows.clone()
    with pytest.raises(RuntimeError, match="k_cache must not overlap itself"):
        append(windows)
    assert torch.equal(windows, before) and not v.any()


@pytest.mark.parametrize("backend", ["sdpa", "fused"])
def test_a_packed_forward_refuses_an_overlapping_out(backend: str, serve: Serve) -> None:
    q, k, v = (randn(12, 2, 8, seed=seed, dtype=torch.float16) for seed in range(3))
    given = PackedInputs(q, k, v, None, cumulative(6, 6), cumulative(6, 6))
    with serve(backend):
        for strides in ((0, 8, 1), (8, 8, 1), (16, 0, 1), (15, 8, 1), (16, 8, 0)):
            out = torch.zeros(200).half().as_strided(q.shape, strides)
            scalars = Options(max_seqlen_q=6, max_seqlen_k=6)
            check_refused("out", lambda: raw.forward_into(out, given, scalars), out)


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


# ---------------------------------------------------------------- num_splits, later than 2.8.3

SPLIT = dict(
    q=randn(2, 4, 16, seed=1), k=randn(4, 8, 2, 16, seed=2), v=randn(4, 8, 2, 16, seed=3),
    cu_seqlens_q=cumulative(1, 1), cu_seqlens_k=cumulative(9, 16), max_seqlen_q=1, max_seqlen_k=16, dropout_p=0.0,
    softmax_scale=0.25, causal=True, block_table=torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
)  # fmt: skip
FLAT = dict(
    q=randn(25, 4, 16), k=randn(25, 2, 16), v=randn(25, 2, 16), cu_seqlens_q=cumulative(9, 16), block_table=None
)
SEVERAL = "num_splits > 1 is not supported"
OTHERS = [
    dict(q=randn(2, 2, 16)), dict(max_seqlen_q=2), dict(window_size_left=3), dict(window_size_right=0),
    dict(alibi_slopes=torch.ones(4)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "numbers", "refused"),
    [
        ({}, (0, 1, 2, 128), {129: "num_splits > 128 not supported"}),
        *((options, (0, 1), {2: SEVERAL}) for options in OTHERS),
        (dict(dropout_p=0.1), (), {2: SEVERAL}),
        (FLAT | dict(max_seqlen_q=16), (0, 2), {}),
    ],
)
def test_only_single_queries_of_grouped_heads_over_pages_take_any_number_of_splits(
    options: dict[str, Any], numbers: tuple[int, ...], refused: dict[int, str]
) -> None:
    right = _flash_attn_varlen_forward(**SPLIT | options)
    for number in numbers:
        found = _flash_attn_varlen_forward(**SPLIT | options, num_splits=number)
        assert all(map(torch.equal, found[:3], right))
    for number, message in refused.items():
        with pytest.raises(RuntimeError, match=message):
            _flash_attn_varlen_forward(**SPLIT | options, num_splits=number)
