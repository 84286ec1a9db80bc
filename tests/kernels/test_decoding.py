"""Decoding, appending and prefill over caches by the CUDA kernels, run by the emulator, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_interface
from flash_attn_compat.backends.fused import forward
from flash_attn_compat.backends.fused.launching import workspaces
from tests.forms.plain import all_but_thorough, some
from tests.kernels import emulate
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.kernels.test_kernels import cache, check
from verify import oracle
from verify.call import Call
from verify.problems import Problem

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())


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


# Others of these come first, decode with the same code, or differ in numbers alone.
LATE = ["two tiles of rows", "narrow heads", "negative scale", "causal", "window", "packed", "pages", "converted"]
LATE += ["converted, wide heads", "causal ALiBi"]


@pytest.mark.parametrize("name", all_but_thorough(CACHES, LATE))
def test_a_few_rows_over_many_keys_are_right(turing: LaunchRecord, name: str) -> None:
    check(CACHES[name])
    assert turing.entries == ["decode"]


@pytest.mark.parametrize("name", all_but_thorough(APPENDS, ["one key", "head_dim 256", "pages", "converted"]))
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
