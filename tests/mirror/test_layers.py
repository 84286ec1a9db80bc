"""Rotary embeddings and transformer blocks against what they stand for, written out: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn_compat.layers import rotary as R
from flash_attn_compat.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_qkv_
from flash_attn_compat.modules.block import Block, ParallelBlock, StochasticDepth
from flash_attn_compat.modules.mha import MHA
from flash_attn_compat.modules.mlp import Mlp
from flash_attn_compat.ops.triton.layer_norm import RMSNorm
from flash_attn_compat.ops.triton.rotary import apply_rotary
from tests.forms.inputs import cumulative, randn
from tests.forms.plain import Parameters, check_function, check_module, pairwise, rounded_once

B, S, H, HK, D, TABLE = 2, 5, 4, 2, 16, 9
STARTS = cumulative(3, 0, 6) + 1  # a token before and one behind belong to no sequence
Tables = tuple[Tensor, ...]


def tables(rotary_dim: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tables:
    angles = randn(TABLE, rotary_dim // 2, seed=seed, dtype=torch.float64) * 3
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False) -> Tensor:
    """x (..., nheads, headdim) at positions (...); as it is where these are off the table."""
    inside = ((positions >= 0) & (positions < len(cos)))[..., None]
    rows = positions.clamp(0, len(cos) - 1)
    c, s = (torch.where(inside, t[rows], value)[..., None, :] for t, value in ((cos, 1.0), (sin, 0.0)))
    turning, rest = x.split((2 * cos.shape[1], x.shape[-1] - 2 * cos.shape[1]), dim=-1)
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    turned = a * c - b * s, a * s + b * c
    return torch.cat((torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1), rest), dim=-1)


def places(offsets: Any, seqlen: int = S) -> Tensor:
    return torch.arange(seqlen) + (offsets[:, None] if isinstance(offsets, Tensor) else torch.full((B, 1), offsets))


def packed_places(offsets: Any) -> Tensor:
    positions = torch.full((11,), -1)
    first = torch.as_tensor(offsets).expand(3)
    for offset, start, stop in zip(first, STARTS.tolist(), STARTS.tolist()[1:]):
        positions[start:stop] = torch.arange(stop - start) + offset
    return positions


def of_queries_and_keys(split: Callable[[Tensor], Any], join: Callable[[Any], Tensor]) -> Callable[..., Tensor]:
    def plain(x: Tensor, of_q: Tables, of_k: Tables, offsets: Any, interleaved: bool) -> Tensor:
        q, k, v = split(x)
        turned = (rotated(t, *of, places(offsets), interleaved) for t, of in ((q, of_q), (k, of_k)))
        return join((*turned, v))

    return plain


def one(x: Tensor, of_q: Tables, of_k: Tables, offsets: Any, interleaved: bool) -> Tensor:
    return rotated(x, *of_q, places(offsets), interleaved)


# name: (shape, whether a sequence has an offset of its own, ours, plain), of x, both tables, offsets and interleaved
FORMS: dict[str, tuple[tuple[int, ...], Callable[..., Any], Callable[..., Tensor]]] = {
    "dense": ((B, S, H, D), lambda x, q, k, o, i: apply_rotary_emb(x, *q, i, seqlen_offsets=o), one),
    "in place": ((B, S, H, D), lambda x, q, k, o, i: apply_rotary_emb(x, *q, i, True, o), one),
    "heads of more than 256": (
        (B, S, 1, 320), lambda x, q, k, o, i: R.apply_rotary_emb_func(x, *q, i, seqlen_offsets=o), one,
    ),
    "packed": (
        (11, H, D),
        lambda x, q, k, o, i: apply_rotary_emb(x, *q, i, seqlen_offsets=o, cu_seqlens=STARTS, max_seqlen=6),
        lambda x, q, k, o, i: rotated(x, *q, packed_places(o), i),
    ),
    "packed in place": (
        (11, H, D),
        lambda x, q, k, o, i: apply_rotary_emb(x, *q, i, True, o, STARTS, 6),
        lambda x, q, k, o, i: rotated(x, *q, packed_places(o), i),
    ),
    "qkv": (
        (B, S, 3, H, D),
        lambda x, q, k, o, i: apply_rotary_emb_qkv_(x, *q, *k, i, o),
        of_queries_and_keys(lambda x: x.unbind(2), lambda parts: torch.stack(parts, 2)),
    ),
    "qkv of grouped heads": (
        (B, S, H + 2 * HK, D),
        lambda x, q, k, o, i: apply_rotary_emb_qkv_(x, *q, *k, i, o, num_heads_q=H),
        of_queries_and_keys(lambda x: x.split((H, HK, HK), 2), lambda parts: torch.cat(parts, 2)),
    ),
    "kv": (
        (B, S, 2, HK, D),
        lambda x, q, k, o, i: R.apply_rotary_emb_kv_(x, *k, i, o),
        lambda x, q, k, o, i: torch.stack((rotated(x[:, :, 0], *k, places(o), i), x[:, :, 1]), 2),
    ),
    "what unbind gave": (
        (B, S, 2, H, D),
        lambda x, q, k, o, i: torch.stack([apply_rotary_emb((x * 1.0).unbind(2)[0], *q, i, True, o), x[:, :, 1]], 2),
        lambda x, q, k, o, i: torch.stack((rotated(x[:, :, 0], *q, places(o), i), x[:, :, 1]), 2),
    ),
}  # fmt: skip
OFFSETS = [0, 3, torch.tensor([3, 0, 1], dtype=torch.int32), torch.tensor([TABLE - 2, 0, -1])]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize(
    ("form", "dtype", "table_dtype", "interleaved", "rotary_dim", "offsets", "own_keys"),
    pairwise(FORMS, DTYPES, (None, torch.float32), (False, True), (2, 10, 16), OFFSETS, (False, True)),
)
def test_a_rotation_and_its_gradient_are_rounded_once(
    form: str, dtype: torch.dtype, table_dtype: Any, interleaved: bool, rotary_dim: int, offsets: Any, own_keys: bool
) -> None:
    """With an offset of each sequence too; rows beyond the table are not rotated."""
    shape, ours, plain = FORMS[form]
    of_q = tables(rotary_dim, table_dtype or dtype)
    of_k = tables(rotary_dim, table_dtype or dtype, seed=5) if own_keys else of_q
    if isinstance(offsets, Tensor) and not form.startswith("packed"):
        offsets = offsets[:B]
    given = (offsets, interleaved)
    exact = tuple(tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in table) for table in (of_q, of_k))
    check_function(
        lambda x: ours(x, of_q, of_k, *given),
        rounded_once(lambda x: plain(x, *exact, *given)),
        randn(*shape, dtype=dtype),
        rounds_once=True,
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_rotation_can_be_differentiated_twice(form: str) -> None:
    shape, ours, _ = FORMS[form]
    x, of_q = randn(*shape, dtype=torch.float64).requires_grad_(), tables(10, torch.float64)
    torch.autograd.gradgradcheck(lambda t: ours(t * 1.0, of_q, of_q, 1, False) ** 3, x, fast_mode=True)


@pytest.mark.parametrize("form", ["in place", "packed in place", "qkv", "qkv of grouped heads", "kv"])
def test_inplace_rotary_writes_to_the_given_memory_of_leaves_too(form: str) -> None:
    shape, ours, plain = FORMS[form]
    leaf, of_q = randn(*shape).requires_grad_(), tables(10)
    expected, version = plain(leaf.detach().clone(), of_q, of_q, 1, False), leaf._version
    out = ours(leaf, of_q, of_q, 1, False)
    assert out.data_ptr() == leaf.data_ptr() and leaf._version == version and out.grad_fn is not None
    torch.testing.assert_close(leaf.detach(), expected)
    gradient = torch.ones(()).expand(shape)  # of one element in memory, which a rotation in place would corrupt
    assert ours(leaf, of_q, of_q, 1, False).backward(gradient) is None and (gradient == 1).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_view_is_rotated_in_place_through_its_strides(interleaved: bool) -> None:
    qkv, (cos, sin) = randn(B, 3, H, S, 24).requires_grad_(), tables(10)
    untouched = qkv.detach().clone()
    view = qkv[:, 1, :, :, 3:19].transpose(1, 2)
    expected = rotated(view.detach(), cos, sin, places(0), interleaved)
    assert apply_rotary(view, cos, sin, interleaved=interleaved, inplace=True) is view
    torch.testing.assert_close(qkv[:, 1, :, :, 3:19].transpose(1, 2), expected, check_stride=False)
    with torch.no_grad():
        qkv[:, 1, :, :, 3:13] = untouched[:, 1, :, :, 3:13]
    assert torch.equal(qkv, untouched)


def test_out_of_place_forms_leave_their_input_alone_and_the_lowest_one_outside_of_autograd() -> None:
    leaf, of_q = randn(B, S, 3, H, D).requires_grad_(), tables(D)
    kept = leaf.detach().clone()
    out, lowest = R._apply_rotary_emb_qkv(leaf.detach(), *of_q), apply_rotary(leaf[:, :, 0], *of_q)
    assert torch.equal(leaf, kept) and lowest.grad_fn is None
    assert torch.equal(out, apply_rotary_emb_qkv_(kept, *of_q)) and torch.equal(out[:, :, 0], lowest)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_batch", [False, True])
def test_the_plain_torch_version_agrees(interleaved: bool, per_batch: bool) -> None:
    x, (cos, sin) = randn(B, S, H, D, dtype=torch.float64), tables(10, torch.float64)
    given = [t[:S].expand(B, S, 5) if per_batch else t[:S] for t in (cos, sin)]
    expected = rotated(x, cos, sin, places(0), interleaved)
    torch.testing.assert_close(R.apply_rotary_emb_torch(x, *given, interleaved=interleaved), expected)


@pytest.mark.parametrize("shape", [(0, S, H, D), (B, 0, H, D)])
def test_empty_inputs_give_empty_outputs(shape: tuple[int, ...]) -> None:
    cos, sin = tables(D)
    offsets = torch.zeros(shape[0], dtype=torch.int32)
    assert apply_rotary(torch.zeros(shape), cos, sin).shape == shape
    assert apply_rotary(torch.zeros(shape), cos, sin, seqlen_offsets=offsets).shape == shape
    assert apply_rotary(torch.zeros(B, 0, H, D), cos[:0], sin[:0], torch.zeros(B, dtype=torch.int32)).numel() == 0


# RotaryEmbedding


def tables_of(seqlen: int, dim: int, base: float, scale_base: float | None) -> tuple[Tables, Tables]:
    """Of queries and of keys, in fp64."""
    channels, positions = torch.arange(0, dim, 2).double(), torch.arange(seqlen).double()
    angles = torch.outer(positions, base ** (-channels / dim))
    factor = torch.ones_like(angles)
    if scale_base is not None:
        factor = ((channels + 0.4 * dim) / (1.4 * dim)) ** ((positions - seqlen // 2) / scale_base)[:, None]
    return (angles.cos() * factor, angles.sin() * factor), (angles.cos() / factor, angles.sin() / factor)


@pytest.mark.parametrize(
    ("separate", "interleaved", "base", "scale_base", "cast", "seqlen", "dtype"),
    pairwise(
        (False, True), (False, True), (10000.0, 500.0), (None, 100.0), (None, torch.bfloat16), (S, 200), DTYPES[:3]
    ),
)  # fmt: skip
def test_the_module_rotates_by_tables_that_are_rounded_once_even_if_it_was_cast_to_half(
    separate: bool, interleaved: bool, base: float, scale_base: float | None, cast: Any, seqlen: int, dtype: Any
) -> None:
    """From a packed qkv with one offset, or from q and kv with one for each sequence."""
    rotary = RotaryEmbedding(10, base=base, scale_base=scale_base, interleaved=interleaved).to(cast or torch.float32)
    q, k, v = randn(3, B, seqlen, H, D, dtype=dtype)
    if separate:
        offsets: Any = torch.tensor([3, 1], dtype=torch.int32)
        kv = torch.stack((k, v), 2)
        q_out, kv_out = rotary(q.clone(), kv, seqlen_offset=offsets, max_seqlen=seqlen + 3)
        assert kv_out.data_ptr() == kv.data_ptr()
        found = (q_out, *kv_out.unbind(2))
    else:
        offsets, qkv = 3, torch.stack((q, k, v), 2)
        out = rotary(qkv, seqlen_offset=offsets)
        assert isinstance(out, Tensor) and out.data_ptr() == qkv.data_ptr()
        found = out.unbind(2)
    of_q: Any = rotary._cos_cached, rotary._sin_cached
    of_k: Any = of_q if scale_base is None else (rotary._cos_k_cached, rotary._sin_k_cached)
    eps = torch.finfo(dtype).eps
    for ours, x, table, exact in zip(found, (q, k), (of_q, of_k), tables_of(seqlen + 3, 10, base, scale_base)):
        for stored, right in zip(table, exact):
            assert stored.dtype == dtype
            torch.testing.assert_close(stored.double(), right, rtol=0.51 * eps + 1e-4, atol=1e-4)
        right = rotated(x.double(), *(t.double() for t in table), places(offsets, seqlen), interleaved)
        torch.testing.assert_close(ours.double(), right, rtol=eps, atol=1e-5)
    assert torch.equal(found[2], v)


def test_the_table_is_kept_until_it_is_too_short_of_another_dtype_or_useless_for_training() -> None:
    rotary = RotaryEmbedding(8)
    rotary._update_cos_sin_cache(10, device="cpu", dtype=torch.float32)
    first = rotary._cos_cached
    rotary._update_cos_sin_cache(7, device="cpu", dtype=torch.float32)
    assert rotary._cos_cached is first and rotary._seq_len_cached == 10
    rotary._update_cos_sin_cache(11, device="cpu", dtype=torch.float32)
    assert rotary._cos_cached is not None and rotary._cos_cached.shape == (11, 4)
    with torch.inference_mode():
        rotary._update_cos_sin_cache(11, device="cpu", dtype=torch.bfloat16)
    assert rotary._cos_cached.dtype == torch.bfloat16
    qkv = randn(B, S, 3, H, 8, dtype=torch.bfloat16).requires_grad_()
    rotary(qkv * 1.0).sum().backward()  # autograd cannot save inference tensors
    assert qkv.grad is not None


def test_the_older_keyword_pos_idx_in_fp32_is_accepted_by_subclasses() -> None:
    class BackwardResult(RotaryEmbedding):
        def __init__(self, dim: int, base: float) -> None:
            super().__init__(dim=dim, base=base, pos_idx_in_fp32=True, device="cpu", interleaved=False)

    rotary = BackwardResult(8, 10000.0)
    assert rotary.scale_base is None and rotary._seq_len_cached == 0 and rotary._cos_cached is None
    assert dict(rotary.named_buffers()).keys() == {"inv_freq"} and rotary.state_dict() == {}


# ---------------------------------------------------------------- blocks: dropout, add, norm, mixer and MLP

WIDTH = 8
BLOCK_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NORMS = {"layer": nn.LayerNorm, "rms": RMSNorm, "centred": partial(RMSNorm, zero_centered_weight=True)}
PARTS: dict[str, Any] = dict.fromkeys(("mixer_cls", "mlp_cls"), partial(nn.Linear, out_features=WIDTH))


def scrambled(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Random parameters, norms included: ones and zeros would hide a forgotten weight or bias."""
    for index, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    return module.to(dtype)


def norm(params: Parameters, name: str, kind: str, x: Tensor) -> Tensor:
    weight = params[f"{name}.weight"]
    if kind == "layer":
        return F.layer_norm(x, (WIDTH,), weight, params[f"{name}.bias"], 1e-5)
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x * root * (1 + weight if kind == "centred" else weight)


def linear(params: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])


class Pair(nn.Linear):
    """A branch with a residual of its own."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), 2 * x


def plain_prenorm(kind: str, fp32: bool, params: Parameters, hidden: Tensor, residual: Tensor | None = None) -> Any:
    dtype = params["norm1.weight"].dtype
    halves = [("norm1", "mixer"), ("norm2", "mlp")] if "mlp.weight" in params else [("norm1", "mixer")]
    for norm_name, part in halves:
        residual = hidden if residual is None else hidden + residual
        hidden = linear(params, part, norm(params, norm_name, kind, residual.to(dtype)))
        residual = residual.float() if fp32 and dtype != torch.float64 else residual
    return hidden, residual


def plain_postnorm(kind: str, kept: int, params: Parameters, hidden: Tensor) -> Tensor:
    hidden = norm(params, "norm1", kind, linear(params, "mixer", hidden) + kept * hidden)
    return norm(params, "norm2", kind, linear(params, "mlp", hidden) + kept * hidden)


def plain_parallel(kind: str, tied: bool, params: Parameters, first: Tensor, *rest: Tensor) -> Any:
    residual = first + (sum(rest) if rest else 0)
    total = residual.to(params["norm1.weight"].dtype)
    normed = norm(params, "norm1", kind, total)
    second = normed if tied else norm(params, "norm2", kind, total)
    return linear(params, "mixer", normed), linear(params, "mlp", second), residual


PAIRS: dict[str, Any] = {name: partial(Pair, out_features=WIDTH) for name in PARTS}
# name: (class, options, plain with the kind of norm and one more, that one, numbers of inputs)
BLOCKS: dict[str, tuple[Any, dict[str, Any], Any, Any, tuple[int, ...]]] = {
    "adds, then normalises": (Block, {}, plain_prenorm, False, (1, 2)),
    "the residual in fp32": (Block, {"residual_in_fp32": True}, plain_prenorm, True, (1, 2)),
    "fp32 inputs": (Block, {"fused_dropout_add_ln": False}, plain_prenorm, False, (2,)),
    "no MLP": (Block, {"mlp_cls": nn.Identity}, plain_prenorm, False, (1, 2)),
    "normalises after each branch": (Block, {"prenorm": False}, plain_postnorm, 1, (1,)),
    "branches that return what they are added to": (
        Block, {"prenorm": False, "return_residual": True, **PAIRS}, plain_postnorm, 2, (1,)
    ),
    "parallel": (ParallelBlock, {}, plain_parallel, False, (1, 3)),
    "parallel, one norm": (ParallelBlock, {"tied_norm": True}, plain_parallel, True, (1, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("form", "dtype", "kind", "fused"), pairwise(BLOCKS, BLOCK_DTYPES, NORMS, (False, True)))
def test_a_block_is_sums_norms_and_branches(form: str, dtype: torch.dtype, kind: str, fused: bool) -> None:
    block_cls, options, plain, more, numbers = BLOCKS[form]
    block = block_cls(WIDTH, **{"norm_cls": NORMS[kind], "fused_dropout_add_ln": fused, **PARTS, **options})
    of_hidden = torch.float32 if form == "fp32 inputs" else dtype
    of_residual = torch.float32 if form in ("fp32 inputs", "the residual in fp32") else dtype
    for number in numbers:
        kinds = [of_hidden, *[of_residual] * (number - 1)]
        inputs = [randn(2, 5, WIDTH, seed=seed, dtype=each) for seed, each in enumerate(kinds)]
        check_module(scrambled(block, dtype), partial(plain, kind, more), *inputs)


@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
def test_the_default_parts_are_attention_with_heads_of_64_and_a_fourfold_mlp(block_cls: Any) -> None:
    block = block_cls(128)
    assert isinstance(block.mixer, MHA) and block.mixer.num_heads == 2
    assert isinstance(block.mlp, Mlp) and block.mlp.fc1.out_features == 512
    assert set(block.state_dict()) == {
        f"{part}.{name}"
        for part in ("mixer.Wqkv", "mixer.out_proj", "norm1", "mlp.fc1", "mlp.fc2", "norm2")
        for name in ("weight", "bias")
    }
    assert block(randn(1, 3, 128))[-1].shape == (1, 3, 128)
    assert block.allocate_inference_cache(2, 7).shape == (2, 7, 2, 2, 64)


def test_a_mixer_subset_cuts_the_residual_and_the_callers_options_stay_as_they_are() -> None:
    block = Block(64, partial(MHA, num_heads=1, cross_attn=True), nn.Identity)
    options: dict[str, Any] = {}
    hidden, residual = block(randn(2, 5, 64), mixer_subset=torch.tensor([0, 3]), mixer_kwargs=options)
    assert hidden.shape == residual.shape == (2, 2, 64) and options == {}


class Ones(nn.Module):
    """A branch of ones."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


BRANCHES = [
    # options, and what the sum may be: twos of the first branch, ones of the second, and a residual of 10
    ({"resid_dropout1": 0.5}, {11, 15}),
    ({"resid_dropout2": 0.5}, {12, 14}),
    ({"resid_dropout1": 0.5, "resid_dropout2": 0.5}, {10, 12, 14, 16}),
    ({"drop_path1": 0.5}, {11, 15}),
    ({"drop_path2": 0.5}, {12, 14}),
]


@pytest.mark.parametrize(
    ("block_cls", "options", "drawn"),
    [(Block, *branches) for branches in BRANCHES] + [(ParallelBlock, *branches) for branches in BRANCHES[:3]],
)
@pytest.mark.parametrize("fused", [False, True])
def test_each_branch_has_its_own_dropout_and_drop_path_in_training_only(
    block_cls: Any, fused: bool, options: dict[str, float], drawn: set[int]
) -> None:
    block = block_cls(WIDTH, Ones, Ones, fused_dropout_add_ln=fused, **options)
    x = torch.ones(64, 4, WIDTH)
    given = (2 * x, x, 10 * x) if block_cls is ParallelBlock else (2 * x, 10 * x)
    torch.manual_seed(0)
    *_, total = block(*given)
    assert set(total.unique().tolist()) == drawn
    by_sample = (total == total[:, :1, :1]).all()
    assert by_sample == any(name.startswith("drop_path") for name in options)
    *_, total = block.eval()(*given)
    assert (total == 13).all()


def test_stochastic_depth_draws_for_each_row_or_once() -> None:
    torch.manual_seed(0)
    x = torch.ones(100, 3)
    by_row = StochasticDepth(0.25, "row")(x)
    assert set(by_row.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert (by_row == by_row[:, :1]).all() and 60 < (by_row[:, 0] > 0).sum() < 90
    assert len(StochasticDepth(0.5, "batch")(x).unique()) == 1
    assert StochasticDepth(0.5, "row").eval()(x) is x
    assert (StochasticDepth(1.0, "row")(x) == 0).all()


@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
def test_norms_are_marked_for_sequence_parallel_training(block_cls: Any) -> None:
    block = block_cls(WIDTH, sequence_parallel=True, mark_shared_params=True, **PARTS)
    marked = {name for name, p in block.named_parameters() if getattr(p, "_sequence_parallel", False)}
    shared = {name for name, p in block.named_parameters() if getattr(p, "_shared_params", False)}
    assert marked == shared == {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
    plain = block_cls(WIDTH, **PARTS)
    assert not any(hasattr(p, "_sequence_parallel") or hasattr(p, "_shared_params") for p in plain.parameters())
