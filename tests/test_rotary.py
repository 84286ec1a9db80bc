"""Rotary embeddings against a rotation of complex numbers in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat.layers.rotary import (
    RotaryEmbedding,
    _apply_rotary_emb_qkv,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)
from flash_attn_compat.ops.triton.rotary import apply_rotary
from tests.plain import pairwise
from tests.support import cumulative, randn

B, S, H, D, TABLE = 2, 5, 3, 16, 9
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def tables(rotary_dim: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
    angles = randn(TABLE, rotary_dim // 2, seed=seed, dtype=torch.float64) * 3
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False) -> Tensor:
    """x (..., nheads, headdim) times exp(i angle) in fp64; the identity where positions fall off the table."""
    half = cos.shape[1]
    z = torch.complex(cos.double(), sin.double())
    inside = (positions >= 0) & (positions < cos.shape[0])
    phase = torch.where(inside[..., None], z[positions.clamp(0, cos.shape[0] - 1)], 1.0)[..., None, :]
    y = x.double()
    if interleaved:
        pairs = y[..., : 2 * half].unflatten(-1, (half, 2))
        turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * phase).flatten(-2)
    else:
        value = torch.complex(y[..., :half], y[..., half : 2 * half]) * phase
        turned = torch.cat((value.real, value.imag), dim=-1)
    return torch.cat((turned, y[..., 2 * half :]), dim=-1)


def assert_rounded_once(actual: Tensor, expected: Tensor) -> None:
    """One rounding of the fp64 value, and a few fp32 roundings before it: arithmetic in bf16 misses it."""
    eps = torch.finfo(actual.dtype).eps
    wide = torch.finfo(torch.promote_types(actual.dtype, torch.float32)).eps
    torch.testing.assert_close(actual.double(), expected, rtol=eps / 2 + wide, atol=8 * wide)


def assert_adjoint(rotation: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Of what is linear, the gradient. (gradcheck's fast mode cannot tell a square matrix from its transpose.)"""
    y, g = randn(*x.shape, seed=8, dtype=x.dtype), randn(*x.shape, seed=9, dtype=x.dtype)
    (dx,) = torch.autograd.grad(rotation(x.clone()), x, g)
    torch.testing.assert_close((dx * y).sum(), (g * rotation(y.clone())).sum())


def int_positions(offset: int) -> Tensor:
    return (torch.arange(S) + offset).expand(B, S)


OFFSETS = [0, 4, torch.tensor([3, 0], dtype=torch.int32), torch.tensor([TABLE - 2, -1])]


@pytest.mark.parametrize(
    ("dtype", "table_dtype", "interleaved", "rotary_dim", "offsets", "inplace"),
    pairwise(DTYPES, (None, torch.float32), (False, True), (2, 10, 16), OFFSETS, (False, True)),
)
def test_a_dense_rotation_is_exact(
    dtype: torch.dtype, table_dtype: Any, interleaved: bool, rotary_dim: int, offsets: Any, inplace: bool
) -> None:
    """With an offset of each sequence too; what it puts off the table is left alone."""
    x, (cos, sin) = randn(B, S, H, D, dtype=dtype), tables(rotary_dim, table_dtype or dtype)
    kept = x.clone()
    out = apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets=offsets)
    assert out.dtype == dtype and out.shape == x.shape and (out.data_ptr() == x.data_ptr()) == inplace
    positions = (offsets[:, None] if isinstance(offsets, Tensor) else offsets) + torch.arange(S).expand(B, S)
    assert_rounded_once(out, rotated(kept, cos, sin, positions, interleaved))
    assert torch.equal(out[..., rotary_dim:], kept[..., rotary_dim:])
    outside = (positions < 0) | (positions >= TABLE)
    assert torch.equal(out[outside], kept[outside])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 2, torch.tensor([4, 0, 1], dtype=torch.int32)])
def test_packed_sequences_are_rotated_from_their_own_start(interleaved: bool, offsets: Any) -> None:
    cu_seqlens = torch.tensor([1, 5, 5, 11], dtype=torch.int32)
    x, (cos, sin) = randn(12, H, D), tables(10)
    per_sequence = offsets.tolist() if isinstance(offsets, Tensor) else [offsets] * 3
    positions = torch.full((12,), -1)
    for start, stop, offset in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], per_sequence, strict=False):
        positions[start:stop] = torch.arange(stop - start) + offset
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, max_seqlen=6)
    assert_rounded_once(out, rotated(x, cos, sin, positions, interleaved))
    assert torch.equal(out[[0, 11]], x[[0, 11]])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_view_is_rotated_in_place_through_its_strides(interleaved: bool) -> None:
    qkv, (cos, sin) = randn(B, 3, H, S, 24), tables(10)
    untouched = qkv.clone()
    view = qkv[:, 1, :, :, 3:19].transpose(1, 2)
    expected = rotated(view, cos, sin, int_positions(0), interleaved)
    result = apply_rotary(view, cos, sin, interleaved=interleaved, inplace=True)
    assert result is view
    assert_rounded_once(qkv[:, 1, :, :, 3:19].transpose(1, 2), expected)
    qkv[:, 1, :, :, 3:13] = untouched[:, 1, :, :, 3:13]
    assert torch.equal(qkv, untouched)


@pytest.mark.parametrize("inplace", [False, True])
def test_apply_rotary_itself_is_not_differentiable_and_accepts_leaves(inplace: bool) -> None:
    x, (cos, sin) = randn(B, S, H, D).requires_grad_(), tables(D)
    expected = rotated(x.detach(), cos, sin, int_positions(0))
    version = x._version
    out = apply_rotary(x, cos, sin, inplace=inplace)
    assert_rounded_once(out.detach(), expected)
    assert x._version == version and (out is x) == inplace and out.grad_fn is None


@pytest.mark.parametrize(("inplace", "interleaved", "packed"), pairwise(*[(False, True)] * 3))
def test_the_gradient_is_the_conjugate_rotation(inplace: bool, interleaved: bool, packed: bool) -> None:
    cos, sin = tables(10, torch.float64)
    options: dict[str, Any] = {"seqlen_offsets": torch.tensor([1, 3])}
    x = randn(B, S, H, D, dtype=torch.float64)
    if packed:
        x = x.flatten(0, 1)
        options |= {"cu_seqlens": cumulative(4, 6), "max_seqlen": 6}
    x.requires_grad_()
    assert_adjoint(lambda t: apply_rotary_emb(t, cos, sin, interleaved, inplace, **options), x)


def test_an_in_place_rotation_of_a_leaf_writes_it_and_gives_its_gradient() -> None:
    leaf, (cos, sin) = randn(B, S, H, D).requires_grad_(), tables(D)
    before, pointer, version = leaf.detach().clone(), leaf.data_ptr(), leaf._version
    out = apply_rotary_emb(leaf, cos, sin, inplace=True)
    assert out.data_ptr() == pointer and leaf._version == version and out.grad_fn is not None
    assert_rounded_once(leaf.detach(), rotated(before, cos, sin, int_positions(0)))
    grad = randn(B, S, H, D, seed=3)
    kept = grad.clone()
    out.backward(grad)
    assert torch.equal(grad, kept)
    assert leaf.grad is not None
    assert_rounded_once(leaf.grad, rotated(grad, cos, -sin, int_positions(0)))


def test_outputs_of_unbind_can_be_rotated_in_place_with_gradients() -> None:
    leaf, (cos, sin) = randn(B, S, 3, H, D, dtype=torch.float64).requires_grad_(), tables(D, torch.float64)
    q, k, v = (leaf * 1.0).unbind(dim=2)
    q = apply_rotary_emb_func(q, cos, sin, inplace=True)
    (q * k * v).sum().backward()
    qr, kr, vr = leaf.detach().unbind(dim=2)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[:, :, 0], rotated(kr * vr, cos, -sin, int_positions(0)))
    torch.testing.assert_close(leaf.grad[:, :, 1], rotated(qr, cos, sin, int_positions(0)) * vr)


@pytest.mark.parametrize(
    ("num_heads_q", "own_key_tables", "offsets"), pairwise((None, 4), (False, True), (2, torch.tensor([1, 3])))
)
def test_packed_qkv_is_rotated_in_place_with_gradients(
    num_heads_q: int | None, own_key_tables: bool, offsets: Any
) -> None:
    cos, sin = tables(10, torch.float64)
    cos_k, sin_k = tables(10, torch.float64, seed=5) if own_key_tables else (None, None)
    shape = (B, S, 3, 2, D) if num_heads_q is None else (B, S, 4 + 2 * 2, D)
    leaf = randn(*shape, dtype=torch.float64).requires_grad_()

    def call(t: Tensor) -> Tensor:
        return apply_rotary_emb_qkv_(t, cos, sin, cos_k, sin_k, seqlen_offsets=offsets, num_heads_q=num_heads_q)

    qkv = leaf.detach().clone()
    assert call(qkv).data_ptr() == qkv.data_ptr()
    positions = (offsets[:, None] if isinstance(offsets, Tensor) else offsets) + torch.arange(S).expand(B, S)
    q, k, v = leaf.detach().unbind(2) if num_heads_q is None else leaf.detach().split((4, 2, 2), dim=2)
    kc, ks = (cos, sin) if cos_k is None or sin_k is None else (cos_k, sin_k)
    parts = (rotated(q, cos, sin, positions), rotated(k, kc, ks, positions), v)
    expected = torch.stack(parts, 2) if num_heads_q is None else torch.cat(parts, 2)
    torch.testing.assert_close(qkv, expected)
    assert_adjoint(call, leaf)


def test_packed_kv_has_only_its_keys_rotated_and_out_of_place_leaves_packed_qkv() -> None:
    leaf, (cos, sin) = randn(B, S, 3, H, D, dtype=torch.float64).requires_grad_(), tables(10, torch.float64)
    kv = leaf.detach()[:, :, 1:].clone()
    assert apply_rotary_emb_kv_(kv, cos, sin, seqlen_offsets=1).data_ptr() == kv.data_ptr()
    torch.testing.assert_close(kv[:, :, 0], rotated(leaf.detach()[:, :, 1], cos, sin, int_positions(1)))
    assert torch.equal(kv[:, :, 1], leaf.detach()[:, :, 2])
    assert_adjoint(lambda t: apply_rotary_emb_kv_(t, cos, sin), kv.clone().requires_grad_())
    kept = leaf.detach().clone()
    out = _apply_rotary_emb_qkv(leaf.detach(), cos, sin)
    assert torch.equal(leaf.detach(), kept) and torch.equal(out, apply_rotary_emb_qkv_(kept, cos, sin))


@pytest.mark.parametrize(("heads", "message"), [(None, "num_heads_q must be passed"), (3, "nheads_q \\+ 2 nheads_k")])
def test_the_heads_of_packed_qkv_must_add_up(heads: int | None, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        apply_rotary_emb_qkv_(randn(B, S, 8, D), *tables(D), num_heads_q=heads)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_batch", [False, True])
def test_the_plain_torch_version_agrees(interleaved: bool, per_batch: bool) -> None:
    x, (cos, sin) = randn(B, S, H, D, dtype=torch.float64), tables(10, torch.float64)
    cos, sin = cos[:S], sin[:S]
    given = (cos.expand(B, S, 5), sin.expand(B, S, 5)) if per_batch else (cos, sin)
    torch.testing.assert_close(
        apply_rotary_emb_torch(x, *given, interleaved=interleaved),
        rotated(x, cos, sin, int_positions(0), interleaved),
    )


def test_rotate_half_negates_the_second_of_each_pair() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rotate_half(x).tolist() == [-3, -4, 1, 2]
    assert rotate_half(x, interleaved=True).tolist() == [-2, 1, -4, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": randn(B, S, H, 8)}, "rotary_dim must be <= headdim"),
        ({"x": randn(B, TABLE + 1, H, D)}, "seqlen_ro must be >= seqlen"),
        ({"sin": tables(8)[1]}, "sin has shape"),
        ({"seqlen_offsets": TABLE - S + 1}, "seqlen_offsets"),
        ({"seqlen_offsets": -1}, "seqlen_offsets"),
        ({"seqlen_offsets": torch.zeros(B + 1, dtype=torch.int32)}, "seqlen_offsets has shape"),
        ({"seqlen_offsets": torch.zeros(B)}, "seqlen_offsets has dtype"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "If cu_seqlens is passed in, then max_seqlen must be passed"),
        ({"cu_seqlens": torch.tensor([0, 3]), "max_seqlen": 3}, "expected \\(total, nheads, headdim\\)"),
    ],
)
def test_arguments_that_do_not_fit_are_assertion_errors_and_write_nothing(change: dict[str, Any], message: str) -> None:
    cos, sin = tables(D)
    arguments: dict[str, Any] = {"x": randn(B, S, H, D), "cos": cos, "sin": sin, "inplace": True} | change
    kept = arguments["x"].clone()
    with pytest.raises(AssertionError, match=message):
        apply_rotary(**arguments)
    assert torch.equal(arguments["x"], kept)


def test_head_dims_above_256_are_accepted() -> None:
    x, (cos, sin) = randn(1, S, 1, 320), tables(320)
    assert_rounded_once(apply_rotary(x, cos, sin), rotated(x, cos, sin, int_positions(0)[:1]))


@pytest.mark.parametrize("shape", [(0, S, H, D), (B, 0, H, D)])
def test_empty_inputs_give_empty_outputs(shape: tuple[int, ...]) -> None:
    cos, sin = tables(D)
    offsets = torch.zeros(shape[0], dtype=torch.int32)
    assert apply_rotary(torch.zeros(shape), cos, sin).shape == shape
    assert apply_rotary(torch.zeros(shape), cos, sin, seqlen_offsets=offsets).shape == shape
    assert apply_rotary(torch.zeros(B, 0, H, D), cos[:0], sin[:0], torch.zeros(B, dtype=torch.int32)).numel() == 0


# RotaryEmbedding


def angles_of(seqlen: int, dim: int, base: float = 10000.0) -> Tensor:
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.outer(torch.arange(seqlen, dtype=torch.float64), frequencies)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_module_rotates_qkv_in_place_by_its_angles(interleaved: bool) -> None:
    rotary = RotaryEmbedding(8, base=500.0, interleaved=interleaved)
    qkv = randn(B, S, 3, H, D)
    q, k, v = qkv.clone().unbind(2)
    out = rotary(qkv, seqlen_offset=3)
    assert out.data_ptr() == qkv.data_ptr()
    angles = angles_of(S + 3, 8, 500.0)
    for index, part in enumerate((q, k)):
        expected = rotated(part, angles.cos(), angles.sin(), int_positions(3), interleaved)
        torch.testing.assert_close(out[:, :, index].double(), expected, rtol=1e-6, atol=2e-6)
    assert torch.equal(out[:, :, 2], v)


def test_the_module_rotates_q_and_kv_with_a_tensor_offset_once_max_seqlen_is_known() -> None:
    rotary = RotaryEmbedding(D)
    q, kv, offset = randn(B, 1, H, D), randn(B, 1, 2, H, D, seed=2), torch.tensor([4, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="pass max_seqlen"):
        rotary(q.clone(), kv.clone(), seqlen_offset=offset)
    q_out, kv_out = rotary(q.clone(), kv.clone(), seqlen_offset=offset, max_seqlen=6)
    angles = angles_of(6, D)

    def turn(t: Tensor) -> Tensor:
        return rotated(t, angles.cos(), angles.sin(), offset[:, None])

    torch.testing.assert_close(q_out.double(), turn(q), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(kv_out[:, :, 0].double(), turn(kv[:, :, 0]), rtol=1e-6, atol=2e-6)
    assert torch.equal(kv_out[:, :, 1], kv[:, :, 1])


def test_xpos_scales_queries_and_keys_inversely() -> None:
    rotary = RotaryEmbedding(D, scale_base=512)
    rotary._update_cos_sin_cache(6, dtype=torch.float64)
    angles = angles_of(6, D)
    scale = (torch.arange(0, D, 2, dtype=torch.float64) + 0.4 * D) / (1.4 * D)
    power = (torch.arange(6, dtype=torch.float64) - 3) / 512
    factor = scale ** power[:, None]
    for actual, expected in (
        (rotary._cos_cached, angles.cos() * factor),
        (rotary._sin_cached, angles.sin() * factor),
        (rotary._cos_k_cached, angles.cos() / factor),
        (rotary._sin_k_cached, angles.sin() / factor),
    ):
        assert actual is not None
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    qkv = randn(B, 6, 3, H, D, dtype=torch.float64)
    k = qkv[:, :, 1].clone()
    out = rotary(qkv)
    expected = rotated(k, angles.cos() / factor, angles.sin() / factor, torch.arange(6).expand(B, 6))
    torch.testing.assert_close(out[:, :, 1], expected, rtol=1e-5, atol=1e-5)


def test_the_table_is_kept_until_it_is_too_short_or_of_another_dtype() -> None:
    rotary = RotaryEmbedding(8)
    rotary._update_cos_sin_cache(10, device="cpu", dtype=torch.float32)
    first = rotary._cos_cached
    rotary._update_cos_sin_cache(7, device="cpu", dtype=torch.float32)
    assert rotary._cos_cached is first and rotary._seq_len_cached == 10
    rotary._update_cos_sin_cache(11, device="cpu", dtype=torch.float32)
    assert rotary._cos_cached is not None and rotary._cos_cached.shape == (11, 4)
    rotary._update_cos_sin_cache(11, device="cpu", dtype=torch.bfloat16)
    assert rotary._cos_cached.dtype == torch.bfloat16


def test_a_table_made_in_inference_mode_is_rebuilt_for_training() -> None:
    rotary = RotaryEmbedding(8)
    with torch.inference_mode():
        rotary._update_cos_sin_cache(S, dtype=torch.float32)
    qkv = randn(B, S, 3, H, 8).requires_grad_()
    rotary(qkv * 1.0).sum().backward()
    assert qkv.grad is not None


def test_a_module_cast_to_half_keeps_fp32_angles() -> None:
    exact, cast = RotaryEmbedding(64), RotaryEmbedding(64).to(torch.bfloat16)
    for rotary in (exact, cast):
        rotary._update_cos_sin_cache(3000, dtype=torch.float32)
    assert exact._cos_cached is not None and torch.equal(exact._cos_cached, cast._cos_cached)


def test_the_older_keyword_pos_idx_in_fp32_is_accepted_by_subclasses() -> None:
    class Derived(RotaryEmbedding):
        def __init__(self, dim: int, base: float) -> None:
            super().__init__(dim=dim, base=base, pos_idx_in_fp32=True, device="cpu", interleaved=False)

    rotary = Derived(8, 10000.0)
    assert rotary.scale_base is None and rotary._seq_len_cached == 0 and rotary._cos_cached is None
    assert dict(rotary.named_buffers()).keys() == {"inv_freq"} and rotary.state_dict() == {}
