"""The largest magnitudes that converted bf16 is scaled by (absmax), run by the emulator, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, loader, maxima
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.mask import Mask
from tests import fused_on_cpu
from tests.kernels import emulate

pytestmark = pytest.mark.skipif(bool(emulate.why_not()), reason=emulate.why_not())

Parts = list[tuple[Tensor, Tensor, Tensor, Tensor]]  # q, k, v, dout of each sequence, (rows, heads, channels)


def numbers(*shape: int) -> Tensor:
    """Of very different sizes from sequence to sequence and head to head, some of them not finite."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-100, 100, (*shape[:-3], 1, *shape[-2:-1], 1)).float())
    x.view(-1)[::97] = torch.inf
    x.view(-1)[5::89] = torch.nan
    return x.bfloat16()


def dense() -> tuple[AttentionCall, Tensor, Parts]:
    q, k, v, dout = numbers(2, 9, 4, 40), numbers(2, 1200, 2, 40), numbers(2, 1200, 2, 24), numbers(2, 9, 4, 24)
    return AttentionCall(q, k, v, 1.0, Mask(), 9, 1200), dout, [(q[b], k[b], v[b], dout[b]) for b in range(2)]


def packed() -> tuple[AttentionCall, Tensor, Parts]:
    q, k, v, dout = numbers(30, 4, 64), numbers(90, 2, 64), numbers(90, 2, 64), numbers(30, 4, 64)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([2, 12, 12, 27], [0, 50, 60, 85]))
    call = AttentionCall(q, k, v, 1.0, Mask(), 15, 50, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, is_dense=False)
    rows = [(slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])) for b in range(3)]
    return call, dout, [(q[i], k[j], v[j], dout[i]) for i, j in rows]


def paged() -> tuple[AttentionCall, Tensor, Parts]:
    q, k, v, dout = numbers(2, 20, 4, 64), numbers(9, 7, 2, 64), numbers(9, 7, 2, 64), numbers(2, 20, 4, 64)
    table, used = torch.tensor([[3, 1, 8], [0, 5, 2]], dtype=torch.int32), torch.tensor([20, 8], dtype=torch.int32)
    call = AttentionCall(q, k, v, 1.0, Mask(), 20, 21, block_table=table, seqused_k=used, is_dense=False)
    keys, values = ([x[table[b].long()].flatten(0, 1)[: used[b]] for b in range(2)] for x in (k, v))
    return call, dout, [(q[b], keys[b], values[b], dout[b]) for b in range(2)]


def largest_finite(x: Tensor, heads_k: int) -> Tensor:
    x = x.float().abs().nan_to_num(0.0, posinf=0.0)
    by_head = torch.cat([x, x.new_zeros(1, *x.shape[1:])]).amax((0, 2))
    return by_head.view(heads_k, -1).amax(1)


@pytest.mark.parametrize("make", [dense, packed, paged])
@pytest.mark.parametrize("with_dout", [False, True])
def test_each_sequence_and_key_head_has_its_largest_finite_magnitude(
    monkeypatch: pytest.MonkeyPatch, make: object, with_dout: bool
) -> None:
    fused_on_cpu.emulate(monkeypatch, 75)
    torch.manual_seed(3)
    call, dout, parts = make()  # type: ignore[operator]
    target = loader.target(0)
    plan = maxima.Maxima(call, launcher.kind_of(call, target, 8), target, dout if with_dout else None)
    dout_at = launcher.address("dout", dout, dout.dtype, -1, launcher.reach(dout)) if with_dout else 0
    found = plan.run(*launcher.Inputs(call).of(call), dout_at).view(4, call.batch, call.nheads_k, -1)
    right = torch.stack([torch.stack([largest_finite(x, call.nheads_k) for x in part]) for part in parts], 1)
    tensors = 4 if with_dout else 3
    assert torch.equal(found.amax(-1)[:tensors], right[:tensors])
