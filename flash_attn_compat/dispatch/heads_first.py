"""Attention over (batch, heads, seqlen, head_dim), recorded as PyTorch's own operators are: out is a tensor of its own.

It is no view, its version is 0, and it may be written to before its backward; so may a mask of booleans.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core.call import DenseInputs, new_inputs
from flash_attn_compat.core.prepared import Prepared
from flash_attn_compat.dispatch.autograd import differentiate, is_wrapped, unwrapped
from flash_attn_compat.dispatch.serve import find, run

_MASK = DenseInputs._fields.index("bias") + 3  # its place among the saved tensors, the last of a call


def record(prepared: Prepared, tensors: DenseInputs) -> Tensor:
    """Return out of a prepared call, with its second and third axes swapped, recorded for autograd."""
    out: Tensor = _record(prepared, tensors, None, *map(unwrapped, tensors[:3]))
    return out


def as_own(out: Tensor) -> Tensor:
    """(batch, seqlen, heads, head_dim) with its axes swapped, as a tensor that is no view."""
    return out.contiguous().transpose(1, 2).data


class _HeadsFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prepared: Prepared, tensors: DenseInputs, slopes: None, *inputs: Tensor) -> Tensor:
        ctx.prepared, result = run(prepared, tensors)
        ctx.used = settings.used_backend()
        # ``out`` has another version than result.out, whose memory it shares: writing to it does not end the graph.
        out = as_own(result.out)
        ctx.out_version, ctx.mask_version = _version(out), None
        mask = tensors.bias
        if mask is not None and mask.dtype is torch.bool:
            ctx.mask_version, ctx.mask_was = _version(mask), mask._version
            tensors = tensors._replace(bias=mask.data)
        results = result.out, result.softmax_lse, result.rng_state
        ctx.save_for_backward(*inputs, *results, *tensors[3:-1], *result.saved)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 6
        saved = ctx.saved_tensors  # once, as in autograd.py
        if ctx.mask_version is not None and ctx.mask_version._version != ctx.mask_was:
            mask = _kept_mask(ctx.prepared, saved[_MASK], saved[_MASK + 1 :])
            saved = (*saved[:_MASK], mask, *saved[_MASK + 1 :])
        if ctx.out_version._version and not (torch.is_grad_enabled() or is_wrapped(dout)):  # which make their own
            # The caller has written to the first out. Hooks may have moved tensors, so the call is found again.
            tensors = new_inputs(DenseInputs, (*saved[:3], *saved[6 : _MASK + 1], saved[5]))
            with settings.using_backend(ctx.used):
                prepared = find(tensors, ctx.prepared.scalars, ctx.prepared.flags)
                saved = (*saved[:3], run(prepared, tensors)[1].out, *saved[4:])
        state = SimpleNamespace(
            prepared=ctx.prepared, used=ctx.used, inputs=3, needs_input_grad=ctx.needs_input_grad,
            saved_tensors=saved,
        )  # fmt: skip
        return differentiate(state, dout.transpose(1, 2), None, None)


_record = super(torch.autograd.Function, _HeadsFirst).apply  # as in autograd.py


def _version(tensor: Tensor) -> Tensor:
    """A tensor without elements whose version is that of ``tensor``, now and later."""
    alias = tensor.detach()
    alias.data = _nothing(tensor.dtype, tensor.device)
    return alias


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def _kept_mask(prepared: Prepared, mask: Tensor, saved: tuple[Any, ...]) -> Tensor:
    """The mask of booleans as the forward saw it."""
    found: Tensor | None = prepared.backend.saved_mask(mask, saved)
    if found is None:
        raise RuntimeError(
            "attn_mask is needed for gradients, and has been modified by an inplace operation since the forward. The "
            f"backend {prepared.backend.name} kept no copy of it: give the forward a copy"
        )
    return found
