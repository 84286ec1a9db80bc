"""Attention and feed-forward modules: against plain attention, and a cache against the full forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.layers.rotary import apply_rotary_emb_torch
from flash_attn_compat.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn_compat.modules.mlp import FusedMLP, GatedMlp, Mlp
from flash_attn_compat.ops.fused_dense import FusedDense, fused_dense_func
from flash_attn_compat.utils.generation import InferenceParams
from tests.plain import attention, check_module, two_layers
from tests.support import cumulative, randn

B, S, H, HK, D = 2, 6, 4, 2, 16


def attention64(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None, slopes: Any = None, left: int = -1
) -> Tensor:
    right = 0 if causal else -1
    return attention(q.double(), k.double(), v.double(), scale=scale, window=(left, right), slopes=slopes)


def same(found: Tensor, right: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)


def test_alibi_slopes_follow_the_paper() -> None:
    assert get_alibi_slopes(8) == pytest.approx([2.0**-i for i in range(1, 9)])
    # Twelve heads: those of eight, then every other one of sixteen.
    assert get_alibi_slopes(12) == pytest.approx(get_alibi_slopes(8) + get_alibi_slopes(16)[0:8:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_self_attention_agrees_with_fp64_dense_and_packed(dtype: torch.dtype, causal: bool) -> None:
    slopes = torch.tensor(get_alibi_slopes(H))
    module = FlashSelfAttention(False, 0.3, 0.0, (3, -1), slopes.to(dtype)).eval()  # the order of the last two
    qkv = randn(B, S, 3, H, D, dtype=dtype)
    slopes_used = slopes.to(dtype).double().tolist()
    expected = attention64(*qkv.unbind(2), causal, 0.3, slopes_used, left=3)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    same(module(qkv, causal=causal), expected, tolerance)
    cu_seqlens = cumulative(S, S)
    packed = module(qkv.flatten(0, 1), causal=causal, cu_seqlens=cu_seqlens, max_seqlen=S)
    same(packed, expected.flatten(0, 1), tolerance)


def test_flash_cross_attention_agrees_with_fp64_dense_and_packed() -> None:
    module = FlashCrossAttention(True, None, 0.0, None, (-1, -1))  # differs between the two modules
    assert not module.state_dict()
    q, kv = randn(B, 3, H, D), randn(B, S, 2, HK, D, seed=1)
    expected = attention64(q, *kv.unbind(2), causal=True)
    same(module(q, kv), expected)
    cu_seqlens, cu_seqlens_k = (torch.arange(B + 1, dtype=torch.int32) * n for n in (3, S))
    packed = module(
        q.flatten(0, 1), kv.flatten(0, 1), None, cu_seqlens=cu_seqlens, max_seqlen=3, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=S,
    )  # fmt: skip
    same(packed, expected.flatten(0, 1))


@pytest.mark.parametrize("flash", [False, True])
def test_attention_dropout_acts_in_training_only(flash: bool) -> None:
    module = (FlashSelfAttention if flash else SelfAttention)(attention_dropout=0.5)
    qkv = randn(B, S, 3, H, D)
    expected = attention64(*qkv.unbind(2), causal=False)
    same(module.eval()(qkv), expected)
    assert (module.train()(qkv).double() - expected).abs().max() > 0.1


@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_agrees_with_fp64_where_something_is_visible(causal: bool) -> None:
    qkv, q, kv = randn(B, S, 3, H, D), randn(B, 3, H, D, seed=1), randn(B, S, 2, HK, D, seed=2)
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[1, 4:] = False
    self_attention, cross_attention = SelfAttention(causal), CrossAttention(causal)
    expected = attention64(*qkv.unbind(2), causal)
    same(self_attention(qkv), expected)
    same(self_attention(qkv, key_padding_mask=mask)[1, :4], attention64(*qkv[1:, :4].unbind(2), causal)[0])
    expected = attention64(q, *kv.unbind(2), causal)
    same(cross_attention(q, kv), expected)
    same(cross_attention(q, kv, key_padding_mask=mask)[1], attention64(q[1:], *kv[1:, :4].unbind(2), causal)[0])


def test_a_row_that_sees_nothing_is_a_uniform_average_in_plain_attention() -> None:
    q, kv = randn(1, 3, H, D), randn(1, 2, 2, H, D, seed=1)
    out = CrossAttention(causal=True)(q, kv)
    torch.testing.assert_close(out[0, 0], kv[0, :, 1].mean(dim=0))


def parameters(module: torch.nn.Module) -> set[str]:
    return {name.rsplit(".", 1)[0] for name, _ in module.named_parameters()}


def test_mha_names_its_projections_as_flash_attn_does() -> None:
    assert parameters(MHA(64, H)) == {"Wqkv", "out_proj"}
    assert parameters(MHA(64, H, cross_attn=True)) == {"Wq", "Wkv", "out_proj"}
    assert parameters(MHA(64, H, dwconv=True)) == {"Wqkv", "dwconv_qkv", "out_proj"}
    assert parameters(MHA(64, H, num_heads_kv=HK, dwconv=True)) == {"Wqkv", "dwconv_q", "dwconv_kv", "out_proj"}
    assert MHA(64, H, num_heads_kv=HK).Wqkv.weight.shape == (64 + 2 * HK * D, 64)
    assert MHA(64, H, rotary_emb_dim=8).state_dict().keys() == MHA(64, H).state_dict().keys()


@pytest.mark.parametrize(("num_heads_kv", "use_flash_attn"), [(H, False), (HK, False), (HK, True)])
def test_mha_is_projection_rotation_attention_projection(num_heads_kv: int, use_flash_attn: bool) -> None:
    torch.manual_seed(0)
    module = MHA(64, H, num_heads_kv, causal=True, rotary_emb_dim=8, use_flash_attn=use_flash_attn)
    x = randn(B, S, 64)
    q, k, v = module.Wqkv(x).split((64, num_heads_kv * D, num_heads_kv * D), dim=-1)
    q, k, v = (t.unflatten(-1, (-1, D)) for t in (q, k, v))
    module.rotary_emb._update_cos_sin_cache(S, dtype=torch.float32)
    cos, sin = module.rotary_emb._cos_cached, module.rotary_emb._sin_cached
    context = attention64(apply_rotary_emb_torch(q, cos, sin), apply_rotary_emb_torch(k, cos, sin), v, causal=True)
    expected = F.linear(context.flatten(2), module.out_proj.weight.double(), module.out_proj.bias.double())
    same(module(x), expected)


@pytest.mark.parametrize("num_heads_kv", [H, HK])
def test_packed_mha_agrees_with_the_padded_one(num_heads_kv: int) -> None:
    torch.manual_seed(0)
    module = MHA(64, H, num_heads_kv, causal=True, use_flash_attn=True, use_alibi=True, window_size=(3, 0))
    x = randn(B, S, 64)
    cu_seqlens = cumulative(S, S)
    packed = module(x.flatten(0, 1), cu_seqlens=cu_seqlens, max_seqlen=S)
    torch.testing.assert_close(packed, module(x).flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"cross_attn": True}, {"use_flash_attn": True}], ids=str)
def test_return_residual_hands_back_x(options: dict[str, bool]) -> None:
    module = MHA(64, H, return_residual=True, **options)
    x, x_kv = randn(B, 3, 64), randn(B, S, 64, seed=1) if "cross_attn" in options else None
    out, residual = module(x, x_kv)
    assert out.shape == x.shape and residual is x


def test_checkpointing_and_dense_layers_change_neither_values_nor_gradients() -> None:
    torch.manual_seed(0)
    plain = MHA(64, H, causal=True, use_flash_attn=True, rotary_emb_dim=16)
    other = MHA(64, H, causal=True, use_flash_attn=True, rotary_emb_dim=16, checkpointing=True, fused_bias_fc=True)
    other.load_state_dict(plain.state_dict())
    assert isinstance(other.Wqkv, FusedDense)
    x = randn(B, S, 64)
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    for module, leaf in zip((plain, other), leaves, strict=True):
        module(leaf).square().sum().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
    torch.testing.assert_close(other.Wqkv.weight.grad, plain.Wqkv.weight.grad)


def test_the_depthwise_convolution_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    module = MHA(64, H, causal=True, dwconv=True)
    x = randn(B, S, 64)
    changed = x.clone()
    changed[:, 4:] += 1
    torch.testing.assert_close(module(changed)[:, :4], module(x)[:, :4])


CACHED: list[dict[str, Any]] = [
    {"use_flash_attn": False},
    {"use_flash_attn": False, "rotary_emb_dim": 16},
    {"use_flash_attn": True},
    {"use_flash_attn": True, "rotary_emb_dim": 16},
    {"use_flash_attn": True, "rotary_emb_dim": 16, "rotary_emb_interleaved": True, "num_heads_kv": HK},
    {"use_flash_attn": True, "rotary_emb_dim": 8, "num_heads_kv": HK},
    {"use_flash_attn": True, "rotary_emb_dim": 16, "rotary_emb_scale_base": 512},
    {"use_flash_attn": True, "use_alibi": True, "num_heads_kv": HK},
    {"use_flash_attn": True, "window_size": (2, 0), "rotary_emb_dim": 16},
    {"use_flash_attn": True, "window_size": (2, 0)},
]


@pytest.mark.parametrize("options", CACHED)
def test_decoding_with_a_cache_agrees_with_the_full_forward(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = MHA(64, H, causal=True, layer_idx=0, **options)
    x = randn(B, S, 64)
    expected = module(x)
    params = InferenceParams(max_seqlen=S + 2, max_batch_size=B)
    steps = []
    for start, stop in ((0, 2), (2, 3), (3, 5), (5, 6)):
        steps.append(module(x[:, start:stop], inference_params=params))
        params.seqlen_offset = stop
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=1e-5)
    assert params.key_value_memory_dict[0].shape == (B, S + 2, 2, options.get("num_heads_kv", H), D)


def test_decoding_uses_the_length_of_each_sample_and_its_part_of_the_batch() -> None:
    torch.manual_seed(0)
    module = MHA(64, H, causal=True, layer_idx=0, use_flash_attn=True, rotary_emb_dim=16)
    x = randn(B, S, 64)
    cache = module.allocate_inference_cache(B + 1, S + 2)
    params = InferenceParams(
        max_seqlen=S + 2, max_batch_size=B + 1, batch_size_offset=1, key_value_memory_dict={0: cache}
    )
    module(x, inference_params=params)
    lengths = [4, 6]
    params.lengths_per_sample = torch.tensor([0, *lengths], dtype=torch.int32)
    params.seqlen_offset = max(lengths)
    token = randn(B, 1, 64, seed=1)
    step = module(token, inference_params=params)
    for row, length in enumerate(lengths):
        alone = module(torch.cat((x[row : row + 1, :length], token[row : row + 1]), dim=1))
        torch.testing.assert_close(step[row], alone[0, -1:], rtol=1e-4, atol=1e-5)


def test_a_cache_that_is_too_short_is_refused() -> None:
    module = MHA(64, H, causal=True, layer_idx=0)
    with pytest.raises(AssertionError, match="does not fit into the cache"):
        module(randn(B, S, 64), inference_params=InferenceParams(max_seqlen=S - 1, max_batch_size=B))


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"use_alibi": True}, {}, "ALiBi code path requires flash_attn"),
        ({"window_size": (2, 0)}, {}, "requires flash_attn"),
        ({"num_heads_kv": 3}, {}, "divisible by num_heads_kv"),
        (
            {"use_flash_attn": True},
            {"key_padding_mask": torch.ones(B, S, dtype=torch.bool)},
            "key_padding_mask excludes",
        ),
        ({}, {"x_kv": randn(B, S, 64)}, "for cross-attention"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], given: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        MHA(64, H, **options)(randn(B, S, 64), **given)


# Feed-forward


def test_mlp_defaults_and_residual() -> None:
    module, x = Mlp(8, return_residual=True), randn(3, 8)
    assert module.fc1.out_features == 32 and module(x)[1] is x
    check_module(Mlp(8), two_layers(F.gelu), x)


@pytest.mark.parametrize("activation", [F.sigmoid, F.silu, F.gelu])
def test_gated_mlp_multiplies_the_first_half_by_its_gate(activation: Any) -> None:
    def gated(x: Tensor) -> Tensor:
        y, gate = x.chunk(2, dim=-1)
        return y * activation(gate)

    module = GatedMlp(8, activation=activation, multiple_of=16)
    assert module.fc2.in_features == 32
    check_module(module, two_layers(gated), randn(3, 8))


@pytest.mark.parametrize(
    ("activation", "plain", "checkpoint_lvl"),
    [
        ("gelu_approx", lambda x: F.gelu(x, approximate="tanh"), 0),
        ("gelu_approx", lambda x: F.gelu(x, approximate="tanh"), 2),
        ("relu", F.relu, 2),
        ("sqrelu", lambda x: F.relu(x).square(), 0),
    ],
)
def test_fused_mlp_is_two_layers(activation: str, plain: Any, checkpoint_lvl: int) -> None:
    module = FusedMLP(8, 12, 5, activation=activation, checkpoint_lvl=checkpoint_lvl)
    check_module(module, two_layers(plain), randn(3, 8))


def test_dense_layers_return_their_input_and_refuse_unknown_activations() -> None:
    layer = FusedDense(4, 3, return_residual=True)
    x = randn(2, 4)
    out, residual = layer(x)
    assert residual is x and torch.equal(out, F.linear(x, layer.weight, layer.bias))
    out, residual = fused_dense_func(x, layer.weight, return_residual=True)
    assert residual is x and torch.equal(out, F.linear(x, layer.weight))
    with pytest.raises(NotImplementedError, match="'swish'"):
        FusedMLP(4, activation="swish")
