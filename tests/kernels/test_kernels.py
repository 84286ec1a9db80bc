"""The CUDA kernels, run by the emulator through the whole fused backend, against fp64: per sequence and head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import flash_attn_interface
from flash_attn_compat.backends.fused import forward
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.launching import grids, workspaces
from tests.forms.plain import some, some_of
from tests.kernels import emulate, fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord
from verify import oracle
from verify.call import Call
from verify.examination import Examination
from verify.problems import Problem

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())

FORWARD, BACKWARD = ["forward"], ["delta", "dkdv", "dq"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchRecord]:
    with flash_attn_compat.use_backend("fused"):
        yield fused_on_cpu.emulate(monkeypatch, 90)


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


@pytest.mark.parametrize("name", some(TRAINING, 4))
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
    for copies, seed in ((False, 1), (True, 2), (True, 3), (True, 6)):
        monkeypatch.setattr(variants, "pays_to_copy", lambda *shapes, copies=copies: copies)
        with flash_attn_compat.use_backend("fused"):
            launches = fused_on_cpu.emulate(monkeypatch, 75, seed=seed)
            out = flash_attn_compat.flash_attn_func(*leaves)
            found.append([out, *torch.autograd.grad(out, leaves, dout.bfloat16())])
        assert launches.entries.count("to_half") == 3 * copies
    assert all(torch.equal(one, same) for others in found[1:] for one, same in zip(found[0], others))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "stray", [("q", 0, "nan"), ("q", 2, "inf"), ("k", 0, "inf"), ("k", 2, "nan"), ("v", 0, "nan"), ("v", 2, "inf"),
              ("dout", 0, "inf"), ("dout", 2, "nan")], ids=str,
)  # fmt: skip
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
@pytest.mark.parametrize("page_size", [1, 7, 64, 96, 256])
@pytest.mark.parametrize("gpu", ["turing", "hopper"])
def test_many_rows_over_pages_read_each_key_where_it_lies(
    gpu: str, page_size: int, request: pytest.FixtureRequest
) -> None:
    launches: LaunchRecord = request.getfixturevalue(gpu)
    check(replace(PAGED, page_size=page_size))
    assert launches.entries == FORWARD and ("PAGED", 1) in launches.last.variant.macros


# ---- decoding: the numbers of keys are around the kernel's steps of 8, 16, 32 and 64


OFFSET = ("offset", "wide_rows", "offset", "contiguous")
CACHES = {
    "one key and more": cache(seqlens_q=(1,) * 6, seqlens_k=(1, 15, 16, 17, 64, 65), capacity=70, group=4),
    "split keys": cache(seqlens_k=(300, 70), capacity=320, group=3),
    "a group of 71 heads": cache(seqlens_q=(1,), seqlens_k=(300,), capacity=300, group=71, nheads_k=1),
    "two tiles of rows": cache(seqlens_q=(5,), seqlens_k=(90,), capacity=96, group=4, nheads_k=1),
    "no keys": cache(seqlens_q=(1, 1, 1), seqlens_k=(0, 40, 0), capacity=40, group=2),
    "narrow heads": cache(seqlens_q=(1,), seqlens_k=(33,), capacity=40, head_dim=8, head_dim_v=16),
    "uneven heads": cache(seqlens_q=(1,), seqlens_k=(33,), capacity=40, head_dim_v=40),
    "negative scale": cache(seqlens_q=(1,), seqlens_k=(50,), capacity=50, softmax_scale=-0.2, causal=True),
    "zero scale": cache(seqlens_q=(1,), seqlens_k=(50,), capacity=50, softmax_scale=0.0, window=(20, 0)),
    "left padding": cache(seqlens_k=(80, 37), leftpad=(13, 37), capacity=90),
    "causal": cache(seqlens_q=(3, 3), seqlens_k=(200, 75), capacity=256, head_dim=128, group=4, causal=True),
    "causal, more rows than keys": cache(seqlens_q=(7,) * 2, seqlens_k=(3, 0), capacity=9, head_dim=128, causal=True),
    "window": cache(seqlens_k=(200, 20), capacity=256, head_dim=128, window=(40, 0)),
    "window on both sides": cache(seqlens_q=(4, 4), seqlens_k=(150, 9), capacity=150, head_dim=128, window=(30, 2)),
    "packed": Problem(
        "private_varlen", (1, 0, 3), (70, 5, 20), 2, 2, 96, dtype="float16", causal=True, gap=(2, 3), poison="nan"
    ),
    "packed, keys in use": Problem(
        "private_varlen", (1, 2, 1), (70, 50, 20), 2, 2, 96, dtype="float16", causal=True, seqused=(64, 0, 20),
        leftpad=(5, 0, 20), poison="nan",
    ),
    "pages": cache(seqlens_q=(1,) * 3, seqlens_k=(200, 7, 64), capacity=256, head_dim=256, group=2, page_size=16),
    "odd pages": cache(seqlens_k=(120, 8), capacity=140, head_dim=256, page_size=7),
    "cache_batch_idx": cache(seqlens_k=(70, 33), capacity=80, head_dim=200, batch_idx=True),
    "converted": cache(seqlens_k=(200, 16), capacity=256, group=4, dtype="bfloat16"),
    "converted, no keys": cache(seqlens_k=(0, 5), capacity=9, dtype="bfloat16"),
    "converted, wide heads": cache(
        seqlens_q=(2, 2), seqlens_k=(130, 31), capacity=140, head_dim=256, group=2, dtype="bfloat16", causal=True
    ),
    "converted, heads of all sizes": cache(
        seqlens_k=(64, 64), capacity=64, group=4, dtype="bfloat16",
        sizes=((1.0, 2.0**-90, 2.0**-90, 1.0), (2.0**90, 1.0, 1.0, 1.0), (1.0, 1.0, 2.0**100, 1.0)),
    ),
    "all at once": cache(
        seqlens_q=(3, 3), seqlens_k=(150, 40), capacity=160, head_dim=105, group=2, dtype="bfloat16", causal=True,
        window=(60, 0), softcap=5.0, alibi="bh", page_size=7, layouts=OFFSET,
    ),
    "causal ALiBi": cache(seqlens_q=(2, 2), seqlens_k=(90, 3), capacity=90, alibi="h", causal=True),
    "softcap": cache(seqlens_q=(2, 2), seqlens_k=(90, 3), capacity=90, alibi="h", softcap=0.5, causal=True),
    "unaligned": cache(seqlens_k=(70, 16), capacity=75, head_dim=37, head_dim_v=5, group=2, layouts=OFFSET),
}  # fmt: skip
STEP = cache(seqlens_q=(1,) * 3, seqlens_k=(150, 7, 0), capacity=200, group=4, new_keys=1)
APPENDS = {
    "one key": STEP,
    "rotated": replace(STEP, rotary_dim=32, causal=True),
    "rotated by halves": replace(STEP, rotary_dim=64, rotary_interleaved=False),
    "all rows at one place": replace(STEP, seqlens_q=(3,) * 3, rotary_dim=64, new_keys=5),
    "rows apart": replace(STEP, seqlens_q=(3,) * 3, rotary_dim=32, rotary_interleaved=False, causal=True, new_keys=3),
    "one length for all": replace(STEP, lengths_as="int", seqlens_k=(40,) * 3, rotary_dim=32),
    "as many new keys as blocks append": replace(STEP, new_keys=16, capacity=300, rotary_dim=32, causal=True),
    "new keys that no row sees": replace(STEP, seqlens_q=(2,) * 3, new_keys=7, window=(3, -5), rotary_dim=32),
    "new keys in several splits": replace(
        STEP, seqlens_k=(57, 1, 120), seqlens_q=(16,) * 3, new_keys=16, rotary_dim=64, causal=True
    ),
    "head_dim 256": replace(STEP, head_dim=256, rotary_dim=256, rotary_interleaved=False, causal=True),
    "pages": replace(STEP, page_size=7, rotary_dim=32),
    "cache_batch_idx": replace(STEP, batch_idx=True, rotary_dim=16),
    "left padding": replace(STEP, leftpad=(5, 3, 0), rotary_dim=32),
    "converted": replace(STEP, dtype="bfloat16", rotary_dim=32),
    "converted, unaligned": replace(
        STEP, dtype="bfloat16", head_dim=37, head_dim_v=9, rotary_dim=32, rotary_interleaved=False,
        layouts=("wide_rows", "offset", "wide_rows", "contiguous"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
def test_a_few_rows_over_many_keys_are_right(turing: LaunchRecord, name: str) -> None:
    check(CACHES[name])
    assert turing.entries == ["decode"]


@pytest.mark.parametrize("name", APPENDS)
def test_a_step_appends_rotates_and_attends_in_one_launch(turing: LaunchRecord, name: str) -> None:
    check(APPENDS[name])
    assert turing.entries == ["decode"] and ("APPEND", 1) in turing.last.variant.macros


MANY = replace(STEP, new_keys=150, capacity=300, rotary_dim=32, rotary_interleaved=False)


@pytest.mark.parametrize("name", [*some(APPENDS, 2), "more than one round of the grid"])
def test_more_new_keys_are_appended_by_a_launch_of_its_own(
    turing: LaunchRecord, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_MAX_NEW_KEYS", 0)
    check(APPENDS.get(name, MANY))
    assert turing.entries == ["append", "decode"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rotary_dim", [0, 16])
def test_a_prefill_over_a_cache_ignores_keys_beyond_an_int_length(
    turing: LaunchRecord, rotary_dim: int, dtype: str
) -> None:
    """Neither as keys nor for the scale of bf16; q lies head by head, unlike the rotated one."""
    for seqlen_k in (5, 30):
        check(
            cache(
                seqlens_q=(20,) * 2, seqlens_k=(seqlen_k,) * 2, capacity=64, head_dim=32, group=2, causal=True,
                lengths_as="int", new_keys=20, rotary_dim=rotary_dim, dtype=dtype, poison="inf",
                layouts=("heads_first", "contiguous", "contiguous", "contiguous"),
            )
        )  # fmt: skip
    assert len({launch.variant for launch in turing.seen}) == len(turing.variants)


def test_launches_leave_the_workspace_as_the_next_one_wants_it(turing: LaunchRecord) -> None:
    for name in ("split keys", "causal", "split keys"):
        check(CACHES[name])
    check(APPENDS["rotated"])
    (before,) = workspaces._workspaces.values()
    for name in ("split keys", "causal"):
        check(CACHES[name])
    (workspace,) = workspaces._workspaces.values()
    assert workspace is before, "the same memory serves again"
    assert not workspace[: 4 * workspaces.COUNTERS].any()


def test_newer_gpus_decode_bf16_as_it_is(hopper: LaunchRecord) -> None:
    check(cache(seqlens_k=(200, 33), capacity=256, group=4, dtype="bfloat16"))


def test_values_that_count_keep_their_digits_beside_larger_ones_that_do_not(turing: LaunchRecord) -> None:
    """The first keys have no weight, and values 2^100 times as large; so have keys of another size."""
    call = replace(CACHES["converted"], seqlens_k=(128, 128), capacity=128, magnitude=0.5).build()
    q, k, v = (call.args[name] for name in ("q", "k_cache", "v_cache"))
    q.copy_(q.abs() + 1)
    k[:, :64] = -(k[:, :64].abs() + 100)
    v[:, :64] *= 2.0**100
    v[:, 64:] *= 2.0**-20
    exact, plain = (judge(call.fn, call.args).out.double() for judge in (oracle.answer, oracle.plain))
    errors = [(x.double() - exact).abs().amax((1, 3)) for x in (attend(call), plain)]
    assert float(exact.abs().max()) < 2.0**-15
    assert (errors[0] <= 2 * errors[1] + torch.finfo(torch.bfloat16).eps * exact.abs().amax((1, 3))).all()


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", -torch.inf), ("bfloat16", torch.inf), ("bfloat16", torch.nan)]
)
def test_an_infinite_value_reaches_the_rows_that_see_it(turing: LaunchRecord, dtype: str, value: float) -> None:
    call = replace(CACHES["converted"], dtype=dtype, seqlens_k=(50, 50), capacity=64).build()
    finite = attend(call)
    call.args["v_cache"][0, 20, 1, 3] = value
    out = attend(call)
    touched = torch.zeros(out.shape, dtype=torch.bool)
    touched[0, :, 4:, 3] = True
    assert torch.equal(out[~touched], finite[~touched])
    assert torch.equal(out[touched].nan_to_num(7.0), torch.full_like(out[touched], value).nan_to_num(7.0))


def test_a_window_does_not_read_keys_before_it(turing: LaunchRecord) -> None:
    call = CACHES["window"].build()
    for name in ("k_cache", "v_cache"):
        call.args[name][0, : 200 - 41] = torch.nan
    assert attend(call).isfinite().all()


def attend(call: Call) -> Tensor:
    out: Tensor = getattr(flash_attn_interface, call.fn)(**call.args)[0]
    return out


@pytest.mark.parametrize("new_keys", [1, 20])
def test_rotary_tables_may_lie_in_memory_each_in_its_own_way(turing: LaunchRecord, new_keys: int) -> None:
    call = replace(APPENDS["rotated"], new_keys=new_keys).build()
    sin = call.args["rotary_sin"]
    call.args["rotary_sin"] = torch.cat([sin, torch.full_like(sin, torch.nan)], 1)[:, : sin.shape[1]]
    check(call)


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
        *some_of([("turing", name) for name in SPLIT if name != WIDEST], 4),
        *some_of([("hopper", WIDEST), ("hopper", "converted"), ("hopper", "head_dim 128")], 2),
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
