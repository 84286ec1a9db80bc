"""The kernels over caches of 8-bit floats, run by the emulator, against fp64 attention over the dequantised values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from flash_attn_compat import flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused import Fused, forward
from flash_attn_compat.backends.fused.choosing import enumeration
from flash_attn_compat.backends.fused.judging import self_test
from flash_attn_compat.backends.fused.launching import grids, layouts, params
from flash_attn_compat.core import eight_bit
from flash_attn_compat.core.features import Feature, Traits
from tests import fused_coverage
from tests.forms.inputs import cumulative, ints
from tests.forms.plain import all_but_thorough, in_turns, pairwise, some, some_of
from tests.kernels import emulate, fused_on_cpu
from tests.kernels.eight_bit_steps import NAN, Step, arguments, attend, check, steps
from tests.kernels.fused_on_cpu import LaunchRecord

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP16, BF16 = torch.float16, torch.bfloat16


STEP = Step()
WIDE = STEP._replace(head_dim=128, dtype=E5M2, half=BF16)
HALVES = {"rotary_interleaved": False}
DECODES = {
    "e4m3": STEP,
    "e5m2, bf16": WIDE,
    "e4m3, bf16, windows, softcap": STEP._replace(
        half=BF16, rows=3, options={"causal": True, "window_size": (40, 0), "softcap": 3.0}
    ),
    "head_dim 128, ALiBi": STEP._replace(
        head_dim=128, rows=2, options={"causal": True, "alibi_slopes": torch.linspace(0.1, 0.8, 8)}
    ),
    "head_dim 32, no keys, one key": STEP._replace(head_dim=32, lengths=(0, 1, 17), capacity=17),
    "head_dim 72, in no multiple of 16 bytes": STEP._replace(head_dim=72, dtype=E5M2),
    "head_dim 192 beside 128": STEP._replace(head_dim=192, head_dim_v=128, half=BF16),
    "head_dim 256": STEP._replace(head_dim=256, lengths=(70, 33), capacity=80, group=2),
    "head_dim 512": STEP._replace(head_dim=512, lengths=(70, 33), capacity=80, group=2),
    "more rows than keys": STEP._replace(rows=5, lengths=(3, 2), options={"causal": True}),
    "pages of 16 slots": STEP._replace(head_dim=128, page=16),
    "pages of 7 slots, heads first": WIDE._replace(page=7, heads_first=True),
    "pages of 32 slots": STEP._replace(page=32, half=BF16),
    "left padding": STEP._replace(options={"cache_leftpad": ints(5, 33)}),
}
APPENDS = {
    "one key": STEP._replace(new=1),
    "rotated": WIDE._replace(new=3, rows=3, rotary_dim=64, options={"causal": True}),
    "rotated by halves, pages": STEP._replace(new=2, rotary_dim=32, page=16, options=HALVES),
    "bf16, pages of 7 slots": STEP._replace(half=BF16, new=5, page=7),
    "odd channels": STEP._replace(head_dim=37, head_dim_v=21, new=2, rotary_dim=32),
}
PREFILLS = {
    "e4m3": STEP._replace(options={"causal": True}),
    "e5m2, bf16, head_dim 128, pages": WIDE._replace(page=16, options={"window_size": (30, 5)}),
    "no rows see a key": STEP._replace(lengths=(0, 150), options={"causal": True}),
    "head_dim 72, ALiBi": STEP._replace(head_dim=72, options={"alibi_slopes": torch.linspace(0.1, 0.8, 8)}),
    "head_dim 256, pages of 7 slots": STEP._replace(head_dim=256, page=7, group=1, options={"softcap": 3.0}),
    "head_dim 512": STEP._replace(head_dim=512, lengths=(70, 33), capacity=80, group=1, nheads_k=1),
    "new keys": STEP._replace(new=20, rotary_dim=32, options={"causal": True}),
}


LATE = ["head_dim 32, no keys, one key", "head_dim 192 beside 128", "head_dim 256", "pages of 32 slots"]


@pytest.mark.parametrize("name", all_but_thorough(DECODES, LATE))
def test_few_rows_over_8_bits_are_right(turing: LaunchRecord, name: str) -> None:
    check(DECODES[name])
    assert turing.entries == ["decode"]


@pytest.mark.parametrize("name", ["e5m2, bf16", "pages of 16 slots"])
def test_splits_of_8_bits_are_merged(turing: LaunchRecord, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(grids, "count_splits", lambda *shapes: 3)
    check(DECODES[name]._replace(lengths=(500, 130), capacity=512))
    assert turing.last.fields["splits"] == 3


@pytest.mark.parametrize("name", APPENDS)
def test_a_step_appends_8_bits_and_attends_in_one_launch(turing: LaunchRecord, name: str) -> None:
    check(APPENDS[name])
    assert turing.entries == ["decode"]


@pytest.mark.parametrize("name", some(reversed(APPENDS), 2))
def test_8_bits_are_appended_by_a_launch_of_its_own(
    turing: LaunchRecord, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(forward, "_MAX_NEW_KEYS", 0)
    check(APPENDS[name])
    assert turing.entries == ["append", "decode"]


@pytest.mark.parametrize("name", all_but_thorough(PREFILLS, ["e4m3", "head_dim 72, ALiBi", "head_dim 512"]))
def test_many_rows_over_8_bits_are_right(turing: LaunchRecord, name: str) -> None:
    check(PREFILLS[name]._replace(rows=40))
    assert turing.entries[-1] == "forward" and "absmax" not in turing.entries and not any(turing.conflicts)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(STEP, id="decode"),
        pytest.param(WIDE, id="decode bf16"),
        pytest.param(WIDE._replace(rows=40), id="forward bf16", marks=pytest.mark.thorough),
        pytest.param(STEP._replace(rows=40, head_dim=128, half=BF16, page=16), id="forward pages"),
    ],
)
def test_8_bits_are_right_on_newer_gpus(hopper: LaunchRecord, step: Step) -> None:
    check(step)
    assert ("CP_ASYNC", 1) not in hopper.last.variant.macros and dict(hopper.last.variant.macros)["TYPE"] != 1


def test_many_rows_may_share_their_keys_of_8_bits(turing: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "count_splits", lambda *shapes: 3)
    check(PREFILLS["e4m3"]._replace(rows=40, lengths=(500, 130), capacity=512))
    assert turing.last.fields["splits"] == 3


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.6", reason="PyTorch indexes 8-bit floats from 2.6 on")
@pytest.mark.parametrize("rows", [1, 70])
def test_packed_rows_read_dense_and_paged_keys_of_8_bits(turing: LaunchRecord, rows: int) -> None:
    step = STEP._replace(head_dim=32, page=8)
    pages = arguments(step)
    table, lengths, starts = pages["block_table"], cumulative(150, 33), cumulative(rows, rows)
    q = pages["q"].expand(-1, rows, -1, -1).flatten(0, 1)
    descales = {name: pages[name] for name in params.TAIL_ADDRESSES}
    k, v = (
        torch.cat([pages[name][table.long()].flatten(1, 2)[i, :n] for i, n in enumerate((150, 33))])
        for name in ("k_cache", "v_cache")
    )
    options = {"max_seqlen_q": rows, "max_seqlen_k": 150, "causal": True, **descales}
    paged = flash_attn_varlen_func(q, pages["k_cache"], pages["v_cache"], starts, lengths, block_table=table, **options)
    packed = flash_attn_varlen_func(q, k, v, starts, lengths, **options)
    torch.testing.assert_close(paged, packed, rtol=2e-3, atol=2e-3)
    exact = attend(step, pages | {"q": q.unflatten(0, (2, rows))}, torch.float64, causal=True).flatten(0, 1)
    torch.testing.assert_close(paged.double(), exact, rtol=2e-3, atol=2e-3)


# ---- every byte, and every number that is rounded to one


def every_byte(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(*shape).view(dtype)


@pytest.mark.parametrize(("rows", "dtype"), in_turns((1, 20), (E4M3, E5M2)))
def test_every_byte_of_values_comes_out_as_its_number(turing: LaunchRecord, rows: int, dtype: torch.dtype) -> None:
    q, k = torch.zeros(1, rows, 4, 64).to(BF16 if rows == 1 else FP16), torch.zeros(1, 1, 4, 64).to(dtype)
    out = flash_attn_with_kvcache(q, k, every_byte(dtype, 1, 1, 4, 64), cache_seqlens=1)
    assert isinstance(out, Tensor)
    expected = every_byte(dtype, 1, 1, 4, 64).float().expand(1, rows, -1, -1)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "dtype"), in_turns((1, 20), (E4M3, E5M2)))
def test_every_byte_of_keys_comes_out_as_its_number(turing: LaunchRecord, rows: int, dtype: torch.dtype) -> None:
    """A row takes one channel: its LSE is the key's number there. Infinite scores, and NaN, make rows of NaN."""
    q = torch.eye(64).repeat(4, 1).view(1, 1, 256, 64).expand(1, rows, -1, -1).half()
    k, v = every_byte(dtype, 1, 1, 4, 64), torch.ones(1, 1, 4, 64).to(dtype)
    k = torch.where(k.float().isfinite(), k.view(torch.uint8), 0).view(dtype)
    _, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=1, softmax_scale=1.0, return_softmax_lse=True)
    torch.testing.assert_close(lse, k.float().view(1, 256, 1).expand(1, 256, rows), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rows", "dtype"), in_turns((1, 20), (E4M3, E5M2)))
def test_nan_in_a_key_reaches_the_rows_of_its_head_that_see_it(
    turing: LaunchRecord, rows: int, dtype: torch.dtype
) -> None:
    given = arguments(STEP._replace(dtype=dtype, rows=rows))
    given["k_cache"].view(torch.uint8)[0, 20, 1, 3] = NAN | 0x80
    given["v_cache"].view(torch.uint8)[1, 20, 0, 3] = NAN
    out = flash_attn_with_kvcache(**given)
    assert isinstance(out, Tensor)
    touched = torch.zeros(out.shape, dtype=torch.bool)
    touched[0, :, 4:], touched[1, :, :4, 3] = True, True
    assert torch.equal(out.isnan(), touched)


def test_keys_that_a_window_hides_may_be_nan(turing: LaunchRecord) -> None:
    given = arguments(STEP._replace(options={"causal": True, "window_size": (40, 0)}))
    for name in ("k_cache", "v_cache"):
        given[name].view(torch.uint8)[0, : 150 - 41] = NAN
    out = flash_attn_with_kvcache(**given)
    assert isinstance(out, Tensor) and out.isfinite().all()


@pytest.mark.parametrize(
    ("given", "half", "dtype"), some_of(pairwise(("none", "number", "tensor"), (FP16, BF16), (E4M3, E5M2)), 2)
)
def test_every_16_bit_number_is_rounded_as_operators_round_it(
    turing: LaunchRecord, given: str, half: torch.dtype, dtype: torch.dtype
) -> None:
    new = torch.arange(2**16).short().view(half).view(1, 256, 4, 64)
    cache, q = torch.zeros(1, 256, 4, 64).to(dtype), torch.zeros(1, 1, 4, 64).to(half)
    descale: Any = {"none": None, "number": 0.3, "tensor": torch.tensor([[1.0, 0.7, 3.0, 1e-3]])}[given]
    flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=0, k_descale=descale)
    tensor, number = (descale, 1.0) if isinstance(descale, Tensor) else (None, descale or 1.0)
    expected = eight_bit.quantize(new, tensor, number, dtype)
    assert turing.entries == ["append", "decode"] and torch.equal(cache.float().isnan(), expected.float().isnan())
    assert torch.equal(*(x.view(torch.uint8)[~expected.float().isnan()] for x in (cache, expected)))


# ---- descales


def test_each_call_of_a_prepared_step_takes_its_own_descales(turing: LaunchRecord) -> None:
    given = arguments(STEP)
    outs = []
    for _ in range(2):
        given["v_descale"] = 2 * given["v_descale"]
        outs.append(flash_attn_with_kvcache(**given))
        fields = turing.last.fields
        assert [fields[name] for name in params.TAIL_ADDRESSES] == [
            given[name].data_ptr() for name in params.TAIL_ADDRESSES
        ]
    assert torch.equal(2 * outs[0], outs[1]) and len(turing.variants) == 1


@pytest.mark.parametrize("rows", [1, 40])
def test_heads_may_have_descales_that_are_negative_or_0(turing: LaunchRecord, rows: int) -> None:
    step = STEP._replace(rows=rows)
    given = arguments(step)
    given["k_descale"], given["v_descale"] = torch.tensor([[0.5, -0.5], [0.0, 1.0]]), torch.tensor([[-2.0, 0.0]])
    out, exact = flash_attn_with_kvcache(**given), attend(step, given, torch.float64)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", params.TAIL_ADDRESSES)
def test_a_descale_that_reaches_beyond_its_storage_is_refused_before_anything_is_written(
    turing: LaunchRecord, name: str
) -> None:
    given = arguments(STEP._replace(new=1))
    given["k_descale"], given["v_descale"] = torch.ones(2, 2), torch.ones(2, 2)
    flash_attn_with_kvcache(**given)
    before = given["k_cache"].clone()
    given[name].untyped_storage().resize_(8)
    with pytest.raises(RuntimeError, match=f"{name} must have 16 bytes in its storage"):
        flash_attn_with_kvcache(**given)
    assert torch.equal(before.view(torch.uint8), given["k_cache"].view(torch.uint8))


TRIED = STEP._replace(new=1), STEP._replace(new=20, half=BF16, page=16, head_dim=37)


@pytest.mark.parametrize(("step", "number"), in_turns(TRIED, (90, 75)), ids=str)
def test_self_tests_of_8_bit_kernels_pass(monkeypatch: pytest.MonkeyPatch, step: Step, number: int) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, number, tried=True)
    with use_backend("fused"):
        check(step)
    assert len(launches.seen) > 2


@pytest.mark.parametrize("few_rows", [False, True])
def test_the_tiny_call_of_a_self_test_has_rows_as_aligned_as_its_kernel_needs(few_rows: bool) -> None:
    for kind in fused_coverage.eight_bit_kinds(75):
        if not kind.features.bias and not (few_rows and kind.features.dropout):
            call = self_test._make_problem(kind, few_rows)
            assert layouts.vector_size(call[:3], in_place=few_rows or kind.features.paged) == kind.sizes.vec, kind


@pytest.mark.parametrize("number", [75, 90])
def test_the_coverage_launches_every_variant_of_8_bits(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch, number)
    kinds = list(fused_coverage.eight_bit_kinds(number))
    with use_backend("fused"):
        for step in (step for kind in kinds for step in steps(kind).values()):
            flash_attn_with_kvcache(**arguments(step))
    assert {launch.variant for launch in launches.seen} == set(enumeration.made_for(kinds))


def test_features_that_no_kernel_combines_with_8_bits_are_declined_by_name() -> None:
    features = Feature.EIGHT_BIT_CACHE | Feature.DROPOUT | Feature.BIAS
    traits = Traits("cuda", (7, 5), FP16, 64, 64, "?", int(features))
    (reason,) = Fused().extra_reasons(traits)
    assert "8-bit floats" in reason and "dropout" in reason and "a dense mask" in reason
    assert Fused().extra_reasons(traits._replace(features=int(Feature.EIGHT_BIT_CACHE))) == []
