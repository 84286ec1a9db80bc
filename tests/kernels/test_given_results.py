"""A backward that is given its out and LSE, as ring attention gives them: the kernels, run by the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_interface
from tests.kernels import emulate
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.kernels.test_kernels import BF16, DENSE
from verify import oracle
from verify.call import Call

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())


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
