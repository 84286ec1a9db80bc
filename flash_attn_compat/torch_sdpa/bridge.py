"""The only file of torch_sdpa that calls dispatch: it builds a request and runs it if our kernels are chosen for it."""

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
    """Compute dense attention, recorded by autograd; None if another backend would serve the call.

    q, k, v and out: (batch, heads, rows, channels); out's memory is contiguous as (batch, rows, heads, channels)
    """
    purpose = autograd.purpose((q, k, v))
    rows_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    request = request_of(*rows_first, options, _deciding_purpose(purpose, options), bias=bias)
    known = _find_fused(request)
    if known is None:
        return None
    if purpose.needs_grad:
        return heads_first.record(known, request)
    return heads_first.as_own(serve.run(known, request)[1].out)


def _deciding_purpose(purpose: Purpose, options: Options) -> Purpose:
    """Return the purpose that decides on the backend: with dropout always that of a recorded call.

    Under a reentrant checkpoint the forward is not recorded and its recomputation is; both must drop the same.
    """
    return RECORDED if options.dropout_p else purpose


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packing: Packing | None, bias: Tensor | None, return_lse: bool
) -> Result | None:
    """Compute dense or packed attention outside of autograd; None if another backend would serve the call."""
    request = request_of(q, k, v, options, Purpose(return_lse=return_lse), packing, bias)
    known = _find_fused(request)
    return None if known is None else serve.run(known, request)[1]


def backward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packing: Packing | None, bias: Tensor | None,
    upstream: BackwardInputs, into: Gradients | None,
) -> Gradients | None:  # fmt: skip
    """Compute gradients from any kernel's out and LSE, outside of autograd; None if another backend would do so."""
    request = request_of(q, k, v, options, Purpose(given_lse=True), packing, bias)
    known = _find_fused(request)
    if known is None:
        return None
    return serve.gradients(known, serve.backward_tensors(request.tensors, None), upstream, into)[1].gradients


def decline_reasons(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packing: Packing | None = None, bias: Tensor | None = None
) -> list[str]:
    """Return our kernels' reasons to decline the call. Shapes as in flash_attn_func."""
    request = request_of(q, k, v, options, _deciding_purpose(autograd.purpose((q, k, v)), options), packing, bias)
    return choice.reasons_against(KERNELS, request.kind.build(request).call)


def explain(reasons: list[str]) -> NoReturn:
    """End the call under ``explain`` with our kernels' reasons to decline it; without reasons they would serve it."""
    computed_by = PYTORCH if reasons else KERNELS
    raise choice.Explained(choice.Explanation(computed_by, {KERNELS: reasons, PYTORCH: []}))


def _find_fused(request: Request) -> Known | None:
    """Return the prepared call if our kernels serve the request, else None."""
    try:
        known = serve.find(request)
    except choice.BackendNotSupported:  # the user forces another backend
        return None
    return known if known.backend is not None and known.backend.name == KERNELS else None


def align_with_last_key(q: Tensor, k: Tensor, v: Tensor, axis: int) -> tuple[Tensor, Tensor, bool, tuple[int, int]]:
    """Express a causal mask aligned with the first key in flash-attn's terms, which align it with the last key.

    Returns k and v without the keys that no row sees, causal, and window_size. axis: of rows and keys
    """
    rows, keys = q.shape[axis], k.shape[axis]
    if rows < keys:
        k, v = k.narrow(axis, 0, rows), v.narrow(axis, 0, rows)
    return (k, v, False, (-1, rows - keys)) if rows > keys else (k, v, True, (-1, -1))


def has_flash(device: torch.device) -> bool:
    """Whether PyTorch has flash kernels of its own for this GPU."""
    return device.type == "cuda" and settings.capability(device) >= (8, 0)
