"""The only file of torch_sdpa that calls dispatch: it prepares a call and runs it if our kernels are chosen for it."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

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
from flash_attn_compat.dispatch import choice, heads_first, observers, serve
from flash_attn_compat.dispatch.call_cache import Keyed, call_of, keyed

KERNELS, PYTORCH = "fused", "pytorch"
as_own = heads_first.as_own


def attend(tensors: Tensors, scalars: Scalars) -> Tensor | None:
    """Return dense attention's out, recorded by autograd; None if another backend would serve the call.

    out is (batch, heads, rows, channels), contiguous in memory as (batch, rows, heads, channels).
    """
    flags = observers.recording_flags(tensors[:3])
    call = keyed(tensors, scalars, _deciding_flags(flags, scalars))
    prepared = _find_fused(call)
    if prepared is None:
        return None
    if flags & NEEDS_GRAD:
        return heads_first.record(prepared, call[1])
    return as_own(serve.run(prepared, call[1])[1].out)


def dense_tensors(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensors:
    """Return the tensors of a dense call in the order of TENSORS. q, k, v: as flash_attn_func's"""
    return (q, k, v, None) if bias is None else (q, k, v, *(None,) * 8, bias)


def _deciding_flags(flags: int, scalars: Scalars) -> int:
    """Return the flags by which a backend is chosen: with dropout those of a recorded call.

    Under a reentrant checkpoint the forward is not recorded and its recomputation is; both must drop the same.
    """
    return NEEDS_GRAD if scalars.dropout_p else flags


def forward(tensors: Tensors, scalars: Scalars, return_lse: bool) -> Result | None:
    """Return a forward's result, dense or packed, outside of autograd; None if another backend would serve the call."""
    call = keyed(tensors, scalars, RETURN_LSE if return_lse else 0)
    prepared = _find_fused(call)
    return None if prepared is None else serve.run(prepared, call[1])[1]


def backward(
    tensors: Tensors, scalars: Scalars, upstream: BackwardInputs, into: Gradients | None
) -> Gradients | None:  # fmt: skip
    """Return dq, dk, dv from any kernel's out and LSE, outside of autograd; None if another backend would serve.

    into: tensors to write to, or None for new ones
    """
    call = keyed(tensors, scalars, GIVEN_LSE)
    prepared = _find_fused(call)
    if prepared is None:
        return None
    return serve.gradients(prepared, serve.backward_tensors(call[1], None), upstream, into)[1].gradients


def decline_reasons(tensors: Tensors, scalars: Scalars) -> list[str]:
    """Return our kernels' reasons to decline the call; an empty list if they serve it. Shapes as in flash_attn_func."""
    flags = _deciding_flags(observers.recording_flags(tensors[:3]), scalars)
    return choice.reasons_against(KERNELS, call_of(tensors, scalars, flags))


def explain(reasons: list[str]) -> NoReturn:
    """Raise Explained, which ends ``explain``. reasons: our kernels' to decline the call; none if they serve it"""
    computed_by = PYTORCH if reasons else KERNELS
    raise choice.Explained(choice.Explanation(computed_by, {KERNELS: reasons, PYTORCH: []}))


def _find_fused(call: Keyed) -> Prepared | None:
    """Return the prepared call if our kernels compute it."""
    try:
        prepared = serve.find(*call)
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
