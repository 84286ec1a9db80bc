"""Caches and pages beside the problems of verify: sinks, caches of 8-bit floats, and an out that the caller gives."""

from __future__ import annotations

from dataclasses import replace
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
from flash_attn_compat.core.append import Append, by_operators
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import CacheInputs, Options, PackedInputs
from flash_attn_compat.dispatch import kvcache, raw, sinks
from flash_attn_compat.flash_attn_interface import _flash_attn_varlen_forward
from tests.forms.inputs import STEP, cumulative, ints, qkv, randn
from tests.forms.plain import attention, attention_and_lse, pairwise
from tests.forms.support import GENERAL, RecordingReference, close, on_backend, on_general_backends
from tests.kernels import emulate, fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord

# Of 3 rows and 3 new keys over caches of 32 keys.
ROTATED = replace(STEP, rotary_dim=16, poison="").build().args
PLAIN = replace(STEP, poison="").build().args


@on_general_backends
def test_more_cache_rows_than_queries_use_the_first_ones(backend: str) -> None:
    q, k, v = randn(2, 3, 4, 16), randn(4, 32, 2, 16, seed=1), randn(4, 32, 2, 16, seed=2)
    close(on_backend(backend, flash_attn_with_kvcache, q, k, v), flash_attn_func(q, k[:2], v[:2]))


def test_the_result_never_requires_grad() -> None:
    q, k, v = (x.requires_grad_(index == 0) for index, x in enumerate(qkv()))
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=5, return_softmax_lse=True)
    assert not out.requires_grad and not lse.requires_grad


# ---------------------------------------------------------------- new keys behind an int length


@pytest.mark.parametrize("appends", [False, True])
def test_an_int_length_makes_a_dense_slice_and_needs_no_tensor(asked: RecordingReference, appends: bool) -> None:
    args = {**PLAIN, "cache_seqlens": 4, **({} if appends else {"k": None, "v": None})}
    flash_attn_with_kvcache(**args)
    (call,) = asked.computed
    assert call.is_dense and call.seqused_k is None and bool(call.use & Feature.APPEND) == appends
    assert call.k.data_ptr() == args["k_cache"].data_ptr()
    assert call.k.shape[1] == call.max_seqlen_k == (7 if appends else 4)
    assert [new and new.cache_seqlens for new in asked.appended] == [4 if appends else None]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("length", [30, 33, -1])
@pytest.mark.parametrize("page_size", [0, 8])
def test_an_int_length_that_does_not_fit_raises_on_every_device_before_anything_is_written(
    device: str, length: int, page_size: int
) -> None:
    call = replace(STEP, seqlens_k=(9, 9), lengths_as="int", page_size=page_size, poison="").build().to(device)
    before = [call.args[name].clone() for name in call.caches]
    with pytest.raises(RuntimeError, match=f"exceeds the capacity .* cache_seqlens is {length}"):
        flash_attn_with_kvcache(**call.args | {"cache_seqlens": length})
    if device == "cpu":
        assert all(torch.equal(call.args[name], x) for name, x in zip(call.caches, before))


def test_query_rows_beyond_the_rotary_table_are_not_rotated() -> None:
    """Three rows from position 31 on, of which the table of 32 holds one."""
    q, k_cache, v_cache, k, v = (ROTATED[name] for name in ("q", "k_cache", "v_cache", "k", "v"))
    call = AttentionCall(q, k_cache, v_cache, 1.0, mask=None, max_seqlen_q=3, max_seqlen_k=32)  # type: ignore[arg-type]
    turned = by_operators(call, Append(k[:, :1], v[:, :1], randn(32, 8).cos(), randn(32, 8).sin(), False, 31, True))
    assert torch.equal(turned[:, 1:], q[:, 1:]) and not torch.equal(turned[:, :1], q[:, :1])


# ---------------------------------------------------------------- attention sinks

SINKS = torch.tensor([-2.0, 0.0, 1.5, 6.0])
Q, K, V = qkv(sq=9, sk=5, h=4, hk=2)


def test_a_cache_row_without_keys_has_the_sink_as_its_lse() -> None:
    out, lse = flash_attn_with_kvcache(Q, K, V, cache_seqlens=ints(0, 5), return_softmax_lse=True, s_aux=SINKS)
    assert not out[0].any() and torch.equal(lse[0], SINKS[:, None].expand(-1, 9)) and out[1].any()


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_cache_is_read_with_sinks(return_lse: bool) -> None:
    caches = [torch.cat((x[:, :4], torch.zeros(2, 5, 2, 16)), 1) for x in (K, V)]
    found = flash_attn_with_kvcache(
        Q[:, :1], *caches, K[:, 4:], V[:, 4:], cache_seqlens=ints(4, 4), causal=True, return_softmax_lse=return_lse,
        s_aux=SINKS,
    )  # fmt: skip
    right = attention_and_lse(Q[:, :1], K, V, sinks=SINKS)
    torch.testing.assert_close(tuple(found) if return_lse else found, right if return_lse else right[0])


def test_pages_are_read_with_sinks_and_their_gradients_too() -> None:
    """Of a sequence without keys as well."""
    lengths_q, lengths_k, table = (1, 2, 1), (5, 3, 0), ints(1, 0, 1)[:, None]
    leaves = [randn(4, 4, 16).requires_grad_(), SINKS.clone().requires_grad_()]
    pages = randn(2, 256, 2, 16, seed=1), randn(2, 256, 2, 16, seed=2)
    starts = cumulative(*lengths_q), cumulative(*lengths_k)
    out = flash_attn_varlen_func(
        leaves[0], *pages, *starts, 2, 5, causal=True, block_table=table, s_aux=leaves[1]
    )  # fmt: skip
    each = [
        attention(rows[None], *(x[page, :length][None] for x in pages), window=(-1, 0), sinks=leaves[1])[0]
        for rows, page, length in zip(leaves[0].split(lengths_q), table[:, 0].tolist(), lengths_k)
    ]
    for found, right in zip(*([x, *torch.autograd.grad(x.sin().sum(), leaves)] for x in (out, torch.cat(each)))):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


# ------------------------------------------- caches of 8-bit floats, against fp64 attention over the dequantised values

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


@pytest.mark.parametrize(
    ("backend", "half", "given", "dtype", "lengths"),
    pairwise(GENERAL, (torch.float16, torch.bfloat16), DESCALES, (E4M3, E5M2), (ints(21, 9), 5, None)),
)
def test_attention_over_a_cache_is_that_over_its_dequantised_values(
    backend: str, half: torch.dtype, given: str, dtype: torch.dtype, lengths: Any
) -> None:
    """A part of the cache, a slice of it or all."""
    q, k, v = randn(2, 3, 4, 24).to(half), cache(2, 21, 2, 24, dtype=dtype), cache(2, 21, 2, 24, dtype=dtype)
    k_descale, v_descale = DESCALES[given]
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    with use_backend(backend):
        out = flash_attn_with_kvcache(q, k, v, k_descale=k_descale, v_descale=v_descale, **options)
    k_exact, v_exact = values(k, k_descale), values(v, v_descale)
    exact = flash_attn_with_kvcache(q.double(), k_exact, v_exact, **options)
    plain = flash_attn_with_kvcache(q, k_exact.to(half), v_exact.to(half), **options)
    assert isinstance(out, Tensor) and isinstance(plain, Tensor) and isinstance(exact, Tensor)
    assert_right(out, plain, exact)


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
def test_new_keys_are_divided_by_the_descale_rounded_and_read(paged: bool, given: str, dtype: torch.dtype) -> None:
    q, new_k, new_v = randn(2, 1, 4, 16).half(), 20 * randn(2, 3, 2, 16).half(), 20 * randn(2, 3, 2, 16).half()
    k, v, lengths = cache(2, 16, 2, 16, dtype=dtype), cache(2, 16, 2, 16, dtype=dtype), ints(4, 11)
    k_descale, v_descale = DESCALES[given]
    table = {"block_table": ints(1, 0).view(2, 1)} if paged else {}
    options: dict[str, Any] = {"k_descale": k_descale, "v_descale": v_descale, **table}
    out = flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=lengths, **options)
    torch.testing.assert_close(out, flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths + 3, **options))
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
    "of 16 bits": (
        dict.fromkeys(("k_cache", "v_cache"), torch.zeros(2, 8, 2, 16).half()) | {"k_descale": 2.0},
        "k_descale is for keys and values of 8-bit floats",
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
    args = {"q": randn(2, 1, 4, 16).half(), "k_cache": k, "v_cache": cache(2, 8, 2, 16), "cache_seqlens": 3}
    with pytest.raises(RuntimeError, match=message):
        flash_attn_with_kvcache(**args | {"k": new, "v": new} | changes)
    assert torch.equal(k.view(torch.uint8), before.view(torch.uint8))


def test_gradients_over_8_bits_and_dense_calls_of_them_are_refused() -> None:
    with pytest.raises(RuntimeError, match="query and key must have the same dtype"):
        flash_attn_func(randn(2, 1, 2, 16).half(), cache(2, 8, 2, 16), cache(2, 8, 2, 16))
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


# ------------------------------------------- a packed forward into the caller's out: by the kernel itself, or by a copy

STARTS = torch.tensor([0, 5, 38], dtype=torch.int32)
OPTIONS = Options(causal=True, max_seqlen_q=33, max_seqlen_k=33)
WITH_LSE = OPTIONS._replace(use=Feature.LSE)
no_emulator = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())


def packed_tensors() -> PackedInputs:
    """A packed call's: two tokens more than the sequences have."""
    q, k, v = torch.randn(3, 40, 2, 32, generator=torch.Generator().manual_seed(0)).half()
    return PackedInputs(q, k, v, None, STARTS, STARTS)


def expected() -> Tensor:
    with use_backend("reference"):
        out: Tensor = raw.forward(packed_tensors(), WITH_LSE)[0]
    return out


@no_emulator
@pytest.mark.parametrize("options", [OPTIONS, WITH_LSE], ids=["out", "out and LSE"])
def test_the_kernel_writes_to_the_given_out_and_returns_an_lse_if_asked(turing: LaunchRecord, options: Options) -> None:
    out = torch.full((40, 2, 32), torch.nan, dtype=torch.half)
    lse = raw.forward_into(out, packed_tensors(), options)
    assert turing.last.fields["out"] == out.data_ptr()
    torch.testing.assert_close(out[:38], expected()[:38], rtol=1e-2, atol=2e-3)
    assert not out[38:].any() and (lse is None) == (options is OPTIONS)
    if lse is not None:
        torch.testing.assert_close(lse[:, :38], raw.forward(packed_tensors(), WITH_LSE)[1][:, :38])


@no_emulator
@pytest.mark.parametrize("layout", ["strided", "another backend", "copied inputs"])
def test_any_other_result_is_copied(turing: LaunchRecord, layout: str) -> None:
    memory = torch.full((40, 2, 64), torch.nan, dtype=torch.half)
    out = memory[..., :32] if layout == "strided" else torch.full((40, 2, 32), torch.nan, dtype=torch.half)
    q, *others = packed_tensors()
    if layout == "copied inputs":
        q = q.mT.contiguous().mT
    with use_backend("reference" if layout == "another backend" else "fused"):
        raw.forward_into(out, PackedInputs(q, *others), OPTIONS)
    torch.testing.assert_close(out[:38], expected()[:38], rtol=1e-2, atol=2e-3)
    assert memory[..., 32:].isnan().all()


@no_emulator
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_decode_kernel_over_pages_writes_to_the_given_out(turing: LaunchRecord, return_lse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 1, 4, 32, generator=generator).half()
    k, v = torch.randn(2, 7, 16, 2, 32, generator=generator).half()
    lengths, table = torch.tensor([20, 0, 33], dtype=torch.int32), torch.tensor([[3, 1, 0], [0, 0, 0], [2, 6, 5]]).int()
    out = torch.full_like(q, torch.nan)
    x = CacheInputs(q, k, v, seqused_k=lengths, block_table=table)
    found = kvcache.attend_into(out, x, Options(causal=True, use=Feature.LSE if return_lse else 0))
    assert turing.last.fields["out"] == out.data_ptr() and turing.entries == ["decode"]
    with use_backend("reference"):
        right, lse = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True
        )
    torch.testing.assert_close(out, right, rtol=1e-2, atol=2e-3)
    assert (found is None) == (not return_lse)
    if found is not None:
        torch.testing.assert_close(found, lse)


@no_emulator
def test_without_keys_the_given_out_is_zero(turing: LaunchRecord) -> None:
    q, k, v, *_ = packed_tensors()
    out, none = torch.full_like(q, torch.nan), torch.zeros(3, dtype=torch.int32)
    raw.forward_into(out, PackedInputs(q, k[:0], v[:0], None, STARTS, none), OPTIONS)
    assert not out.any()


def out_of(tokens: int = 40, dim: int = 32, dtype: torch.dtype = torch.half, device: str = "cpu") -> Tensor:
    return torch.zeros(tokens, 2, dim, dtype=dtype, device=device)


def beyond_its_memory() -> Tensor:
    out = out_of()
    out.untyped_storage().resize_(100)
    return out


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (out_of(dim=33), "out must have shape"),
        (out_of(39), "out must have shape"),
        (out_of(1), "out must have shape"),
        (out_of(dtype=torch.float32), "out must have shape .* torch.float16"),
        (out_of(device="meta"), "out must be on"),
        (torch._neg_view(out_of()), "out must not be a lazily negated view"),
        (beyond_its_memory(), "out reaches beyond its memory"),
    ],
    ids=["wide", "short", "broadcastable", "dtype", "device", "negated", "beyond its memory"],
)
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_an_out_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, backend: str, out: Tensor, words: str
) -> None:
    found = fused_on_cpu.record(monkeypatch)
    with use_backend(backend), pytest.raises(RuntimeError, match=words):
        raw.forward_into(out, packed_tensors(), OPTIONS)
    assert not found.seen and (out.is_meta or out.untyped_storage().nbytes() == 100 or not out.any())


def test_sinks_absorbed_in_place_are_those_of_absorb() -> None:
    out, lse = torch.randn(7, 3, 16).half(), torch.randn(3, 7)
    lse[1, 2], out[2, 1] = torch.inf, 0.0  # a row without keys
    sink = torch.randn(3)
    right = sinks.absorb(out, lse, sink)[0]
    sinks.absorb_in_place(out, lse, sink)
    torch.testing.assert_close(out, right, rtol=0, atol=0)
