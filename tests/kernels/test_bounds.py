"""Impossible lengths and pages, unread by the host before a launch on a GPU: kernels touch no memory outside.

The emulator raises where memory outside of a call's tensors is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_attn_compat import flash_attn_interface
from flash_attn_compat.backends.fused import forward
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.dispatch import call_cache, serve
from tests.kernels import emulate, fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.kernels.test_kernels import APPENDS, BACKWARD, CACHES, FORWARD, PACKED, attend

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())


@pytest.mark.parametrize("shares", [False, True])
def test_lengths_that_are_no_lengths_reach_nothing_outside(
    shares: bool, turing: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """shares: whether sequences share a grid, by these very lengths"""
    fused_on_cpu.share_grids(monkeypatch, shares)
    call = PACKED.build()
    args = call.args | {name: call.args[name].requires_grad_() for name in "qkv"}
    out = flash_attn_interface.flash_attn_varlen_func(**args | {"return_attn_probs": False})
    turing.rows_overlap = True
    # Behind autograd's back: on a GPU nobody reads them before a launch.
    args["cu_seqlens_q"].data.copy_(torch.tensor([-5, 30, 20, 10**6, 7]))
    args["cu_seqlens_k"].data.copy_(torch.tensor([2**31 - 1, -(2**31), 40, 200, 100]))
    out.backward(call.dout)
    flash_attn_interface.flash_attn_varlen_func(**args)
    assert turing.entries == FORWARD + BACKWARD + FORWARD
    assert all(variants.has_shared_grid(variant) == shares for variant in turing.variants)


def launch_unchecked(args: dict[str, object]) -> None:
    """The call without the checks that CPU tensors allow: on a GPU nobody reads lengths before the launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "check_arguments", lambda *arguments: None)
        flash_attn_interface.flash_attn_with_kvcache(**args)  # type: ignore[arg-type]  # the keys are its parameters


def test_wrong_lengths_and_pages_touch_nothing_outside(turing: LaunchRecord) -> None:
    rubbish = torch.tensor([10**9, -7, -(2**31)], dtype=torch.int32)
    call = CACHES["pages"].build()
    table = call.args["block_table"]
    table[0], table[1], table[2] = 10**9, -1, 2**31 - 1
    for lengths in (rubbish, torch.full((3,), 2**31 - 1, dtype=torch.int32)):
        launch_unchecked({**call.args, "cache_seqlens": lengths, "cache_leftpad": rubbish.flip(0)})
    new = {"k": torch.zeros(3, 5, 2, 256).half(), "v": torch.zeros(3, 5, 2, 256).half()}
    for lengths in (rubbish, rubbish.flip(0), torch.full((3,), 5, dtype=torch.int32)):
        launch_unchecked({**call.args, **new, "cache_seqlens": lengths})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward, "_MAX_NEW_KEYS", 0)
            call_cache.forget()
            launch_unchecked({**call.args, **new, "cache_seqlens": lengths})
            call_cache.forget()
    assert turing.entries == ["decode", "decode"] + ["decode", "append", "decode"] * 3


def test_new_keys_outside_the_cache_are_not_written(turing: LaunchRecord) -> None:
    call = replace(CACHES["split keys"], seqlens_k=(318, 320), capacity=320, poison="").build()
    k_cache, before = call.args["k_cache"], call.args["k_cache"].clone()
    new = {name: torch.full((2, 5, 2, 64), 3.0).half() for name in ("k", "v")}
    launch_unchecked({**call.args, **new, "cache_seqlens": torch.tensor([318, -5], dtype=torch.int32)})
    before[0, 318:320] = 3.0
    assert torch.equal(k_cache, before)


def test_rows_beyond_the_rotary_tables_are_not_rotated(turing: LaunchRecord) -> None:
    whole, short = APPENDS["rotated"].build(), APPENDS["rotated"].build()
    del whole.args["rotary_cos"], whole.args["rotary_sin"]
    attend(whole)
    for name in ("rotary_cos", "rotary_sin"):
        short.args[name] = short.args[name][:7]
    launch_unchecked(short.args)
    plain, turned = whole.args["k_cache"], short.args["k_cache"]
    assert torch.equal(turned[:2].nan_to_num(9.0), plain[:2].nan_to_num(9.0))
    assert not torch.equal(turned[2, 0], plain[2, 0])
