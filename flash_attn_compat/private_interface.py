"""flash-attn's semi-public functions, which ring attention and others build on, in their 2.8 shapes.

They compute outside autograd: a gradient through their results is an error, as it is through flash-attn's.
The backward takes whatever ``out`` and ``softmax_lse`` it is given, those of a longer sequence included, and writes
into the gradients it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attn_compat.engine import checks, outside
from flash_attn_compat.engine.build import Options, Packing, Purpose, dense_request, packed_request
from flash_attn_compat.engine.call import Gradients, Upstream
from flash_attn_compat.engine.memory import Request
from flash_attn_compat.engine.probabilities import key_block_size, round_up
from flash_attn_compat.serving import dispatch, torch_ops
from flash_attn_compat.serving.serve import backward_tensors, find, gradients, whole

USE_TRITON_ROCM = False

# rng_state describes the mask, and any backend may draw it again.
_FORWARD = Purpose(return_lse=True, shares_dropout_mask=True)
_WITH_DMASK = _FORWARD._replace(return_dmask=True)
_BACKWARD = Purpose(given_lse=True, shares_dropout_mask=True)


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """``x``, copied only if its last dimension is strided."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """The smallest multiple of ``m`` that is at least ``x``."""
    return round_up(x, m)


def _get_block_size_n(device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Width of the key blocks by which S_dmask was scaled; AssertionError for head_dim over 256."""
    return key_block_size(torch.device(device), head_dim, is_dropout, is_causal)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dense attention; arguments as in flash_attn_func.

    Returns (out, softmax_lse, S_dmask, rng_state): S_dmask is empty without return_softmax, rng_state (2,)
    int64 reproduces the dropout mask in _flash_attn_backward.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    _check_return_softmax(return_softmax, dropout_p)
    if torch_ops.are_asked_for_without_derivatives(q, k, v):
        return torch_ops.forward(q, k, v, options, return_dmask=bool(return_softmax))
    purpose = _WITH_DMASK if return_softmax else _FORWARD
    return _unrecorded(lambda: whole(dense_request(q, k, v, options, purpose)), q, k, v, alibi_slopes)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed attention; arguments as in flash_attn_varlen_func, and per sequence:

    seqused_k: (batch,) int32, how many keys are used; leftpad_k: (batch,) int32, how many are skipped first
    zero_tensors: tokens outside of all sequences get LSE -inf instead of 0 (their out is 0 in any case)
    num_splits: later than 2.8.3; changes nothing. With a block table more than one split is refused where flash-attn's
        kernel has none: but for single queries of grouped heads without dropout, ALiBi and windows
    """
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    _check_return_softmax(return_softmax, dropout_p)
    if num_splits > 1 and block_table is not None:
        checks.is_tensor("q", q)
        checks.is_tensor("k", k)
        plain = dropout_p <= 0.0 and alibi_slopes is None and window_size_left < 0 and window_size_right < 0
        _check_num_splits(num_splits, max_seqlen_q == 1 and q.shape[-2] > k.shape[-2] and plain)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k, leftpad_k)
    if torch_ops.are_asked_for_without_derivatives(q, k, v):
        out, lse, dmask, rng_state = torch_ops.forward(q, k, v, options, packing, bool(return_softmax))
    else:
        purpose = _WITH_DMASK if return_softmax else _FORWARD
        out, lse, dmask, rng_state = _unrecorded(
            lambda: whole(packed_request(q, k, v, packing, options, purpose)), q, k, v, alibi_slopes
        )
    if zero_tensors:
        lse = lse.masked_fill(outside.mask(cu_seqlens_q, q.shape[0]), -torch.inf)
    return out, lse, dmask, rng_state


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Gradients of dense attention, written into dq, dk, dv through their strides.

    Probabilities are exp(score - softmax_lse) and their mean gradient is rowsum(dout * out), so ``out`` and
    ``softmax_lse`` may belong to a longer sequence of which k and v are one part: the results are then that
    part's exact share.

    Returns softmax_d: (batch, nheads, seqlen_q rounded up to 128) fp32, rowsum(dout * out) * (1 - dropout_p).
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic
    )
    upstream = Upstream(dout, out, softmax_lse, rng_state)
    if torch_ops.are_asked_for_without_derivatives(dout, q, k, v, out, softmax_lse):
        with torch.no_grad():
            _write(torch_ops.backward(q, k, v, options, upstream), dq, dk, dv)
    else:
        _backward(dense_request(q, k, v, options, _BACKWARD), upstream, dq, dk, dv)
    padded = round_up(q.shape[1], 128)
    softmax_d = q.new_zeros((q.shape[0], q.shape[2], padded), dtype=torch.float32)
    softmax_d[:, :, : q.shape[1]] = _row_products(dout, out, dropout_p).transpose(1, 2)
    return softmax_d


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Gradients of packed attention; as _flash_attn_backward, with tokens outside of all sequences set to 0.

    Returns softmax_d: (nheads, total_q + 128 * batch) fp32, sequence b from column cu_seqlens_q[b] + 128 * b.
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic
    )
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    upstream = Upstream(dout, out, softmax_lse, rng_state)
    if torch_ops.are_asked_for_without_derivatives(dout, q, k, v, out, softmax_lse):
        with torch.no_grad():
            _write(torch_ops.backward(q, k, v, options, upstream, packing), dq, dk, dv)
    else:
        _backward(packed_request(q, k, v, packing, options, _BACKWARD), upstream, dq, dk, dv)
    return _packed_softmax_d(_row_products(dout, out, dropout_p), cu_seqlens_q)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool = False,
) -> Options:
    window_size = window_size_left, window_size_right
    is_causal = checks.flag("causal", causal)
    return Options(dropout_p, softmax_scale, is_causal, window_size, softcap, alibi_slopes, deterministic)


def _check_return_softmax(return_softmax: bool, dropout_p: float) -> None:
    if return_softmax and checks.dropout(dropout_p) <= 0.0:
        raise RuntimeError("return_softmax is only supported when p_dropout > 0.0")


def _check_num_splits(num_splits: int, has_splits: bool) -> None:
    if not has_splits:
        raise RuntimeError(f"num_splits > 1 is not supported with a block_table, got num_splits = {num_splits}")
    if num_splits > 128:
        raise RuntimeError(f"num_splits > 128 not supported, got {num_splits}")


_Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _unrecorded(forward: Callable[[], _Results], *inputs: object) -> _Results:
    """What ``forward`` returns; if autograd would record it, so that a gradient through it is an error."""
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return forward()
    results: _Results = _WithoutFormula.apply(forward, *inputs)
    return results


class _WithoutFormula(torch.autograd.Function):
    """As an operator for which nobody registered a backward."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[[], _Results], *inputs: object) -> _Results:
        return forward()

    @staticmethod
    def backward(*unused: object) -> NoReturn:
        raise RuntimeError(
            "Trying to backward through flash-attn's private functions, but no autograd formula was registered for "
            "them: call flash_attn_func or another public function, or _flash_attn_backward in a Function of your own"
        )


def _backward(request: Request, upstream: Upstream, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> None:
    if torch.is_grad_enabled():
        with torch.no_grad():
            _backward(request, upstream, dq, dk, dv)
        return
    known, request = find(request)
    checks.upstream(known.call.with_tensors(*request.tensors[:9]), upstream, dq, dk, dv)
    rng_state = upstream.rng_state if known.call.dropout_p else None
    into = None if dq is None or dk is None or dv is None else Gradients(dq, dk, dv)
    backend, found = gradients(known, backward_tensors(request.tensors, rng_state), upstream, into)
    if backend is not None:
        dispatch.count(backend)
    if into is None:
        _write(found, dq, dk, dv)


def _write(found: Gradients, *targets: Tensor | None) -> None:
    for target, value in zip(targets, found):
        if target is not None:
            target.copy_(value)


def _row_products(dout: Tensor, out: Tensor, dropout_p: float) -> Tensor:
    """rowsum(dout * out) * (1 - dropout_p) in fp32, without the head_dim axis."""
    products = (dout.detach().float() * out.detach()).sum(-1, dtype=torch.float32)
    return products * (1.0 - dropout_p) if dropout_p > 0.0 else products


def _packed_softmax_d(products: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """(total_q, nheads) as (nheads, total_q + 128 * batch), 128 more columns after each sequence."""
    total_q, nheads = products.shape
    batch = cu_seqlens_q.shape[0] - 1
    softmax_d = products.new_zeros(nheads, total_q + 128 * batch)
    sequence, _ = outside.token_places(cu_seqlens_q, total_q)
    columns = torch.arange(total_q, device=products.device) + 128 * sequence
    return softmax_d.index_copy_(1, columns, products.t())
