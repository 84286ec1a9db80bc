"""The only file of aten that calls the engine: a call is built, and computed if our kernels are chosen for it."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core.arguments import RECORDED, Options, Packing, Purpose, request_of
from flash_attn_compat.core.call import BackwardInputs, Gradients, Result
from flash_attn_compat.core.prepared import Known, Request
from flash_attn_compat.dispatch import autograd, choice, heads_first, serve

KERNELS, PYTORCH = "fused", "pytorch"
as_own = heads_first.as_own


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, bias: Tensor | None = None) -> Tensor | None:
    """out of dense attention, recorded for autograd; None where others would compute. (batch, heads, rows, channels)

    The memory behind out is that of (batch, rows, heads, channels), contiguous.
    """
    purpose = autograd.purpose((q, k, v))
    rows_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    request = request_of(*rows_first, options, _decisive(purpose, options), bias=bias)
    known = _ours(request)
    if known is None:
        return None
    if purpose.needs_grad:
        return heads_first.record(known, request)
    return heads_first.as_own(serve.run(known, request)[1].out)


def _decisive(purpose: Purpose, options: Options) -> Purpose:
    """Dropout's calls are decided about as if they were recorded.

    The forward under a reentrant checkpoint is not recorded, and its recomputation, which must drop the same, is.
    """
    return RECORDED if options.dropout_p else purpose


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packing: Packing | None, bias: Tensor | None, return_lse: bool
) -> Result | None:
    """out and the LSE outside of autograd, dense or packed; None where others would compute."""
    request = request_of(q, k, v, options, Purpose(return_lse=return_lse), packing, bias)
    known = _ours(request)
    return None if known is None else serve.run(known, request)[1]


def backward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packing: Packing | None, bias: Tensor | None,
    upstream: BackwardInputs, into: Gradients | None,
) -> Gradients | None:  # fmt: skip
    """Gradients from whoever's out and LSE, outside of autograd; None where others would compute."""
    request = request_of(q, k, v, options, Purpose(given_lse=True), packing, bias)
    known = _ours(request)
    if known is None:
        return None
    return serve.gradients(known, serve.backward_tensors(request.tensors, None), upstream, into)[1].gradients


def against(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packing: Packing | None = None, bias: Tensor | None = None
) -> list[str]:
    """What speaks against our kernels for such a call. Shapes as in flash_attn_func."""
    request = request_of(q, k, v, options, _decisive(autograd.purpose((q, k, v)), options), packing, bias)
    return choice.reasons_against(KERNELS, request.kind.build(request).call)


def explain(reasons: list[str]) -> NoReturn:
    """End the call in progress, which is only to be explained: what speaks against our kernels, if anything."""
    computed_by = PYTORCH if reasons else KERNELS
    raise choice.Explained(choice.Explanation(computed_by, {KERNELS: reasons, PYTORCH: []}))


def _ours(request: Request) -> Known | None:
    """What is known of a request that our kernels compute."""
    try:
        known = serve.find(request)
    except choice.BackendNotSupported:  # of a backend that the user named
        return None
    return known if known.backend is not None and known.backend.name == KERNELS else None


def has_flash(device: torch.device) -> bool:
    """Whether PyTorch has flash kernels of its own for this GPU."""
    return device.type == "cuda" and settings.capability(device) >= (8, 0)
