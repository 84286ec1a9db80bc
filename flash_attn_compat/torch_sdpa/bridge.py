"""The only file of torch_sdpa that calls dispatch: it prepares a call and runs it if our kernels are chosen for it."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from flash_attn_compat.core.call import (
    GIVEN_LSE,
    NEEDS_GRAD,
    RETURN_LSE,
    BackwardInputs,
    DenseInputs,
    Gradients,
    Inputs,
    Result,
    Scalars,
)
from flash_attn_compat.core.prepared import Prepared
from flash_attn_compat.dispatch import choice, heads_first, observers, serve
from flash_attn_compat.dispatch.call_cache import call_of, settled

KERNELS, PYTORCH = "fused", "pytorch"
as_own = heads_first.as_own


def attend(tensors: DenseInputs, scalars: Scalars) -> Tensor | None:
    """Return dense attention's out, recorded by autograd; None if another backend would serve the call.

    out is (batch, heads, rows, channels), contiguous in memory as (batch, rows, heads, channels).
    """
    flags = observers.recording_flags((tensors.q, tensors.k, tensors.v))
    prepared = _find_fused(tensors, scalars, _deciding_flags(flags, scalars))
    if prepared is None:
        return None
    if flags & NEEDS_GRAD:
        return heads_first.record(prepared, tensors)
    return as_own(serve.run(prepared, tensors)[1].out)


def _deciding_flags(flags: int, scalars: Scalars) -> int:
    """Return the flags by which a backend is chosen: with dropout those of a recorded call.

    Under a reentrant checkpoint the forward is not recorded and its recomputation is; both must drop the same.
    """
    return NEEDS_GRAD if scalars.dropout_p else flags


def forward(tensors: Inputs, scalars: Scalars, return_lse: bool) -> Result | None:
    """Return a forward's result, dense or packed, outside of autograd; None if another backend would serve the call."""
    tensors, flags = settled(tensors, RETURN_LSE if return_lse else 0)
    prepared = _find_fused(tensors, scalars, flags)
    return None if prepared is None else serve.run(prepared, tensors)[1]


def backward(
    tensors: Inputs, scalars: Scalars, upstream: BackwardInputs, into: Gradients | None
) -> Gradients | None:  # fmt: skip
    """Return dq, dk, dv from any kernel's out and LSE, outside of autograd; None if another backend would serve.

    into: tensors to write to, or None for new ones
    """
    tensors, flags = settled(tensors, GIVEN_LSE)
    prepared = _find_fused(tensors, scalars, flags)
    if prepared is None:
        return None
    return serve.gradients(prepared, serve.backward_tensors(tensors, None), upstream, into)[1].gradients


def decline_reasons(tensors: Inputs, scalars: Scalars) -> list[str]:
    """Return our kernels' reasons to decline the call; an empty list if they serve it. Shapes as in flash_attn_func."""
    flags = _deciding_flags(observers.recording_flags((tensors.q, tensors.k, tensors.v)), scalars)
    return choice.reasons_against(KERNELS, call_of(tensors, scalars, flags))


def explain(reasons: list[str]) -> NoReturn:
    """Raise Explained, which ends ``explain``. reasons: our kernels' to decline the call; none if they serve it"""
    computed_by = PYTORCH if reasons else KERNELS
    raise choice.Explained(choice.Explanation(computed_by, {KERNELS: reasons, PYTORCH: []}))


def _find_fused(tensors: Inputs, scalars: Scalars, flags: int) -> Prepared | None:
    """Return the prepared call if our kernels compute it."""
    try:
        prepared = serve.find(tensors, scalars, flags)
    except choice.BackendNotSupported:  # the user forces another backend
        return None
    return prepared if prepared.backend is not None and prepared.backend.name == KERNELS else None


def align_with_last_key(q: Tensor, k: Tensor, v: Tensor, axis: int) -> tuple[Tensor, Tensor, bool, int]:
    """Express a causal mask aligned with the first key in flash-attn's terms, which align it with the last key.

    Returns k and v without the keys that no row sees, causal, and window_size_right. axis: the index of the axis of
    rows in q and of keys in k and v
    """
    rows, keys = q.shape[axis], k.shape[axis]
    if rows < keys:
        k, v = k.narrow(axis, 0, rows), v.narrow(axis, 0, rows)
    return (k, v, False, rows - keys) if rows > keys else (k, v, True, -1)
