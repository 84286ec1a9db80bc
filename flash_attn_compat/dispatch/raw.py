"""The private functions' forward and backward, outside of autograd: a gradient through their results is an error.

The backward accepts the ``out`` and ``softmax_lse`` of a longer sequence, and writes into the caller's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attn_compat.core import checks, unwritten
from flash_attn_compat.core.arguments import Options, Packing, Purpose, request_of
from flash_attn_compat.core.call import RNG_STATE, BackwardInputs, Gradients
from flash_attn_compat.core.prepared import Request
from flash_attn_compat.core.scores import round_up
from flash_attn_compat.dispatch import choice, ops
from flash_attn_compat.dispatch.serve import backward_tensors, find, gradients, whole

# rng_state describes the mask, and any backend may draw it again.
_FORWARD = Purpose(return_lse=True, shares_dropout_mask=True)
_WITH_DMASK = _FORWARD._replace(return_dmask=True)
_BACKWARD = Purpose(given_lse=True, shares_dropout_mask=True)

Results = tuple[Tensor, Tensor, Tensor, Tensor]
Written = tuple[Tensor | None, Tensor | None, Tensor | None]


def options_of(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool = False,
) -> Options:
    """In the order in which flash-attn's private functions have them."""
    window_size = window_size_left, window_size_right
    return Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_softmax: bool, packing: Packing | None = None
) -> Results:
    """Return (out, softmax_lse, S_dmask, rng_state); S_dmask has no elements without return_softmax."""
    if return_softmax and checks.dropout(options.dropout_p) <= 0.0:
        raise RuntimeError("return_softmax is only supported when p_dropout > 0.0")
    if ops.must_be_one_operator_without_derivatives(q, k, v):
        return ops.forward(q, k, v, options, packing, bool(return_softmax))
    purpose = _WITH_DMASK if return_softmax else _FORWARD

    def run() -> Results:
        return whole(request_of(q, k, v, options, purpose, packing))

    inputs = q, k, v, options.alibi_slopes
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return run()
    results: Results = _WithoutFormula.apply(run, *inputs)
    return results


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_softmax: bool, packing: Packing, zero_tensors: bool,
    num_splits: int,
) -> Results:  # fmt: skip
    """zero_tensors, num_splits: as in _flash_attn_varlen_forward"""
    if num_splits > 1 and packing.block_table is not None:
        _check_num_splits(num_splits, q, k, options, packing)
    out, lse, dmask, rng_state = forward(q, k, v, options, return_softmax, packing)
    if zero_tensors:
        lse = lse.masked_fill(unwritten.is_outside(packing.cu_seqlens_q, q.shape[0]), -torch.inf)
    return out, lse, dmask, rng_state


def _check_num_splits(num_splits: int, q: Tensor, k: Tensor, options: Options, packing: Packing) -> None:
    checks.is_tensor("q", q)
    checks.is_tensor("k", k)
    is_plain = options.dropout_p <= 0.0 and options.alibi_slopes is None and max(options.window_size) < 0
    if packing.max_seqlen_q != 1 or q.shape[-2] <= k.shape[-2] or not is_plain:
        raise RuntimeError(f"num_splits > 1 is not supported with a block_table, got num_splits = {num_splits}")
    if num_splits > 128:
        raise RuntimeError(f"num_splits > 128 not supported, got {num_splits}")


class _WithoutFormula(torch.autograd.Function):
    """Raises in its backward, as an operator without a registered autograd formula does."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Results], *inputs: object) -> Results:
        return run()

    @staticmethod
    def backward(*unused: object) -> NoReturn:
        raise RuntimeError(
            "Trying to backward through flash-attn's private functions, but no autograd formula was registered for "
            "them: call flash_attn_func or another public function, or _flash_attn_backward in a Function of your own"
        )


# ---- backward --------------------------------------------------------------------------------------------------------


def backward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, upstream: BackwardInputs, written: Written,
    packing: Packing | None = None,
) -> Tensor:  # fmt: skip
    """Write dq, dk and dv; return softmax_d as _flash_attn_backward and _flash_attn_varlen_backward do."""
    dout, out, lse = upstream[:3]
    if ops.must_be_one_operator_without_derivatives(dout, q, k, v, out, lse):
        with torch.no_grad():
            _write(ops.backward(q, k, v, options, upstream, packing), written)
        delta = None
    else:
        delta = _backward(request_of(q, k, v, options, _BACKWARD, packing), upstream, written)
    if delta is None:
        delta = (dout.detach().float() * out.detach()).sum(-1, dtype=torch.float32).transpose(-1, -2)
    dropout_p = checks.dropout(options.dropout_p)
    if dropout_p > 0.0:
        delta = delta * (1.0 - dropout_p)
    if packing is not None:
        return _packed_softmax_d(delta, packing.cu_seqlens_q)
    seqlen_q = q.shape[1]
    behind = round_up(seqlen_q, 128) - seqlen_q
    return torch.nn.functional.pad(delta, (0, behind)) if behind else delta.contiguous()


def _backward(request: Request, upstream: BackwardInputs, written: Written) -> Tensor | None:
    """Write dq, dk and dv; return delta if the backend computed it, else None."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _backward(request, upstream, written)
    known = find(request)
    checks.upstream_memory(upstream, *written)
    dout, out, lse, given_state = upstream.dout, upstream.out, upstream.lse, upstream.rng_state
    upstream = BackwardInputs(dout.resolve_neg(), out.resolve_neg(), lse.resolve_neg(), given_state)
    rng_state = given_state if known.call.dropout_p else None
    into = _places_for_kernels(written)
    backend, found = gradients(
        known, backward_tensors(request.tensors, rng_state), upstream, into,
        lambda: checks.upstream(known.call.with_tensors(*request.tensors[:RNG_STATE]), upstream, *written),
    )  # fmt: skip
    if backend is not None:
        choice.served[backend.name] += 1
    if into is None:
        _write(found.gradients, written)
    return found.delta


def _places_for_kernels(written: Written) -> Gradients | None:
    """Return the caller's gradients if a kernel can write all three: none is missing, none is a negated view."""
    dq, dk, dv = written
    if dq is None or dk is None or dv is None or dq.is_neg() or dk.is_neg() or dv.is_neg():
        return None
    return Gradients(dq, dk, dv)


def _write(found: Gradients, targets: Written) -> None:
    for target, value in zip(targets, found):
        if target is not None:
            target.copy_(value)


def _packed_softmax_d(delta: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """(nheads, total_q) as (nheads, total_q + 128 * batch), 128 more columns after each sequence.

    0 for tokens outside of all sequences, where kernels leave whatever the memory held.
    """
    nheads, total_q = delta.shape
    batch = cu_seqlens_q.shape[0] - 1
    softmax_d = delta.new_zeros(nheads, total_q + 128 * batch)
    tokens = torch.arange(total_q, device=delta.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:], tokens, right=True)  # batch behind the last one
    lies_outside = (sequence == batch) | (tokens < cu_seqlens_q[0])
    return softmax_d.index_copy_(1, tokens + 128 * sequence, delta.masked_fill(lies_outside, 0.0))
