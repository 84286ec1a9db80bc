"""bf16 calls on GPUs whose fast kernel takes fp16 only: the same numbers, moved into fp16's range.

fp16 has the longer mantissa, so only range can be lost. q is scaled up and k down by one power of two that
makes their largest magnitudes equal, which leaves every score as it was; v and dout are scaled to at most
1 and the results scaled back. Powers of two are found on the device and change no digit.
docs/exactness.md has the comparison with computing in fp32, FLASH_ATTN_COMPAT_BF16=fp32 chooses that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream


def applies(call: AttentionCall) -> bool:
    """Whether the kernel can't take this call's dtype on the GPU it counts as running on."""
    return call.q.dtype == torch.bfloat16 and settings.capability(call.q.device) < (8, 0)


def forward(call: AttentionCall, compute: Callable[[AttentionCall], Result]) -> Result:
    lowered = _lower(call)
    result = compute(lowered.call)
    # First back to bf16's range: a small result would vanish in fp16.
    return result._replace(out=result.out.to(call.q.dtype) / lowered.v)


def backward(
    call: AttentionCall, upstream: Upstream, compute: Callable[[AttentionCall, Upstream], Gradients]
) -> Gradients:
    lowered = _lower(call)
    dtype = lowered.call.q.dtype
    scale_dout = (
        _to_unit(upstream.dout) if dtype == torch.float16 else torch.ones((), dtype=torch.float32, device=call.q.device)
    )
    dout = (upstream.dout * scale_dout).to(dtype)
    out = (upstream.out * lowered.v).to(dtype)
    found = compute(lowered.call, upstream._replace(dout=dout, out=out))
    # Scaling by powers of two in fp32, where none of them can leave the range.
    through_scores = 1.0 / (lowered.v * scale_dout)
    dq = found.dq.float() * (through_scores * lowered.q)
    dk = found.dk.float() * (through_scores / lowered.q)
    return Gradients(*(g.to(call.q.dtype) for g in (dq, dk, found.dv.float() / scale_dout)))


class _Lowered(NamedTuple):
    """The call in the kernel's dtype, and what q (and the inverse of k) and v were multiplied by."""

    call: AttentionCall
    q: Tensor
    v: Tensor


def _lower(call: AttentionCall) -> _Lowered:
    if settings.bf16_precision() == "fp32":
        one = torch.ones((), dtype=torch.float32, device=call.q.device)
        return _Lowered(call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float()), one, one)
    balance = _power_of_two(torch.sqrt(_largest(call.k) / _largest(call.q)))
    scale_v = _to_unit(call.v)
    half = call._replace(
        q=(call.q * balance).to(torch.float16),
        k=(call.k / balance).to(torch.float16),
        v=(call.v * scale_v).to(torch.float16),
    )
    return _Lowered(half, balance, scale_v)


def _to_unit(tensor: Tensor) -> Tensor:
    """The power of two that brings the largest magnitude of ``tensor`` to about 1."""
    return _power_of_two(1.0 / _largest(tensor))


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude as a 0-dim fp32 tensor; 1 for a tensor of zeros."""
    lowest, highest = torch.aminmax(tensor)
    largest = torch.maximum(highest, -lowest).float()
    return torch.where(largest > 0, largest, 1.0)


def _power_of_two(number: Tensor) -> Tensor:
    exponent = torch.log2(number).round().nan_to_num_(0.0).clamp_(-100, 100)
    return torch.exp2(exponent)
