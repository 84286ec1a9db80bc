"""The CUDA kernels in training, run by the emulator through the whole fused backend, against fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import flash_attn_interface
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.launching import grids, workspaces
from tests.forms.plain import in_turns, some, some_of
from tests.kernels import emulate, fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord
from verify import oracle
from verify.call import Call
from verify.examination import Examination
from verify.problems import Problem

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())

FORWARD, BACKWARD = ["forward"], ["delta", "dkdv", "dq"]


def check(problem: Problem | Call) -> None:
    if isinstance(problem, Problem) and problem.gap[0]:
        problem = problem.build()  # as it is: an examination on a CPU moves tokens in front to the end
    verdict = Examination(problem).judge("fused")
    assert not verdict.failures and not verdict.refused, verdict


def cache(**fields: object) -> Problem:
    """A decoding step; NaN wherever it must not read."""
    given: dict[str, object] = dict(dtype="float16", nheads_k=2, head_dim=64, seqlens_q=(1, 1), poison="nan")
    return Problem("kvcache", **given | fields)  # type: ignore[arg-type]  # the fields' types are theirs


# ---- forward and backward

DENSE = Problem(seqlens_q=(70,), seqlens_k=(83,), nheads_k=1, group=2, head_dim=32, dtype="float16")
PACKED = Problem(
    "varlen", seqlens_q=(3, 0, 70, 65), seqlens_k=(66, 9, 0, 67), nheads_k=1, group=2, head_dim=32, dtype="float16",
    gap=(3, 2), poison="nan",
)  # fmt: skip
BF16 = replace(DENSE, dtype="bfloat16")
TOGETHER = replace(DENSE, alibi="h", softcap=3.0, dropout_p=0.2, window=(40, 10))
TRAINING = {
    "full": DENSE,
    "causal, more rows than keys": replace(DENSE, causal=True, seqlens_q=(150,), seqlens_k=(70,)),
    "causal, more keys than rows": replace(DENSE, causal=True, seqlens_q=(40,), seqlens_k=(200,)),
    "left window": replace(DENSE, causal=True, window=(9, -1), seqlens_q=(140,), seqlens_k=(140,)),
    "both windows": replace(DENSE, window=(20, 3), seqlens_q=(140,), seqlens_k=(131,)),
    "right window": replace(DENSE, window=(-1, 30)),
    "ALiBi": replace(DENSE, alibi="h", causal=True),
    "ALiBi on both sides, far from the diagonal": replace(DENSE, alibi="h", seqlens_q=(150,), seqlens_k=(200,)),
    "ALiBi in a wide window": replace(DENSE, alibi="h", window=(130, 80), seqlens_q=(200,), seqlens_k=(200,)),
    "causal ALiBi, far from the diagonal": replace(DENSE, alibi="h", causal=True, seqlens_q=(150,), seqlens_k=(200,)),
    "ALiBi by sequence": replace(DENSE, alibi="bh", causal=True, seqlens_q=(40,) * 2, seqlens_k=(70,) * 2),
    "softcap": replace(DENSE, softcap=1.5, magnitude=2.0),
    "dropout": replace(DENSE, dropout_p=0.3, window=(-1, 30)),
    "dropout, causal, many heads": replace(DENSE, dropout_p=0.17, causal=True, group=5),
    "all at once": TOGETHER,
    "one row": replace(DENSE, seqlens_q=(1,), seqlens_k=(77,)),
    "one key": replace(DENSE, seqlens_q=(77,), seqlens_k=(1,)),
    "negative scale": replace(DENSE, softmax_scale=-0.3, causal=True),
    "no scale": replace(DENSE, softmax_scale=0.0, causal=True),
    "large scores": replace(DENSE, magnitude=8.0, causal=True),
    "packed": PACKED,
    "packed, causal ALiBi": replace(PACKED, causal=True, alibi="h"),
    "packed, short": replace(PACKED, seqlens_q=(3, 0, 32, 17), seqlens_k=(31, 9, 0, 32), head_dim=64),
    "packed in one tensor": replace(PACKED, kind="varlen_qkvpacked", seqlens_k=PACKED.seqlens_q, causal=True),
    "dense in one tensor": replace(DENSE, kind="qkvpacked", group=1, nheads_k=2, seqlens_k=(70,), causal=True),
    "head_dim 256, packed": replace(PACKED, head_dim=256, causal=True),
    "head_dim 256, all at once": replace(TOGETHER, head_dim=256),
    "values of more channels, wide": replace(DENSE, head_dim=40, head_dim_v=56, causal=True),
    "single channels": replace(DENSE, head_dim=1, causal=True),
    "odd channels": replace(DENSE, head_dim=3, head_dim_v=9, causal=True),
    "odd channels, widest": replace(DENSE, head_dim=136, head_dim_v=199, causal=True),
    "rows anywhere": replace(DENSE, head_dim=17, causal=True, layouts=("sliced", "wide_rows", "offset", "heads_first")),
    "odd addresses": replace(DENSE, layouts=("offset",) * 4, causal=True),
    "rows at odd distances": replace(DENSE, layouts=("wide_rows",) * 4, causal=True),
    "channels apart": replace(DENSE, layouts=("strided_dim",) * 3 + ("one_value",)),
    "converted": replace(BF16, causal=True),
    "converted, head_dim 128": replace(BF16, head_dim=128, causal=True),
    "converted, head_dim 256": replace(BF16, head_dim=256, causal=True),
    "converted, head_dim 512": replace(BF16, head_dim=512, seqlens_q=(20,), seqlens_k=(33,)),
    "converted, all at once": replace(TOGETHER, head_dim=64, dtype="bfloat16"),
}
NEWER = {
    "plain": replace(DENSE, head_dim=128, causal=True, seqlens_q=(140,)),
    "bf16": replace(BF16, head_dim=64, causal=True, seqlens_q=(140,)),
    "bf16, all at once": replace(TOGETHER, head_dim=64, dtype="bfloat16"),
    "ALiBi, softcap": replace(DENSE, head_dim=64, alibi="h", softcap=3.0, seqlens_q=(150,), seqlens_k=(200,)),
}


@pytest.mark.parametrize("name", some(TRAINING, 6))
def test_answers_and_gradients_are_right_for_every_feature_type_and_size(turing: LaunchRecord, name: str) -> None:
    check(TRAINING[name])
    assert set(BACKWARD) < set(turing.entries)


@pytest.mark.parametrize("name", some(reversed(NEWER), 2))
def test_newer_instructions_are_right_too(hopper: LaunchRecord, name: str) -> None:
    check(NEWER[name])
    assert hopper.entries[-4:] == FORWARD + BACKWARD and ("MMA_K16", 1) in hopper.last.variant.macros


# ---- numbers of any size, in bf16 where the tensor cores take fp16

ONE = (1.0, 1.0, 1.0, 1.0)
SIZES = {
    "small gradients": ((1.0, 1.0, 1.0, 1e-12),),
    "large values": ((1.0, 1.0, 1e8, 1e6),),
    "small everything": ((1e-9,) * 4,),
    "large keys, small queries": ((1e-7, 1e7, 1.0, 1.0),),
    "too small for bf16": ((1e-30,) * 4,),
    "values and dout far apart": ((1.0, 1.0, 1e-30, 1e30),),
    "a head of small queries": (ONE, (1e-5, 1.0, 1.0, 1.0), ONE),
    "a head of small keys": (ONE, (1.0, 1e-8, 1.0, 1.0), ONE),
    "a head of small values": (ONE, (1.0, 1.0, 1e-12, 1.0), ONE),
    "a head of small dout": (ONE, (1.0, 1.0, 1.0, 1e-8), ONE),
    "heads of all sizes": ((1e-5, 1.0, 1e8, 1e-6), (1.0, 1e4, 1e-8, 1e6), ONE),
}
FEW = replace(PACKED, seqlens_q=(40, 0, 33), seqlens_k=(40, 0, 33), nheads_k=2, dtype="bfloat16", causal=True)


SMALL: dict[str, Any] = {"sizes": ((1e-6,) * 4,)}
DIGITS = {
    **{name: replace(FEW, sizes=sizes) for name, sizes in SIZES.items()},
    "infinity in no sequence": replace(FEW, **SMALL, poison="inf"),
    "NaN in no sequence": replace(FEW, **SMALL, poison="nan"),
    "NaN behind a cache's end": cache(seqlens_k=(200, 16), capacity=256, group=4, dtype="bfloat16", **SMALL),
}


@pytest.mark.parametrize("name", DIGITS)
def test_every_sequence_and_head_keeps_its_digits_beside_large_ones(turing: LaunchRecord, name: str) -> None:
    check(DIGITS[name])
    assert "absmax" in turing.entries or DIGITS[name].kind == "kvcache"


def test_a_backward_takes_the_forwards_maxima_and_those_of_its_own_gradient(turing: LaunchRecord) -> None:
    q, k, v, dout = torch.randn(4, 1, 40, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = flash_attn_compat.flash_attn_func(*leaves, causal=True)
    of_large, of_small, again = (
        torch.autograd.grad(out, leaves, dout * size, retain_graph=True) for size in (2.0**60, 2.0**-60, 2.0**60)
    )
    assert turing.entries.count("absmax") == 1
    for large, small, same in zip(of_large, of_small, again):
        assert torch.equal(large, small * 2.0**120) and torch.equal(large, same)


def test_copies_of_bf16_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, 1, 20, 2, 32, generator=generator)
    # Later keys, and earlier values, are larger: what was converted first goes by a power that turns out to be wrong.
    sizes = torch.logspace(-4, 2, 1100)[:, None, None]
    k, v = torch.randn(2, 1, 1100, 1, 32, generator=generator) * torch.stack([sizes / 1e2, sizes.flip(0)])[:, None]
    leaves = [tensor.bfloat16().requires_grad_() for tensor in (q, k, v)]
    found = []
    for copies, seed in ((False, 1), (True, 2), (True, 6)):
        monkeypatch.setattr(variants, "pays_to_copy", lambda *shapes, copies=copies: copies)
        with flash_attn_compat.use_backend("fused"):
            launches = fused_on_cpu.emulate(monkeypatch, 75, seed=seed)
            out = flash_attn_compat.flash_attn_func(*leaves)
            found.append([out, *torch.autograd.grad(out, leaves, dout.bfloat16())])
        assert launches.entries.count("to_half") == 3 * copies
    assert all(torch.equal(one, same) for others in found[1:] for one, same in zip(found[0], others))


STRAY = [
    ("q", 0, "nan"), ("q", 2, "inf"), ("k", 0, "inf"), ("k", 2, "nan"), ("v", 0, "nan"), ("v", 2, "inf"),
    ("dout", 0, "inf"), ("dout", 2, "nan"),
]  # fmt: skip


@pytest.mark.parametrize(("stray", "dtype"), in_turns(STRAY, ("float16", "bfloat16")), ids=str)
def test_nan_and_infinity_stay_in_their_sequence_and_head(
    turing: LaunchRecord, stray: tuple[str, int, str], dtype: str
) -> None:
    check(replace(FEW, stray=stray, dtype=dtype))


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["k", "dout"])
def test_rows_without_visible_nonfinite_values_keep_their_bits(turing: LaunchRecord, name: str, number: float) -> None:
    call = replace(BF16, seqlens_q=(200,), seqlens_k=(200,), causal=True).build()
    right = answers(call)
    (call.dout if name == "dout" else call.args[name])[0, 190, 0, 5] = number  # type: ignore[index]
    for found, expected in zip(answers(call)[:2], right):  # out and dq
        assert torch.equal(found[:, :64], expected[:, :64])


def test_a_row_keeps_its_digits_beside_larger_ones(turing: LaunchRecord) -> None:
    """A row's dq depends on nothing but its own dout, however small beside others."""
    call = BF16.build()
    assert call.dout is not None
    call.dout[:, ::3] *= 1e-6
    found = answers(call)[1][:, ::3].double()
    right, plain = (judge(call.fn, call.args, call.dout).grads["q"][:, ::3] for judge in (oracle.answer, oracle.plain))
    assert (found - right).abs().max() <= 2 * (plain.double() - right).abs().max()


def answers(call: Call) -> list[Tensor]:
    """out, dq, dk and dv."""
    assert call.dout is not None
    leaves = {name: call.args[name].detach().requires_grad_() for name in "qkv"}
    out = getattr(flash_attn_interface, call.fn)(**call.args | leaves | {"return_attn_probs": False})
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), call.dout)]


@pytest.mark.parametrize("larger", some([slice(1160, 1200), slice(0, 40), slice(560, 600)], 3))
def test_the_largest_values_of_a_long_sequence_are_found_at_any_place(turing: LaunchRecord, larger: slice) -> None:
    call = replace(FEW, seqlens_q=(9, 0, 7), seqlens_k=(1200, 0, 900), causal=False, gap=(0, 0)).build()
    call.args["v"][larger] *= 2.0**30
    check(call)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_same_bits_come_back_in_any_order_of_blocks_and_warps(
    dtype: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "count_splits", lambda *shapes: splits)
    monkeypatch.setattr(grids, "count_head_splits", lambda *shapes: min(splits, 2))
    call, found = replace(DENSE, causal=True, dtype=dtype, seqlens_k=(270,)).build(), []
    for seed in (1, 2, 3):
        with monkeypatch.context() as patch, flash_attn_compat.use_backend("fused"):
            fused_on_cpu.emulate(patch, seed=seed)
            found.append(answers(call))
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))


PAGED = Problem(
    "paged", (70, 0, 33), (200, 9, 100), 1, 2, 64, dtype="float16", causal=True, poison="nan", backward=False
)


# Tiles have 64 keys: they share a page, lie in one, or begin in one and end in another.
@pytest.mark.parametrize(("page_size", "gpu"), in_turns([1, 7, 64, 96, 256], ("turing", "hopper")))
def test_many_rows_over_pages_read_each_key_where_it_lies(
    gpu: str, page_size: int, request: pytest.FixtureRequest
) -> None:
    launches: LaunchRecord = request.getfixturevalue(gpu)
    check(replace(PAGED, page_size=page_size))
    assert launches.entries == FORWARD and ("PAGED", 1) in launches.last.variant.macros


# ---- few blocks over many keys: what a tile sees is split in units of 128 keys, as far as its sequence has them

SPLIT = {
    "as many keys as fill two splits": replace(DENSE, seqlens_k=(256,)),
    "one key more": replace(DENSE, seqlens_k=(257,)),
    "causal, tiles that see more and less": replace(DENSE, causal=True, seqlens_q=(300,), seqlens_k=(400,)),
    "causal, rows without keys": replace(DENSE, causal=True, seqlens_q=(500,), seqlens_k=(300,)),
    "window from within a tile of keys": replace(DENSE, window=(290, 7), seqlens_k=(600,)),
    "causal ALiBi": replace(DENSE, alibi="bh", causal=True, seqlens_q=(40,) * 2, seqlens_k=(300,) * 2),
    "dropout": replace(DENSE, dropout_p=0.3, seqlens_k=(300,)),
    "negative scale": replace(DENSE, softmax_scale=-0.3, seqlens_k=(300,)),
    "packed": replace(PACKED, seqlens_k=(300, 9, 0, 401), causal=True, alibi="h"),
    "head_dim 128": replace(DENSE, head_dim=128, seqlens_k=(300,)),
    "odd channels, widest": replace(DENSE, head_dim=136, head_dim_v=199, seqlens_k=(300,)),
    "converted": replace(BF16, seqlens_k=(300,), sizes=((1.0, 1.0, 2.0**90, 1.0), (1.0, 1.0, 2.0**-90, 1.0))),
    "converted, all at once": replace(TOGETHER, head_dim=64, dtype="bfloat16", seqlens_k=(300,), window=(250, 10)),
    "pages": replace(PAGED, seqlens_k=(500, 9, 300), page_size=7),
    "a cache with more room than keys": cache(
        seqlens_q=(70,) * 3, seqlens_k=(400, 130, 0), capacity=600, causal=True, leftpad=(3, 0, 0)
    ),
}


WIDEST = "odd channels, widest"  # which Turing has no registers for


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        *some_of([("turing", name) for name in SPLIT if name != WIDEST], 5),
        *some_of([("hopper", "converted"), ("hopper", WIDEST), ("hopper", "head_dim 128")], 3),
    ],
)
def test_blocks_may_share_the_keys_of_many_rows(
    gpu: str, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: LaunchRecord = request.getfixturevalue(gpu)
    monkeypatch.setattr(grids, "count_splits", lambda *shapes: 3)
    check(SPLIT[name])
    (splits,) = (launch.fields["splits"] for launch in launches.seen if launch.variant.entry == "forward")
    assert splits == 3
    (workspace,) = workspaces._workspaces.values()
    assert workspace[workspaces.PARTS_OFFSET :].any(), "some tile was split"
    assert not workspace[: workspaces.PARTS_OFFSET].any(), "counters are as the next launch wants them"


# ---------------------------------------------------------------- one kernel for all gradients of few keys

SHORT = replace(DENSE, seqlens_q=(100,), seqlens_k=(57,), nheads_k=2, head_dim=64)
ONE_TILE = {
    name: problem
    for name, problem in TRAINING.items()
    if max(problem.seqlens_k) <= 128 and problem.head_dim <= 64 and problem.dtype == "float16"
} | {
    "64 channels": SHORT,
    "64 channels, many rows": replace(SHORT, seqlens_q=(150,), seqlens_k=(64,), causal=True),
    "64 channels, 90 keys": replace(SHORT, seqlens_k=(90,), window=(40, 3)),
    "64 channels, 128 keys": replace(SHORT, seqlens_k=(128,), causal=True),
    "64 channels, 32 keys": replace(SHORT, seqlens_k=(32,), causal=True),
    "64 channels, all at once": replace(TOGETHER, head_dim=64, group=3),
    "80 channels": replace(SHORT, head_dim=80, window=(20, 3)),
    "96 channels": replace(SHORT, head_dim=96, causal=True),
    "128 channels": replace(SHORT, head_dim=128, causal=True),
    "128 channels, 120 keys": replace(SHORT, seqlens_k=(120,), head_dim=128, causal=True),
    "126 channels, 80 keys, many rows": replace(SHORT, seqlens_q=(150,), seqlens_k=(80,), head_dim=126, group=1),
    "packed, 64 channels": replace(PACKED, head_dim=64, nheads_k=2, causal=True),
    "packed, 48 channels, 40 of values": replace(PACKED, head_dim=48, head_dim_v=40),
    "scores far below 0": replace(DENSE, seqlens_q=(6,), seqlens_k=(1,), magnitude=3.0),
    "scores far below 0, packed": replace(PACKED, seqlens_q=(70, 14), seqlens_k=(1, 2), magnitude=4.0),
    "more rows than keys": replace(PACKED, seqlens_q=(150, 5, 0, 70), seqlens_k=(20, 0, 9, 64), causal=True),
}


@pytest.mark.parametrize("name", some(ONE_TILE, 6))
def test_one_kernel_finds_all_gradients_of_few_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, one_tile=True)
    with flash_attn_compat.use_backend("fused"):
        check(ONE_TILE[name])
    assert launches.entries[1:] == ["dkdv"] and launches.conflicts[-1] == 0


@pytest.mark.parametrize(("rows", "causal", "head_dim"), [(50, True, 64), (50, False, 128), (130, False, 32)])
def test_short_sequences_load_their_values_with_their_keys(
    rows: int, causal: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, one_tile=True)
    problem = replace(DENSE, seqlens_q=(rows,), seqlens_k=(rows + 10 - 2 * (rows == 50),), head_dim=head_dim)
    with flash_attn_compat.use_backend("fused"):
        check(replace(problem, causal=causal))
    (forward,) = [one.variant for one in launches.seen if one.variant.entry == "forward"]
    assert dict(forward.macros).get("LOAD_V_WITH_K") and launches.conflicts[-1] == 0


@pytest.mark.parametrize("half_dtype", ["float16", "bfloat16"])
def test_only_fp16_takes_one_kernel_for_all_gradients(half_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch, one_tile=True)
    q = torch.zeros(1, 20, 2, 64, dtype=getattr(torch, half_dtype), requires_grad=True)
    with flash_attn_compat.use_backend("fused"):
        flash_attn_compat.flash_attn_func(q, q, q).sum().backward()
    assert ("dq" in launches.entries) == (half_dtype == "bfloat16")


def test_dq_is_nan_where_a_sequence_has_more_keys_than_the_caller_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch, one_tile=True)
    q, k, v = (torch.randn(180, 1, 32).half().requires_grad_() for _ in range(3))
    starts = torch.tensor([0, 50, 180], dtype=torch.int32)
    with flash_attn_compat.use_backend("fused"):
        out = flash_attn_interface.flash_attn_varlen_func(q, k, v, starts, starts, 130, 100)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert not dq[:50].isnan().any() and dq[50:].isnan().all()


# ---------------------------------------------------------------- a backward that is given its out and LSE


def backward(call: Call, out: Tensor, lse: Tensor, keys: slice = slice(None)) -> dict[str, Tensor]:
    """dq, dk and dv of some keys; they start as NaN."""
    q, k, v = call.args["q"], call.args["k"][:, keys], call.args["v"][:, keys]
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    options = (0.0, q.shape[-1] ** -0.5, False, -1, -1, 0.0, None, False)
    flash_attn_interface._flash_attn_backward(call.dout, q, k, v, out, lse, *found, *options)
    return dict(zip("qkv", found))


def test_parts_of_a_longer_sequence_add_up(turing: LaunchRecord) -> None:
    call = replace(DENSE, seqlens_k=(150,)).build()
    right = oracle.answer(call.fn, call.args, call.dout)
    assert right.softmax_lse is not None
    given = right.out.half(), right.softmax_lse.float()
    one, two = (backward(call, *given, keys) for keys in (slice(0, 61), slice(61, 150)))
    found = {"q": one["q"].float() + two["q"].float(), **{n: torch.cat([one[n], two[n]], 1) for n in "kv"}}
    for name, ours in found.items():
        assert (ours.double() - right.grads[name]).abs().max() <= 2**-9 * right.magnitude(name)


def test_dropouts_state_may_be_one_column_of_several(turing: LaunchRecord) -> None:
    q, k, v = torch.randn(3, 1, 20, 2, 32, generator=torch.Generator().manual_seed(0)).half()
    options = 0.3, q.shape[-1] ** -0.5, False, -1, -1, 0.0, None, False
    out, lse, _, state = flash_attn_interface._flash_attn_forward(q, k, v, *options)
    found = []
    for given in (state, torch.stack([state, state], 1)[:, 0]):
        found.append([torch.empty_like(x) for x in (q, k, v)])
        flash_attn_interface._flash_attn_backward(q, q, k, v, out, lse, *found[-1], *options, given)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_rows_with_an_infinite_lse_have_no_gradient_and_send_none(turing: LaunchRecord, value: float) -> None:
    call = DENSE.build()
    assert call.dout is not None
    right = oracle.answer(call.fn, call.args, call.dout)
    assert right.softmax_lse is not None
    out, lse, dead = right.out.half(), right.softmax_lse.float(), [0, 33, 69]
    call.dout[:, dead] = 0
    expected = backward(call, out, lse)
    lse[:, :, dead], out[:, dead], call.dout[:, dead] = value, torch.nan, 100.0
    found = backward(call, out, lse)
    assert not found["q"][:, dead].any()
    for name, ours in found.items():
        torch.testing.assert_close(ours.float(), expected[name].float(), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("size", [1e6, 1e30])
def test_converted_bf16_does_not_overflow_for_the_out_of_larger_values(turing: LaunchRecord, size: float) -> None:
    """delta is that of a longer sequence, whose other values are far larger than these."""
    call = BF16.build()
    assert call.dout is not None
    right = oracle.answer(call.fn, call.args)
    assert right.softmax_lse is not None
    out = (right.out * size).bfloat16()
    found = backward(call, out, right.softmax_lse.float())
    q, k, v, dout = (x.double() for x in (call.args["q"], call.args["k"], call.args["v"], call.dout))
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    probabilities = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * 32**-0.5, -1)
    delta = (dout * out.double()).sum(-1).transpose(1, 2)[..., None]
    dscores = probabilities * (torch.einsum("bqhd,bkhd->bhqk", dout, v) - delta) * 32**-0.5
    expected = torch.einsum("bhqk,bkhd->bqhd", dscores, k)
    error = (found["q"].double() - expected).abs().amax((1, 3)) / expected.abs().amax((1, 3))
    assert error.max() < 2**-7 and found["k"].isfinite().all()
