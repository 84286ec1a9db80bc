"""Refusals of the modules around attention: an error names the argument before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flash_attn_compat import bert_padding, flash_attn_triton
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
from tests.forms.inputs import randn

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
