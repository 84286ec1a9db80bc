"""Attention, feed-forward and embedding modules, and attention with a bias, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn_compat import flash_attn_triton
from flash_attn_compat.flash_attn_triton import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from flash_attn_compat.layers.patch_embed import PatchEmbed
from flash_attn_compat.layers.rotary import apply_rotary_emb_torch
from flash_attn_compat.modules.embedding import (
    BertEmbeddings,
    ColumnParallelEmbedding,
    GPT2Embeddings,
    VocabParallelEmbedding,
)
from flash_attn_compat.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn_compat.modules.mlp import FusedMLP, GatedMlp, Mlp
from flash_attn_compat.ops.fused_dense import FusedDense, FusedDenseFunc, fused_dense_func
from flash_attn_compat.ops.triton.mlp import FusedDenseSqreluDense
from flash_attn_compat.utils.generation import InferenceParams
from tests.forms.inputs import cumulative, randn
from tests.forms.plain import (
    Parameters,
    attention,
    check_function,
    check_module,
    gated,
    gelu_approx,
    pairwise,
    results,
    squared_relu,
    two_layers,
)

B, S, SQ, H, HK, D = 2, 6, 3, 4, 2, 16
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def test_alibi_slopes_follow_the_paper() -> None:
    assert get_alibi_slopes(8) == pytest.approx([2.0**-i for i in range(1, 9)])
    # Twelve heads: those of eight, then every other one of sixteen.
    assert get_alibi_slopes(12) == pytest.approx(get_alibi_slopes(8) + get_alibi_slopes(16)[0:8:2])


# The attentions inside MHA

SLOPES = torch.tensor(get_alibi_slopes(H))
MASK = torch.arange(S) < torch.tensor([[S], [4]])  # what is kept


def of_self(qkv: Tensor, **options: Any) -> Tensor:
    return attention(*qkv.unbind(2), **options)


def of_cross(q: Tensor, kv: Tensor, **options: Any) -> Tensor:
    return attention(q, *kv.unbind(2), **options)


def of_kept_keys(q: Tensor, kv: Tensor, **options: Any) -> Tensor:
    return torch.cat([of_cross(q[i : i + 1], kv[i : i + 1, :n], **options) for i, n in enumerate(MASK.sum(-1))])


CAUSAL: dict[str, Any] = {"window": (-1, 0)}
QKV, Q, KV = randn(B, S, 3, H, D), randn(B, SQ, H, D, seed=1), randn(B, S, 2, HK, D, seed=2)
# name: (module, of its inputs, plain); the two flash modules take slopes and window in another order
INNER: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], list[Tensor]]] = {
    "flash self": (
        FlashSelfAttention(False, 0.3, 0.0, (3, -1), SLOPES.bfloat16()),  # which are used in fp32
        lambda qkv: of_self(qkv, scale=0.3, slopes=SLOPES, window=(3, -1)), [QKV],
    ),
    "flash self, causal where it is called": (
        lambda qkv: FlashSelfAttention(window_size=(3, -1))(qkv, causal=True),
        lambda qkv: of_self(qkv, window=(3, 0)), [QKV],
    ),
    "flash self, packed": (
        lambda qkv: FlashSelfAttention(True)(qkv.flatten(0, 1), None, cumulative(S, S), S).unflatten(0, (B, S)),
        lambda qkv: of_self(qkv, **CAUSAL), [QKV],
    ),
    "flash cross": (
        FlashCrossAttention(True, None, 0.0, SLOPES, (2, -1)),
        lambda q, kv: of_cross(q, kv, slopes=SLOPES, window=(2, 0)), [Q, KV],
    ),
    "flash cross, packed": (
        lambda q, kv: FlashCrossAttention(True)(
            q.flatten(0, 1), kv.flatten(0, 1), None, cumulative(SQ, SQ), SQ, cumulative(S, S), S
        ).unflatten(0, (B, SQ)),
        lambda q, kv: of_cross(q, kv, **CAUSAL), [Q, KV],
    ),
    "self": (SelfAttention(softmax_scale=0.3), lambda qkv: of_self(qkv, scale=0.3), [QKV]),
    "self, causal": (SelfAttention(True), lambda qkv: of_self(qkv, **CAUSAL), [QKV]),
    "self, causal, padded": (
        lambda qkv: SelfAttention(True)(qkv, key_padding_mask=MASK)[MASK],
        lambda qkv: of_self(qkv, **CAUSAL)[MASK], [QKV],
    ),
    "cross": (CrossAttention(), of_cross, [Q, KV]),
    "cross, padded": (lambda q, kv: CrossAttention()(q, kv, key_padding_mask=MASK), of_kept_keys, [Q, KV]),
    "cross, causal, padded": (
        lambda q, kv: CrossAttention(True)(q, kv, key_padding_mask=MASK),
        lambda q, kv: of_kept_keys(q, kv, **CAUSAL), [Q, KV],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", INNER)
def test_an_inner_attention_is_softmax_attention(name: str, dtype: torch.dtype) -> None:
    module, plain, inputs = INNER[name]
    assert not (isinstance(module, nn.Module) and module.state_dict())
    check_function(module, plain, *(x.to(dtype) for x in inputs), epsilons=4)


@pytest.mark.parametrize("flash", [False, True])
def test_attention_dropout_acts_in_training_only(flash: bool) -> None:
    module = (FlashSelfAttention if flash else SelfAttention)(attention_dropout=0.5)
    expected = of_self(QKV)
    torch.testing.assert_close(module.eval()(QKV), expected, rtol=1e-5, atol=1e-5)
    assert (module.train()(QKV) - expected).abs().max() > 0.1


def test_a_row_that_sees_nothing_is_a_uniform_average_in_plain_attention() -> None:
    q, kv = randn(1, 3, H, D), randn(1, 2, 2, H, D, seed=1)
    out = CrossAttention(causal=True)(q, kv)
    torch.testing.assert_close(out[0, 0], kv[0, :, 1].mean(dim=0))


# MHA


def plain_mha(options: dict[str, Any], p: Parameters, x: Tensor, x_kv: Tensor | None = None, *_: Any) -> Any:
    """Of its parameters and inputs: projection, convolution, rotation, attention, projection."""
    heads_kv = options.get("num_heads_kv", H)
    given, x = x, x.reshape(B, -1, 64)
    sizes = (64, heads_kv * D, heads_kv * D)
    if options.get("cross_attn"):
        projected = F.linear(x if x_kv is None else x_kv, p["Wkv.weight"], p["Wkv.bias"])
        parts = F.linear(x, p["Wq.weight"], p["Wq.bias"]), *projected.chunk(2, -1)
    else:
        parts = F.linear(x, p["Wqkv.weight"], p.get("Wqkv.bias")).split(sizes, -1)
    if options.get("dwconv"):
        convolutions = ("dwconv_q", "dwconv_kv") if "num_heads_kv" in options else ("dwconv_qkv",)
        weight, bias = (torch.cat([p[f"{name}.{kind}"] for name in convolutions]) for kind in ("weight", "bias"))
        channels = F.pad(torch.cat(parts, -1).transpose(1, 2), (2, 0))
        parts = F.conv1d(channels, weight, bias, groups=len(weight)).transpose(1, 2).split(sizes, -1)
    q, k, v = (part.unflatten(-1, (-1, D)) for part in parts)
    if rotary_dim := options.get("rotary_emb_dim"):
        angles = torch.arange(S)[:, None] * 1e4 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = apply_rotary_emb_torch(q, cos, sin), apply_rotary_emb_torch(k, cos, sin)
    slopes = SLOPES.to(x.dtype) if options.get("use_alibi") else None
    left = options.get("window_size", (-1, 0))[0]
    right = 0 if options.get("causal", True) else -1
    context = attention(q, k, v, scale=options.get("softmax_scale"), window=(left, right), slopes=slopes)
    out = F.linear(context.flatten(2), p["out_proj.weight"], p.get("out_proj.bias")).reshape(*given.shape[:-1], 64)
    return (out, given) if options.get("return_residual") else out


FLASH: dict[str, Any] = {"use_flash_attn": True}
MHAS: list[dict[str, Any]] = [
    {"causal": False, "softmax_scale": 0.3},
    {"num_heads_kv": HK, "rotary_emb_dim": 8, "qkv_proj_bias": False},
    {"rotary_emb_dim": 16, "fused_bias_fc": True, "return_residual": True},
    {"dwconv": True, "out_proj_bias": False},
    {"dwconv": True, "num_heads_kv": HK},
    {"cross_attn": True, "return_residual": True},
    {**FLASH, "rotary_emb_dim": 16, "checkpointing": True, "fused_bias_fc": True},
    {**FLASH, "num_heads_kv": HK, "rotary_emb_dim": 8, "return_residual": True},
    {**FLASH, "num_heads_kv": 1, "use_alibi": True, "window_size": (3, 0)},
    {**FLASH, "use_alibi": True, "window_size": (2, 0)},
    {**FLASH, "cross_attn": True, "causal": False},
]


@pytest.mark.parametrize("options", MHAS, ids=str)
def test_mha_is_projections_around_attention(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = MHA(64, H, **{"causal": True, **options})
    forms: list[Any] = [(randn(B, SQ, 64), randn(B, S, 64, seed=1)) if "cross_attn" in options else (randn(B, S, 64),)]
    if "use_alibi" in options:  # and nothing that excludes packed sequences
        forms.append((randn(B * S, 64), None, None, cumulative(S, S), S))
    for inputs in forms:
        check_module(module, lambda *given: plain_mha(options, *given), *inputs)


CACHED: list[dict[str, Any]] = [
    {"rotary_emb_dim": 16},
    {**FLASH, "rotary_emb_dim": 16, "rotary_emb_interleaved": True, "num_heads_kv": HK},
    {**FLASH, "rotary_emb_dim": 8, "num_heads_kv": HK},
    {**FLASH, "rotary_emb_dim": 16, "rotary_emb_scale_base": 512},
    {**FLASH, "use_alibi": True, "num_heads_kv": HK},
    {**FLASH, "window_size": (2, 0), "rotary_emb_dim": 16},
    {**FLASH, "window_size": (2, 0)},
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


# Feed-forward


MLPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor], int]] = {
    "plain": (lambda: Mlp(8), F.gelu, 32),
    "of another width": (lambda: Mlp(8, 12, 5, F.relu), F.relu, 12),
    "glu": (lambda: GatedMlp(8, multiple_of=16), gated(F.sigmoid), 32),
    "swiglu": (lambda: GatedMlp(8, 12, activation=F.silu, multiple_of=1), gated(F.silu), 12),
    "geglu": (lambda: GatedMlp(8, activation=F.gelu), gated(F.gelu), 128),
    "fused gelu_approx": (lambda: FusedMLP(8, 12, 5), gelu_approx, 12),
    "fused gelu_approx, recomputed": (lambda: FusedMLP(8, 12, 5, checkpoint_lvl=2), gelu_approx, 12),
    "fused relu": (lambda: FusedMLP(8, activation="relu", checkpoint_lvl=2), F.relu, 32),
    "fused sqrelu": (lambda: FusedMLP(8, 12, 5, activation="sqrelu"), squared_relu, 12),
    **{f"squared relu in one, {level}": (
        lambda level=level: FusedDenseSqreluDense(8, out_features=5, checkpoint_lvl=level), squared_relu, 32
    ) for level in (0, 1, 2)},
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), pairwise(MLPS, DTYPES))
def test_an_mlp_is_two_layers_around_its_activation(name: str, dtype: torch.dtype) -> None:
    make, activation, hidden_features = MLPS[name]
    module = make().to(dtype)
    assert module.fc2.in_features == hidden_features  # type: ignore[union-attr]
    check_module(module, two_layers(activation), randn(3, 8, dtype=dtype))


def test_layers_return_their_input() -> None:
    x = randn(2, 8)
    for module in (Mlp(8, return_residual=True), GatedMlp(8, return_residual=True), FusedMLP(8, return_residual=True)):
        assert module(x)[1] is x
    layer = FusedDense(8, 3, return_residual=True)
    for weights, (out, residual) in (
        ((layer.weight, layer.bias), layer(x)),
        ((layer.weight,), fused_dense_func(x, layer.weight, return_residual=True)),
    ):
        assert residual is x and torch.equal(out, F.linear(x, *weights))


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_function_of_the_dense_layer_has_gradients_of_everything(with_bias: bool) -> None:
    x, weight, bias = randn(2, 3, 8), randn(5, 8, seed=1), randn(5, seed=2)
    given = (x, weight, bias) if with_bias else (x, weight)

    def ours(*given: Tensor) -> Any:
        x, weight, *bias = given
        return FusedDenseFunc.apply(x, weight, *(bias or [None]), True)

    check_function(ours, lambda x, *weights: (F.linear(x, *weights), x), *given)


class InternLMs(FusedDenseFunc):
    """InternLM's subclass: another backward, over the attributes of ctx."""

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_output: Tensor, *args: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        held = ctx.compute_weight_gradient, ctx.return_residual, ctx.process_group, ctx.sequence_parallel
        assert held == (True, False, None, True)
        return grad_output @ weight, grad_output.t() @ x, None, None, None, None


def test_a_subclass_of_the_function_finds_flash_attns_attributes_in_ctx() -> None:
    x, weight = (randn(4, 4, seed=seed).requires_grad_() for seed in (0, 1))
    found = torch.autograd.grad(InternLMs.apply(x, weight, None).sum(), (x, weight))
    torch.testing.assert_close(found, torch.autograd.grad(F.linear(x, weight).sum(), (x, weight)))


def test_the_function_of_the_dense_layer_heeds_autocast_and_weights_without_gradients() -> None:
    x, weight = randn(4, 8).requires_grad_(), randn(5, 8, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        out = FusedDenseFunc.apply(x, weight, None)
    assert out.dtype == torch.bfloat16 and len(out.grad_fn.saved_tensors) == 1
    out.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x), atol=0.05, rtol=0.05)


# Embeddings of tokens, positions, types and image patches

VOCAB, WIDTH, POSITIONS = 11, 6, 9
IDS = torch.tensor([[1, 4, 4, 0], [10, 2, 1, 7]])
PLACES = torch.tensor([[3, 3, 0, 8], [1, 2, 5, 5]])


def plain_sum(params: Parameters, ids: Tensor, places: Tensor | None = None, types: Tensor | None = None) -> Tensor:
    """Of tokens, projected, and their positions and types."""
    out = params["word_embeddings.weight"][ids]
    if "project_in.weight" in params:
        out = out @ params["project_in.weight"].T
    if "position_embeddings.weight" in params:
        out = out + params["position_embeddings.weight"][torch.arange(ids.shape[1]) if places is None else places]
    if "token_type_embeddings.weight" in params:
        out = out + params["token_type_embeddings.weight"][torch.zeros_like(ids) if types is None else types]
    return out


@pytest.mark.parametrize(
    ("module_class", "dtype", "positions", "more"),
    pairwise((GPT2Embeddings, BertEmbeddings), DTYPES, (POSITIONS, 0), (False, True)),
)
def test_embeddings_are_tokens_plus_positions_plus_types(
    module_class: Any, dtype: torch.dtype, positions: int, more: bool
) -> None:
    """GPT-2's may be projected, BERT's may have types."""
    if module_class is GPT2Embeddings:
        module: Any = GPT2Embeddings(WIDTH, VOCAB, positions, word_embed_proj_dim=3 if more else None, dtype=dtype)
        names, inputs = ["project_in"] * more, [IDS, PLACES]
    else:
        module = BertEmbeddings(WIDTH, VOCAB, positions, 2 if more else 0, dtype=dtype)
        names, inputs = ["token_type_embeddings"] * more, [IDS, PLACES, torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])]
    names += ["word_embeddings", *["position_embeddings"] * bool(positions)]
    assert set(module.state_dict()) == {f"{name}.weight" for name in names}
    check_module(module, plain_sum, IDS)
    check_module(module, plain_sum, *inputs)


def test_the_padding_token_starts_at_zero_and_gets_no_gradient() -> None:
    for module in (GPT2Embeddings(WIDTH, VOCAB, 0, padding_idx=4), BertEmbeddings(WIDTH, VOCAB, 0, 0, padding_idx=4)):
        module(IDS).sum().backward()
        assert (module.word_embeddings.weight[4] == 0).all() and (module.word_embeddings.weight.grad[4] == 0).all()


def test_parallel_embeddings_without_a_group_are_ordinary() -> None:
    for module in (VocabParallelEmbedding(VOCAB, WIDTH), ColumnParallelEmbedding(VOCAB, WIDTH)):
        assert torch.equal(module(IDS), module.weight[IDS])


def plain_patches(params: Parameters, x: Tensor, norm: bool = False, flatten: bool = True) -> Tensor:
    """The convolution that the linear layer stands for."""
    weight, bias = params["proj.weight"], params.get("proj.bias")
    out = F.conv2d(x, weight.view(-1, 3, 2, 4), bias, stride=(2, 4)).permute(0, 2, 3, 1)
    out = out.flatten(1, 2) if flatten else out
    return F.layer_norm(out, out.shape[-1:], params["norm.weight"], params["norm.bias"]) if norm else out


@pytest.mark.parametrize(("dtype", "flatten", "bias", "norm", "fused"), pairwise(DTYPES, *[(False, True)] * 4))
def test_a_patch_embedding_convolves(dtype: torch.dtype, flatten: bool, bias: bool, norm: bool, fused: bool) -> None:
    module = PatchEmbed((4, 8), (2, 4), 3, WIDTH, nn.LayerNorm if norm else None, flatten, bias, fused).to(dtype)
    assert isinstance(module.proj, FusedDense) == (fused and bias)
    assert module.grid_size == (2, 2) and module.num_patches == 4 and module.proj.weight.shape == (WIDTH, 24)
    x = randn(2, 3, 4, 8, dtype=dtype)
    check_module(module, lambda params, x: plain_patches(params, x, norm, flatten), x)


# ----------------------------------------------- flash_attn_triton: attention with a bias, which is added to the scores

HEADS = 3


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
        (None, (1, HEADS), (B, 1), (B, HEADS)), (None, torch.float32), (256, 3),
    ),
)  # fmt: skip
def test_the_bias_is_added_to_the_scores(
    dtype: torch.dtype, causal: bool, rows: bool, shape: Any, bias_dtype: Any, block: int, monkeypatch: Any
) -> None:
    """All gradients, the bias's too; a fp32 bias of half inputs is used as it is. Blocks that hold all and that cut."""
    monkeypatch.setattr(flash_attn_triton, "_ROWS", block)
    for seqlen_q, seqlen_k in ((7, 7), (4, 9), (9, 4), (1, 6)):
        q, k, v = (randn(B, n, HEADS, D, seed=s, dtype=dtype) for s, n in enumerate((seqlen_q, seqlen_k, seqlen_k)))
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
    q, k, v = (randn(B, 5, HEADS, D, seed=s) for s in range(3))
    bias = randn(1, HEADS, 1, 5)
    expected = flash_attn_func(q, k, v, bias, True, 0.3)
    torch.testing.assert_close(expected, plain(q, k, v, bias, True, 0.3), rtol=1e-5, atol=1e-6)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack((k, v), dim=2), bias, True, 0.3), expected)
    assert torch.equal(flash_attn_qkvpacked_func(torch.stack((q, k, v), dim=2), bias, True, 0.3), expected)


def test_autocast_rounds_nothing() -> None:
    given = [randn(B, 5, HEADS, D, seed=s) for s in range(3)]
    expected = results(flash_attn_func, given)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(flash_attn_func, given)
    assert all(map(torch.equal, found, expected))  # type: ignore[arg-type]
