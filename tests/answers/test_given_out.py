"""A packed forward into the caller's out: by the kernel itself, or by a copy where a backend makes its own result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_with_kvcache, use_backend
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import CacheInputs, Options, PackedInputs
from flash_attn_compat.dispatch import kvcache, raw, sinks
from tests.kernels import emulate, fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord

STARTS = torch.tensor([0, 5, 38], dtype=torch.int32)
OPTIONS = Options(causal=True, max_seqlen_q=33, max_seqlen_k=33)
WITH_LSE = OPTIONS._replace(use=Feature.LSE)
no_emulator = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())


def tensors() -> PackedInputs:
    """A packed call's: two tokens more than the sequences have."""
    q, k, v = torch.randn(3, 40, 2, 32, generator=torch.Generator().manual_seed(0)).half()
    return PackedInputs(q, k, v, None, STARTS, STARTS)


def expected() -> Tensor:
    with use_backend("reference"):
        out: Tensor = raw.forward(tensors(), WITH_LSE)[0]
    return out


@no_emulator
def test_the_kernel_writes_to_the_given_out(turing: LaunchRecord) -> None:
    out = torch.full((40, 2, 32), torch.nan, dtype=torch.half)
    assert raw.forward_into(out, tensors(), OPTIONS) is None
    assert turing.last.fields["out"] == out.data_ptr()
    torch.testing.assert_close(out[:38], expected()[:38], rtol=1e-2, atol=2e-3)
    assert not out[38:].any()


@no_emulator
def test_the_lse_is_returned_where_it_is_asked_for(turing: LaunchRecord) -> None:
    out = torch.empty(40, 2, 32, dtype=torch.half)
    found = raw.forward_into(out, tensors(), WITH_LSE)
    assert found is not None
    lse = raw.forward(tensors(), WITH_LSE)[1]
    torch.testing.assert_close(found[:, :38], lse[:, :38])


@no_emulator
@pytest.mark.parametrize("layout", ["strided", "another backend", "copied inputs"])
def test_any_other_result_is_copied(turing: LaunchRecord, layout: str) -> None:
    memory = torch.full((40, 2, 64), torch.nan, dtype=torch.half)
    out = memory[..., :32] if layout == "strided" else torch.full((40, 2, 32), torch.nan, dtype=torch.half)
    q, *others = tensors()
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
    q, k, v, *_ = tensors()
    out, none = torch.full_like(q, torch.nan), torch.zeros(3, dtype=torch.int32)
    raw.forward_into(out, PackedInputs(q, k[:0], v[:0], None, STARTS, none), OPTIONS)
    assert not out.any()


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.zeros(40, 2, 33, dtype=torch.half), "out must have shape"),
        (torch.zeros(39, 2, 32, dtype=torch.half), "out must have shape"),
        (torch.zeros(1, 2, 32, dtype=torch.half), "out must have shape"),
        (torch.zeros(40, 2, 32), "out must have shape .* torch.float16"),
        (torch.zeros(40, 2, 32, dtype=torch.half, device="meta"), "out must be on"),
        (torch._neg_view(torch.zeros(40, 2, 32, dtype=torch.half)), "out must not be a lazily negated view"),
    ],
    ids=["wide", "short", "broadcastable", "dtype", "device", "negated"],
)
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_an_out_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, backend: str, out: Tensor, words: str
) -> None:
    found = fused_on_cpu.record(monkeypatch)
    with use_backend(backend), pytest.raises(RuntimeError, match=words):
        raw.forward_into(out, tensors(), OPTIONS)
    assert not found.seen and (out.is_meta or not out.any())


def test_an_out_beyond_its_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fused_on_cpu.record(monkeypatch)
    out = torch.zeros(40, 2, 32, dtype=torch.half)
    out.untyped_storage().resize_(100)
    with use_backend("fused"), pytest.raises(RuntimeError, match="out reaches beyond its memory"):
        raw.forward_into(out, tensors(), OPTIONS)
    assert not found.seen


def test_sinks_absorbed_in_place_are_those_of_absorb() -> None:
    out, lse = torch.randn(7, 3, 16).half(), torch.randn(3, 7)
    lse[1, 2], out[2, 1] = torch.inf, 0.0  # a row without keys
    sink = torch.randn(3)
    right = sinks.absorb(out, lse, sink)[0]
    sinks.absorb_in_place(out, lse, sink)
    torch.testing.assert_close(out, right, rtol=0, atol=0)
