"""Caches of 8-bit floats, on backends of any device, against fp64 attention over the dequantised values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import (
    fa3,
    flash_attn_2_cuda,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn_compat.core import eight_bit
from flash_attn_compat.flash_attn_interface import _flash_attn_varlen_forward
from tests.forms.inputs import cumulative, ints, randn
from tests.forms.support import on_general_backends

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF = torch.float16
both_dtypes = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
# As a user gives a descale: none, a number, one for each sequence and key head, one for each head.
DESCALES: dict[str, Any] = {
    "none": (None, None),
    "numbers": (0.5, 3.0),
    "heads": (torch.tensor([[0.5, 2.0]]), torch.tensor([[3.0, 0.25]])),
    "sequences": (torch.tensor([[0.5], [2.0]]), torch.tensor([[3.0, 0.25], [1.0, 7.0]])),
}


def values(cache: Tensor, descale: Any) -> Tensor:
    """(batch, seqlen, heads, head_dim) in fp64."""
    wide = cache.double()
    if isinstance(descale, Tensor):
        return wide * descale.double()[:, None, :, None]
    return wide * (1.0 if descale is None else descale)


def cache(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return (2.0 * randn(*shape)).to(dtype)


def assert_right(out: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Twice the error of the plain computation in q's dtype, at most."""
    epsilon = torch.finfo(out.dtype).eps * float(exact.abs().max())
    allowed = 2 * max(float((plain.double() - exact).abs().max()), epsilon)
    assert float((out.double() - exact).abs().max()) <= allowed


@both_dtypes
@pytest.mark.parametrize("given", DESCALES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@on_general_backends
def test_attention_over_a_cache_is_that_over_its_dequantised_values(
    backend: str, half: torch.dtype, given: str, dtype: torch.dtype
) -> None:
    q, k, v = randn(2, 3, 4, 24).to(half), cache(2, 21, 2, 24, dtype=dtype), cache(2, 21, 2, 24, dtype=dtype)
    k_descale, v_descale = DESCALES[given]
    options: dict[str, Any] = {"cache_seqlens": ints(21, 9), "causal": True}
    with use_backend(backend):
        out = flash_attn_with_kvcache(q, k, v, k_descale=k_descale, v_descale=v_descale, **options)
    k_exact, v_exact = values(k, k_descale), values(v, v_descale)
    exact = flash_attn_with_kvcache(q.double(), k_exact, v_exact, **options)
    plain = flash_attn_with_kvcache(q, k_exact.to(half), v_exact.to(half), **options)
    assert isinstance(out, Tensor) and isinstance(plain, Tensor) and isinstance(exact, Tensor)
    assert_right(out, plain, exact)


@on_general_backends
@pytest.mark.parametrize("length", [5, None, "tensor"])
def test_dense_slices_and_whole_caches_are_dequantised_too(backend: str, length: Any) -> None:
    q, k, v = randn(2, 1, 2, 16).half(), cache(2, 9, 2, 16), cache(2, 9, 2, 16)
    lengths = ints(5, 7) if length == "tensor" else length
    with use_backend(backend):
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, k_descale=2.0)
    expected = flash_attn_with_kvcache(q, 2 * k.half(), v.half(), cache_seqlens=lengths)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@on_general_backends
def test_packed_calls_over_pages_read_pages_of_8_bits(backend: str) -> None:
    pages_k, pages_v, table = cache(5, 8, 2, 16), cache(5, 8, 2, 16), ints(4, 1, 0, 3).view(2, 2)
    q, starts, lengths = randn(5, 4, 16).half(), cumulative(2, 3), cumulative(13, 6)
    given = {"block_table": table, "causal": True}
    descales = {"k_descale": torch.tensor([[0.5, 2.0]]), "v_descale": 0.25}
    k = (pages_k.float() * descales["k_descale"].view(1, 1, 2, 1)).half()  # type: ignore[attr-defined]
    expected = flash_attn_varlen_func(q, k, (pages_v.float() / 4).half(), starts, lengths, 3, 13, **given)
    with use_backend(backend):
        out = flash_attn_varlen_func(q, pages_k, pages_v, starts, lengths, 3, 13, **given, **descales)
        private = _flash_attn_varlen_forward(
            q, pages_k, pages_v, starts, lengths, 3, 13, 0.0, 16**-0.5, True, block_table=table, **descales
        )[0]
        raw = flash_attn_2_cuda.varlen_fwd(
            q, pages_k, pages_v, None, starts, lengths, None, None, table, None, 3, 13, 0.0, 16**-0.5, False, True, -1,
            -1, 0.0, False, **descales,
        )[0]  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(out, private) and torch.equal(out, raw)


@both_dtypes
@pytest.mark.parametrize("given", DESCALES)
@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_are_divided_by_the_descale_and_rounded_to_the_nearest(
    paged: bool, given: str, dtype: torch.dtype
) -> None:
    q, new_k, new_v = randn(2, 1, 4, 16).half(), 20 * randn(2, 3, 2, 16).half(), 20 * randn(2, 3, 2, 16).half()
    k, v, lengths = cache(2, 16, 2, 16, dtype=dtype), cache(2, 16, 2, 16, dtype=dtype), ints(4, 11)
    k_descale, v_descale = DESCALES[given]
    table = {"block_table": ints(1, 0).view(2, 1)} if paged else {}
    flash_attn_with_kvcache(
        q, k, v, new_k, new_v, cache_seqlens=lengths, k_descale=k_descale, v_descale=v_descale, **table
    )
    for tensor, new, descale in ((k, new_k, k_descale), (v, new_v, v_descale)):
        for b, start in enumerate((4, 11)):
            factor = 1.0 if descale is None else descale
            if isinstance(factor, Tensor):
                factor = factor[min(b, len(factor) - 1)][None, :, None]
            wide = (new[b].float() / factor).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
            row = tensor[1 - b if paged else b, start : start + 3]
            assert torch.equal(row.view(torch.uint8), wide.to(dtype).view(torch.uint8))


@both_dtypes
def test_too_large_numbers_become_the_largest_and_only_nan_becomes_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 1e-9]).view(1, 1, 1, 6)
    found, largest = eight_bit.quantize(x, None, 1.0, dtype).flatten().float(), torch.finfo(dtype).max
    assert found[:4].tolist() == [largest, -largest, largest, -largest]
    assert found[4].isnan() and found[5] == 0


def test_steps_of_decoding_append_to_and_read_the_same_cache() -> None:
    k, v = torch.zeros(2, 12, 2, 16).to(E4M3), torch.zeros(2, 12, 2, 16).to(E4M3)
    wide_k, wide_v = k.half(), v.half()
    for step in range(3):
        q, new_k, new_v = randn(2, 1, 4, 16).half(), randn(2, 1, 2, 16).half(), randn(2, 1, 2, 16).half()
        rounded = (new_k.to(E4M3).half(), new_v.to(E4M3).half())
        out = flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=step)
        expected = flash_attn_with_kvcache(q, wide_k, wide_v, *rounded, cache_seqlens=step)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


def test_flash_attention_3s_name_takes_descales() -> None:
    q, k, v = randn(2, 1, 4, 16).half(), cache(2, 8, 2, 16), cache(2, 8, 2, 16)
    descale = torch.full((2, 2), 0.5)
    out = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(8, 3), k_descale=descale, v_descale=descale)
    expected = flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(8, 3), k_descale=0.5, v_descale=0.5)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "k_descale's shape": (
        {"k_descale": torch.ones(3, 2)},
        r"k_descale must have shape .* \(2 or 1, 2 or 1\), got \(3, 2\)",
    ),
    "its dtype": ({"v_descale": torch.ones(1, 1).half()}, "v_descale must have dtype fp32"),
    "a descale of 0": ({"k_descale": 0.0}, "k_descale must be positive and finite, got 0.0"),
    "a text": ({"k_descale": "1"}, "for argument 'k_descale'"),
    "two dtypes": ({"v_cache": torch.zeros(2, 8, 2, 16).to(E5M2)}, "key and value must have the same dtype"),
    "q in fp32": ({"q": torch.zeros(2, 1, 4, 16)}, "need q in fp16 or bf16"),
    "new keys of 8 bits": (
        {"k": torch.zeros(2, 1, 2, 16).to(E4M3), "v": torch.zeros(2, 1, 2, 16).to(E4M3), "cache_seqlens": 1},
        "Key must have the same dtype as query",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_written(wrong: str) -> None:
    k = cache(2, 8, 2, 16)
    before, (changes, message) = k.clone(), WRONG[wrong]
    new = randn(2, 1, 2, 16).half()
    args = {
        "q": randn(2, 1, 4, 16).half(),
        "k_cache": k,
        "v_cache": cache(2, 8, 2, 16),
        "k": new,
        "v": new,
        "cache_seqlens": 3,
    }
    with pytest.raises(RuntimeError, match=message):
        flash_attn_with_kvcache(**args | changes)
    assert torch.equal(k.view(torch.uint8), before.view(torch.uint8))


def test_descales_of_16_bit_caches_and_dense_calls_of_8_bits_are_refused() -> None:
    q, k = randn(2, 1, 2, 16).half(), randn(2, 8, 2, 16).half()
    with pytest.raises(RuntimeError, match="k_descale is for keys and values of 8-bit floats"):
        flash_attn_with_kvcache(q, k, k, k_descale=2.0)
    with pytest.raises(RuntimeError, match="query and key must have the same dtype"):
        flash_attn_func(q, k.to(E4M3), k.to(E4M3))


def test_gradients_over_8_bits_are_refused() -> None:
    q, k = randn(5, 2, 16).half().requires_grad_(), cache(7, 2, 16)
    starts = cumulative(5), cumulative(7)
    with pytest.raises(RuntimeError, match="have no gradients"):
        flash_attn_varlen_func(q, k, k, *starts, 5, 7)
    with torch.no_grad():
        assert flash_attn_varlen_func(q, k, k, *starts, 5, 7).shape == q.shape


def test_a_compiled_step_is_the_eager_one() -> None:
    q, k, v, lengths = randn(2, 1, 4, 16).half(), cache(2, 8, 2, 16), cache(2, 8, 2, 16), ints(8, 3)
    descale = torch.tensor([[0.5, 2.0]])

    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, descale: Tensor) -> Any:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, k_descale=descale, v_descale=0.5)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, lengths, descale), step(q, k, v, lengths, descale))
