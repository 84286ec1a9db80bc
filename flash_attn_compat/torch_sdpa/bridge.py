"""The only file of aten that calls the engine: a call is built, and computed if our kernels are chosen for it."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core.arguments import Keyed, call_of, keyed
from flash_attn_compat.core.call import (
    GIVEN_LSE,
    NEEDS_GRAD,
    RETURN_LSE,
    BackwardInputs,
    Gradients,
    Result,
    Scalars,
)
from flash_attn_compat.core.prepared import Prepared, Tensors
from flash_attn_compat.dispatch import autograd, choice, heads_first, serve

KERNELS, PYTORCH = "fused", "pytorch"
as_own = heads_first.as_own


def attend(q: Tensor, k: Tensor, v: Tensor, scalars: Scalars, bias: Tensor | None = None) -> Tensor | None:
    """Return out of dense attention, recorded for autograd, or None where another backend would compute it.

    All of (batch, heads, rows, channels). The memory behind out is that of (batch, rows, heads, channels), contiguous.
    """
    flags = autograd.recording_flags((q, k, v))
    rows_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    call = keyed(dense_tensors(*rows_first, bias), scalars, _deciding_flags(flags, scalars))
    prepared = _ours(call)
    if prepared is None:
        return None
    if flags & NEEDS_GRAD:
        return heads_first.record(prepared, call[1])
    return heads_first.as_own(serve.run(prepared, call[1])[1].out)


def dense_tensors(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensors:
    """Return the tensors of a dense call in the order of TENSORS."""
    return (q, k, v, None) if bias is None else (q, k, v, *(None,) * 6, bias)


def _deciding_flags(flags: int, scalars: Scalars) -> int:
    """Return the flags by which a backend is chosen: with dropout those of a recorded call.

    The forward under a reentrant checkpoint is not recorded, and its recomputation, which must drop the same, is.
    """
    return NEEDS_GRAD if scalars.dropout_p else flags


def forward(tensors: Tensors, scalars: Scalars, return_lse: bool) -> Result | None:
    """Return out and the LSE outside of autograd, dense or packed; None where another backend would compute them."""
    call = keyed(tensors, scalars, RETURN_LSE if return_lse else 0)
    prepared = _ours(call)
    return None if prepared is None else serve.run(prepared, call[1])[1]


def backward(
    tensors: Tensors, scalars: Scalars, upstream: BackwardInputs, into: Gradients | None
) -> Gradients | None:  # fmt: skip
    """Return gradients from any kernel's out and LSE, outside of autograd; None where another backend would."""
    call = keyed(tensors, scalars, GIVEN_LSE)
    prepared = _ours(call)
    if prepared is None:
        return None
    return serve.gradients(prepared, serve.backward_tensors(call[1], None), upstream, into)[1].gradients


def against(tensors: Tensors, scalars: Scalars) -> list[str]:
    """Return the reasons why our kernels would not serve such a call. Shapes as in flash_attn_func."""
    flags = _deciding_flags(autograd.recording_flags(tensors[:3]), scalars)
    return choice.reasons_against(KERNELS, call_of(tensors, scalars, flags))


def explain(reasons: list[str]) -> NoReturn:
    """End the call in progress, which is only to be explained: what speaks against our kernels, if anything."""
    computed_by = PYTORCH if reasons else KERNELS
    raise choice.Explained(choice.Explanation(computed_by, {KERNELS: reasons, PYTORCH: []}))


def _ours(call: Keyed) -> Prepared | None:
    """Return the prepared call if our kernels compute it."""
    try:
        prepared = serve.find(*call)
    except choice.BackendNotSupported:  # of a backend that the user named
        return None
    return prepared if prepared.backend is not None and prepared.backend.name == KERNELS else None


def has_flash(device: torch.device) -> bool:
    """Whether PyTorch has flash kernels of its own for this GPU."""
    return device.type == "cuda" and settings.capability(device) >= (8, 0)
