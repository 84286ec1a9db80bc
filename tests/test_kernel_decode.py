"""The kernels of a decoding step (append, decode), run by the emulator through the whole backend, against fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import flash_attn_interface, kvcache
from tests import fused_on_cpu
from tests.fused_on_cpu import Launches
from tests.kernels import emulate
from verify import oracle
from verify.call import Call
from verify.examination import Examination
from verify.problems import Problem

pytestmark = pytest.mark.skipif(bool(emulate.why_not()), reason=emulate.why_not())


def cache(**fields: object) -> Problem:
    """A decoding step; NaN wherever it must not read."""
    return replace(Problem(kind="kvcache", dtype="float16", nheads_k=2, poison="nan"), **fields)  # type: ignore[arg-type]


# What is emulated, by the macros of its variant; the numbers of keys are around the kernel's steps of 8, 16, 32 and 64.
PLAIN = {
    "one key and more": cache(seqlens_q=(1,) * 6, seqlens_k=(1, 15, 16, 17, 64, 65), capacity=70, head_dim=64, group=4),
    "split keys": cache(seqlens_q=(1, 1), seqlens_k=(300, 70), capacity=320, head_dim=64, group=3),
    "two tiles of rows": cache(seqlens_q=(5,), seqlens_k=(90,), capacity=96, head_dim=64, group=4, nheads_k=1),
    "no keys": cache(seqlens_q=(1, 1, 1), seqlens_k=(0, 40, 0), capacity=40, head_dim=64, group=2),
    "narrow heads": cache(seqlens_q=(1,), seqlens_k=(33,), capacity=40, head_dim=8, head_dim_v=16),
    "uneven heads": cache(seqlens_q=(1,), seqlens_k=(33,), capacity=40, head_dim=64, head_dim_v=40),
    "negative scale": cache(seqlens_q=(1,), seqlens_k=(50,), capacity=50, head_dim=64, softmax_scale=-0.2),
    "zero scale": cache(seqlens_q=(1,), seqlens_k=(50,), capacity=50, head_dim=64, softmax_scale=0.0),
    "left padding": cache(seqlens_q=(1, 1), seqlens_k=(80, 37), leftpad=(13, 37), capacity=90, head_dim=64),
}
LOCAL = {
    "causal": cache(seqlens_q=(3, 3), seqlens_k=(200, 75), capacity=256, head_dim=128, group=4, causal=True),
    "causal, more rows than keys": cache(seqlens_q=(7,) * 2, seqlens_k=(3, 0), capacity=9, head_dim=128, causal=True),
    "window": cache(seqlens_q=(1, 1), seqlens_k=(200, 20), capacity=256, head_dim=128, window=(40, 0)),
    "window on both sides": cache(seqlens_q=(4, 4), seqlens_k=(150, 9), capacity=150, head_dim=128, window=(30, 2)),
    "packed": Problem(
        "private_varlen", (1, 0, 3), (70, 5, 20), 2, 2, 96, dtype="float16", causal=True, gap=(2, 3), poison="nan"
    ),
    "packed, keys in use": Problem(
        "private_varlen", (1, 2, 1), (70, 50, 20), 2, 2, 96, dtype="float16", causal=True, seqused=(64, 0, 20),
        leftpad=(5, 0, 20), poison="nan",
    ),
}  # fmt: skip
PAGES = {
    "pages": cache(seqlens_q=(1,) * 3, seqlens_k=(200, 7, 64), capacity=256, head_dim=256, group=2, page_size=16),
    "odd pages": cache(seqlens_q=(1, 1), seqlens_k=(120, 8), capacity=140, head_dim=256, page_size=7),
    "cache_batch_idx": cache(seqlens_q=(1, 1), seqlens_k=(70, 33), capacity=80, head_dim=200, batch_idx=True),
}
CONVERTED = {
    "converted": cache(seqlens_q=(1,) * 2, seqlens_k=(200, 16), capacity=256, head_dim=64, group=4, dtype="bfloat16"),
    "converted, no keys": cache(seqlens_q=(1, 1), seqlens_k=(0, 5), capacity=9, head_dim=64, dtype="bfloat16"),
}
CONVERTED_WIDE = {
    "converted, wide heads": cache(
        seqlens_q=(2, 2), seqlens_k=(130, 31), capacity=140, head_dim=256, group=2, dtype="bfloat16", causal=True
    ),
}
EVERYTHING = {
    "all at once": cache(
        seqlens_q=(3, 3), seqlens_k=(150, 40), capacity=160, head_dim=105, group=2, dtype="bfloat16", causal=True,
        window=(60, 0), softcap=5.0, alibi="bh", page_size=7, layouts=("offset", "wide_rows", "offset", "contiguous"),
    ),
}  # fmt: skip
ALIBI = {
    "causal ALiBi": cache(seqlens_q=(2, 2), seqlens_k=(90, 3), capacity=90, head_dim=64, alibi="h", causal=True),
    "softcap": cache(
        seqlens_q=(2, 2), seqlens_k=(90, 3), capacity=90, head_dim=64, alibi="h", softcap=0.5, causal=True
    ),
}
UNALIGNED = {
    "unaligned": cache(
        seqlens_q=(1, 1), seqlens_k=(70, 16), capacity=75, head_dim=37, head_dim_v=5, group=2,
        layouts=("offset", "wide_rows", "offset", "contiguous"),
    ),
}  # fmt: skip
NATIVE = {
    "native bf16": cache(seqlens_q=(1, 1), seqlens_k=(200, 33), capacity=256, head_dim=64, group=4, dtype="bfloat16"),
}
TURING = PLAIN | LOCAL | PAGES | CONVERTED | CONVERTED_WIDE | EVERYTHING | ALIBI | UNALIGNED


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    with flash_attn_compat.use_backend("fused"):
        yield fused_on_cpu.emulate(monkeypatch, 75)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    with flash_attn_compat.use_backend("fused"):
        yield fused_on_cpu.emulate(monkeypatch, 90)


@pytest.mark.parametrize("name", TURING)
def test_every_sequence_and_head_is_right(turing: Launches, name: str) -> None:
    check(TURING[name], turing)


@pytest.mark.parametrize("name", NATIVE)
def test_newer_gpus_take_bf16_as_it_is(hopper: Launches, name: str) -> None:
    check(NATIVE[name], hopper)


def check(problem: Problem, found: Launches) -> None:
    """The whole call by the judge, then each sequence and head by bounds of its own."""
    verdict = Examination(problem).judge("fused")
    assert not verdict.failures and not verdict.refused, verdict
    assert found.entries == ["decode"]
    call = problem.build()
    assert worst_head(call, attend(call)) <= 1


def attend(call: Call) -> Tensor:
    returned = getattr(flash_attn_interface, call.fn)(**call.args)
    out: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return out


def worst_head(call: Call, out: Tensor) -> float:
    """The largest error of one sequence and head, over twice that of plain arithmetic plus a rounding of its terms."""
    values = "v_cache" if "v_cache" in call.args else "v"
    sizes = oracle.answer(call.fn, {**call.args, values: call.args[values].abs()}).out
    exact, plain = oracle.answer(call.fn, call.args).out, oracle.plain(call.fn, call.args).out
    eps, ratios = torch.finfo(out.dtype).eps, []
    for rows in rows_of(call):
        errors = [by_head((x[rows].double() - exact[rows]).abs()) for x in (out, plain)]
        allowed = 2 * errors[1] + eps * by_head(sizes[rows])
        ratios.append((errors[0] / allowed).where(errors[0] > 0, torch.zeros(())))
    return float(torch.cat(ratios).max())


def rows_of(call: Call) -> list[slice | int]:
    """The sequences of a call, and what lies outside of them."""
    if "cu_seqlens_q" not in call.args:
        return list(range(call.args["q"].shape[0]))
    starts = [0, *call.args["cu_seqlens_q"].tolist(), call.args["q"].shape[0]]
    return [slice(*pair) for pair in itertools.pairwise(starts)]


def by_head(x: Tensor) -> Tensor:
    """Maxima of (rows, heads, channels); 0 without rows."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).amax((0, 2))


# ---------------------------------------------------------------- numbers of any size


def converted_call(seqlen: int = 64) -> Call:
    problem = CONVERTED["converted"]
    return replace(problem, seqlens_q=(1, 1), seqlens_k=(seqlen, seqlen), capacity=seqlen, magnitude=0.5).build()


def test_a_small_head_keeps_its_digits_beside_a_large_one(turing: Launches) -> None:
    call = converted_call()
    for name in ("k_cache", "v_cache"):
        call.args[name][:, :, 0] *= 2.0**-90
    call.args["q"][:, :, :4] *= 2.0**90
    call.args["v_cache"][1] *= 2.0**100
    assert worst_head(call, attend(call)) <= 1


def test_values_that_count_keep_their_digits_beside_larger_ones_that_do_not(turing: Launches) -> None:
    """The first keys have no weight, and values 2^100 times as large; so have keys of another size."""
    call = converted_call(128)
    q, k, v = (call.args[name] for name in ("q", "k_cache", "v_cache"))
    q.copy_(q.abs() + 1)
    k[:, :64] = -(k[:, :64].abs() + 100)
    v[:, :64] *= 2.0**100
    v[:, 64:] *= 2.0**-20
    out = attend(call)
    assert float(out.abs().max()) < 2.0**-15
    assert worst_head(call, out) <= 1


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_infinite_value_reaches_the_rows_that_see_it(turing: Launches, dtype: str, value: float) -> None:
    problem = replace(CONVERTED["converted"], dtype=dtype, seqlens_q=(1, 1), seqlens_k=(50, 50), capacity=64)
    call = problem.build()
    finite = attend(call)
    call.args["v_cache"][0, 20, 1, 3] = value
    out = attend(call)
    touched = torch.zeros(out.shape, dtype=torch.bool)
    touched[0, :, 4:, 3] = True
    assert torch.equal(out[~touched], finite[~touched])
    assert torch.equal(out[touched].nan_to_num(7.0), torch.full_like(out[touched], value).nan_to_num(7.0))


def test_a_window_leaves_alone_what_is_before_it(turing: Launches) -> None:
    call = LOCAL["window"].build()
    for name in ("k_cache", "v_cache"):
        call.args[name][0, : 200 - 41] = torch.nan
    assert attend(call).isfinite().all()


# ---------------------------------------------------------------- lengths and pages that are wrong


def test_wrong_lengths_and_pages_touch_nothing_outside(turing: Launches) -> None:
    """The emulator raises where memory outside of the tensors is read."""
    rubbish = torch.tensor([10**9, -7, -(2**31)], dtype=torch.int32)
    call = PAGES["pages"].build()
    table = call.args["block_table"]
    table[0], table[1], table[2] = 10**9, -1, 2**31 - 1
    for lengths in (rubbish, torch.full((3,), 2**31 - 1, dtype=torch.int32)):
        launch_unchecked({**call.args, "cache_seqlens": lengths, "cache_leftpad": rubbish.flip(0)})
    new = {"k": torch.zeros(3, 5, 2, 256).half(), "v": torch.zeros(3, 5, 2, 256).half()}
    for lengths in (rubbish, rubbish.flip(0), torch.full((3,), 5, dtype=torch.int32)):
        launch_unchecked({**call.args, **new, "cache_seqlens": lengths})
    assert turing.entries == ["decode", "decode"] + ["append", "decode"] * 3


def launch_unchecked(args: dict[str, object]) -> None:
    """The call without the checks that CPU tensors allow: on a GPU nobody reads lengths before the launch."""
    with pytest.MonkeyPatch.context() as patch:
        for check in ("_check", "_check_capacity"):
            patch.setattr(kvcache, check, lambda arguments: None)
        flash_attn_interface.flash_attn_with_kvcache(**args)  # type: ignore[arg-type]


def test_new_keys_in_front_of_the_cache_or_behind_it_are_not_written(turing: Launches) -> None:
    call = replace(PLAIN["split keys"], seqlens_k=(318, 320), capacity=320, poison=False).build()
    k_cache, before = call.args["k_cache"], call.args["k_cache"].clone()
    new = {name: torch.full((2, 5, 2, 64), 3.0).half() for name in ("k", "v")}
    launch_unchecked({**call.args, **new, "cache_seqlens": torch.tensor([318, -5], dtype=torch.int32)})
    before[0, 318:320] = 3.0
    assert torch.equal(k_cache, before)


# ---------------------------------------------------------------- appending

STEP = cache(seqlens_q=(1,) * 3, seqlens_k=(150, 7, 0), capacity=200, head_dim=64, group=4, new_keys=1)
APPENDS = {
    "one key": STEP,
    "rotated": replace(STEP, rotary_dim=32, causal=True),
    "rotated by halves": replace(STEP, rotary_dim=64, rotary_interleaved=False),
    "all rows at one place": replace(STEP, seqlens_q=(3,) * 3, rotary_dim=64, new_keys=5),
    "rows apart": replace(STEP, seqlens_q=(3,) * 3, rotary_dim=32, rotary_interleaved=False, causal=True, new_keys=3),
    "one length for all": replace(STEP, lengths_as="int", seqlens_k=(40,) * 3, rotary_dim=32),
    "more than one round of the grid": replace(
        STEP, new_keys=150, capacity=300, rotary_dim=32, rotary_interleaved=False
    ),
    "pages": replace(STEP, page_size=7, rotary_dim=32),
    "cache_batch_idx": replace(STEP, batch_idx=True, rotary_dim=16),
    "left padding": replace(STEP, leftpad=(5, 3, 0), rotary_dim=32),
    "converted": replace(STEP, dtype="bfloat16", rotary_dim=32),
    "converted, unaligned": replace(
        STEP, dtype="bfloat16", head_dim=37, head_dim_v=9, rotary_dim=32, rotary_interleaved=False,
        layouts=("wide_rows", "offset", "wide_rows", "contiguous"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APPENDS)
def test_a_step_appends_rotates_and_attends_in_two_launches(turing: Launches, name: str) -> None:
    verdict = Examination(APPENDS[name]).judge("fused")
    assert not verdict.failures and not verdict.refused, verdict
    assert turing.entries == ["append", "decode"]
    assert not turing.cleared, "the append zeroes the decode kernel's counters"


def test_new_values_arrive_bit_for_bit_and_nothing_else_changes(turing: Launches) -> None:
    call = APPENDS["rotated"].build()
    before, after, new = call.args["v_cache"].clone(), call.args["v_cache"], call.args["v"]
    attend(call)
    for b, length in enumerate((150, 7, 0)):
        before[b, length] = new[b, 0]
    assert torch.equal(after.view(torch.int16), before.view(torch.int16))


def test_rows_behind_the_rotary_tables_are_not_rotated(turing: Launches) -> None:
    call = APPENDS["rotated"].build()
    del call.args["rotary_cos"], call.args["rotary_sin"]
    attend(call)
    k_cache = call.args["k_cache"]
    short = APPENDS["rotated"].build()
    for name in ("rotary_cos", "rotary_sin"):
        short.args[name] = short.args[name][:7]
    launch_unchecked(short.args)
    turned = short.args["k_cache"]
    assert torch.equal(turned[:2].nan_to_num(9.0), k_cache[:2].nan_to_num(9.0))
    assert not torch.equal(turned[2, 0], k_cache[2, 0])
