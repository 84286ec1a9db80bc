"""How a call becomes one launch of somebody else's CUDA kernel, and how its results become ours.

Tensors get the alignment and the head_dim that such kernels read; LSE and gradients come back as flash-attn has them.
Nothing waits for the GPU.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.base import Backend, deliver
from flash_attn_compat.engine import alignment, outside
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream


class Launched(NamedTuple):
    """What a launch leaves: out (as q), LSE as the kernel lays it out, and the dropout's state, if any."""

    out: Tensor
    lse: Tensor
    state: tuple[Tensor, ...]


class OneLaunch(Backend):
    """A backend that launches; what goes in and what comes out is prepared here.

    zeroes_outside: whether its launches leave 0 in out and gradients at tokens outside of all sequences
    """

    zeroes_outside: ClassVar[bool] = False

    @abc.abstractmethod
    def launch_forward(self, call: AttentionCall) -> Launched:
        """One forward launch of a call that is ready for it; tokens outside of all sequences may have any LSE."""

    @abc.abstractmethod
    def launch_backward(
        self, call: AttentionCall, dout: Tensor, launched: Launched, into: Gradients | None
    ) -> Gradients:
        """dq, dk, dv in the shapes of the call's q, k, v: ``into``, or new tensors; outside as in launch_forward."""

    def as_read(self, call: AttentionCall) -> AttentionCall:
        """The call with its tensors as the kernel reads them."""
        changes: dict[str, Any] = {}
        for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
            read = alignment.padded(tensor.resolve_neg())
            if read is not tensor:
                changes[name] = read
        return call._replace(**changes) if changes else call

    def official_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        """The kernel's LSE as flash-attn lays it out: (batch, heads, seqlen_q), packed (heads, total_q)."""
        return lse

    def native_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        """flash-attn's LSE as the kernel's backward reads it."""
        return lse.contiguous()

    def forward(self, call: AttentionCall) -> Result:
        ready = self.as_read(call)
        launched = self.launch_forward(ready)
        lse = self.official_lse(ready, launched.lse) if call.return_lse else None
        if call.cu_seqlens_q is not None:
            rows = [] if self.zeroes_outside else [launched.out]
            outside.clear(call.cu_seqlens_q, rows if lse is None else [*rows, lse.t().unsqueeze(-1)])
        saved = (launched.lse, *launched.state) if call.needs_grad else ()
        return Result(alignment.narrowed(launched.out, call.head_dim_v), lse, None, saved)

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        ready = self.as_read(call)
        dout, out = alignment.padded(upstream.dout), alignment.padded(upstream.out)
        lse, *state = upstream.saved or (self.native_lse(ready, upstream.lse),)
        place = into if into is not None and all(map(is_as_read, into)) else None
        found = self.launch_backward(ready, dout, Launched(out, lse, tuple(state)), place)
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None and not self.zeroes_outside:
            if call.cu_seqlens_q is call.cu_seqlens_k and call.q.shape[0] == call.k.shape[0]:
                outside.clear(call.cu_seqlens_q, found)
            else:
                outside.clear(call.cu_seqlens_q, found[:1])
                outside.clear(call.cu_seqlens_k, found[1:])
        if found is place:
            return found
        return deliver(Gradients(*map(_of_its_own_heads, found, (call.q, call.k, call.v))), call, into)


def is_as_read(tensor: Tensor) -> bool:
    """Whether the kernel reads, or writes, it as it is."""
    return tensor.shape[-1] % 8 == 0 and alignment.is_ready(tensor)


def _of_its_own_heads(gradient: Tensor, source: Tensor) -> Tensor:
    """In the shape of ``source``: gradients of copies of a head summed in fp32, channels that were added cut off."""
    if gradient.shape[-2] != source.shape[-2]:
        gradient = torch.unflatten(gradient, -2, (source.shape[-2], -1)).sum(-2, dtype=torch.float32).to(source.dtype)
    return alignment.narrowed(gradient, source.shape[-1])
