"""Forward and backward of flash-attn's private functions, outside of autograd: backward() through them raises.

The backward here accepts ``out`` and ``softmax_lse`` of a longer sequence, and writes into the caller's gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attn_compat.backends import unwritten
from flash_attn_compat.core import checks, overlap
from flash_attn_compat.core.arguments.build import with_page_lengths
from flash_attn_compat.core.call import BackwardInputs, Gradients
from flash_attn_compat.core.features import DMASK, Feature
from flash_attn_compat.core.inputs import Inputs, Options, PackedInputs
from flash_attn_compat.core.kernel_layout import round_up
from flash_attn_compat.dispatch import choice, ops
from flash_attn_compat.dispatch.pytorch.observers import are_strided, must_be_one_operator, plain_use, recorded_use
from flash_attn_compat.dispatch.serve import backward_inputs, compute, find, gradients, run_outside_autograd

# Values of Options.use. SHARED_DROPOUT_MASK: the returned rng_state must let any backend draw the mask again.
_FORWARD = Feature.LSE | Feature.SHARED_DROPOUT_MASK
_FORWARD_WITH_DMASK = _FORWARD | DMASK
BACKWARD = Feature.GIVEN_LSE | Feature.SHARED_DROPOUT_MASK

_Results = tuple[Tensor, Tensor, Tensor, Tensor]
_Written = tuple[Tensor | None, Tensor | None, Tensor | None]


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward_use(return_softmax: bool) -> int:
    """Return Options.use of a private function's forward. return_softmax: whether it returns S_dmask"""
    return _FORWARD_WITH_DMASK if return_softmax else _FORWARD


def forward(x: Inputs, options: Options) -> _Results:
    """Return (out, softmax_lse, S_dmask, rng_state). options.use: as ``forward_use`` returns it"""
    q, k, v, slopes = x.q, x.k, x.v, x.alibi_slopes
    if options.use & DMASK and checks.dropout(options.dropout_p) <= 0.0:
        raise RuntimeError("return_softmax is only supported when p_dropout > 0.0")
    use = plain_use((q, k, v)) if slopes is None else None
    if use is None and must_be_one_operator((q, k, v), False) and are_strided((*x,)):
        return ops.forward(x, options)
    if x.block_table is not None:
        x = with_page_lengths(x)
    if not (recorded_use((q, k, v), slopes) if use is None else use):
        return run_outside_autograd(x, options)
    compute = functools.partial(run_outside_autograd, x, options)
    results: _Results = _WithoutFormula.apply(compute, q, k, v, slopes)
    return results


def varlen_forward(x: Inputs, options: Options, zero_tensors: bool, num_splits: int) -> _Results:
    """Return what ``forward`` does, for a packed call. zero_tensors, num_splits: as in _flash_attn_varlen_forward"""
    q, starts_q = x.q, x.cu_seqlens_q
    checks.is_given("cu_seqlens_q", starts_q)
    if num_splits > 1 and x.block_table is not None:
        _check_num_splits(num_splits, x, options)
    out, lse, dmask, rng_state = forward(x, options)
    if zero_tensors:
        lse = lse.masked_fill(unwritten.is_outside(starts_q, q.shape[0]), -torch.inf)
    return out, lse, dmask, rng_state


def forward_into(out: Tensor, x: Inputs, options: Options) -> Tensor | None:
    """Write a forward's result to ``out``; return softmax_lse if ``options.use`` asks for it. Autograd records nothing.

    A kernel writes to a contiguous ``out`` directly. No input may share its memory. Rows of ``out`` that belong to no
    packed sequence become 0 or stay unchanged.
    """
    if not isinstance(out, Tensor):
        checks.is_tensor("out", out)  # raises, since ``out`` is no tensor
    if x.seqused_k is None:
        x = with_page_lengths(x)
    _, result = compute(x, options, out=out)
    return result.lse if options.use & Feature.LSE else None


def _check_num_splits(num_splits: int, x: Inputs, options: Options) -> None:
    checks.is_tensor("q", x.q)
    checks.is_tensor("k", x.k)
    has_window = max(options.window_size_left, options.window_size_right) >= 0
    is_plain = options.dropout_p <= 0.0 and x.alibi_slopes is None and not has_window
    if options.max_seqlen_q != 1 or x.q.shape[-2] <= x.k.shape[-2] or not is_plain:
        raise RuntimeError(f"num_splits > 1 is not supported with a block_table, got num_splits = {num_splits}")
    if num_splits > 128:
        raise RuntimeError(f"num_splits > 128 not supported, got {num_splits}")


class _WithoutFormula(torch.autograd.Function):
    """Raises in its backward, just as operators without a registered autograd formula do in PyTorch."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], _Results], *inputs: object) -> _Results:
        return run()

    @staticmethod
    def backward(*unused: object) -> NoReturn:
        raise RuntimeError(
            "Trying to backward through flash-attn's private functions, but no autograd formula was registered for "
            "them: call flash_attn_func or another public function, or _flash_attn_backward in a Function of your own"
        )


# ---- backward --------------------------------------------------------------------------------------------------------


def backward(x: Inputs, options: Options, upstream: BackwardInputs, written: _Written) -> Tensor:
    """Write dq, dk and dv to ``written``; return softmax_d as flash-attn's private backwards do.

    options: ``use`` is BACKWARD
    """
    # Ask for the type first: Dynamo of PyTorch 2.4 cannot read cu_seqlens_q of the other inputs, a class attribute.
    starts_q = x.cu_seqlens_q if type(x) is PackedInputs else None
    dout, out, q = upstream.dout, upstream.out, x.q
    observed = dout, q, x.k, x.v, out, upstream.softmax_lse
    if must_be_one_operator(observed, False) and are_strided((*x,)):
        for name, gradient in () if torch.compiler.is_compiling() else zip("qkv", written):
            if gradient is not None:
                overlap.refuse(f"d{name}", gradient)
        with torch.no_grad():
            _write(ops.backward(x, options, upstream), written)
        delta = None
    else:
        was_recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # faster than torch.no_grad(), which makes nine Python calls
        try:
            delta = _backward(x, options, upstream, written)
        finally:
            torch._C._set_grad_enabled(was_recording)
    if delta is None:
        delta = (dout.detach().float() * out.detach()).sum(-1, dtype=torch.float32).transpose(-1, -2)
    dropout_p = checks.dropout(options.dropout_p)
    if dropout_p > 0.0:
        delta = delta * (1.0 - dropout_p)
    if starts_q is not None:
        return _packed_softmax_d(delta, starts_q)
    seqlen_q = q.shape[1]
    behind = round_up(seqlen_q, 128) - seqlen_q
    return torch.constant_pad_nd(delta, (0, behind)) if behind else delta.contiguous()


def _backward(x: Inputs, options: Options, upstream: BackwardInputs, written: _Written) -> Tensor | None:
    """Write dq, dk and dv; return delta if the backend computed it, else None."""
    entry = find(x, options)
    checks.upstream_memory(upstream, *written)
    dout, out, lse, given_state = upstream.dout, upstream.out, upstream.lse, upstream.rng_state
    upstream = BackwardInputs(dout.resolve_neg(), out.resolve_neg(), lse.resolve_neg(), given_state)
    rng_state = given_state if entry.call.dropout_p else None
    (dq, dk, dv), into = written, None
    if not (dq is None or dk is None or dv is None or dq.is_neg() or dk.is_neg() or dv.is_neg()):
        into = Gradients(dq, dk, dv)  # a kernel can write all three
    backend, found = gradients(
        entry, backward_inputs(x, rng_state), upstream, into,
        lambda: checks.upstream(entry.call.over(x), upstream, *written),
    )  # fmt: skip
    if backend is not None:
        choice.served[backend.name] += 1
    if into is None:
        _write(found.gradients, written)
    return found.delta


def _write(found: Gradients, targets: _Written) -> None:
    for target, value in zip(targets, found):
        if target is not None:
            target.copy_(value)


def _packed_softmax_d(delta: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Return delta (nheads, total_q) as flash-attn lays it out: with 128 more columns after each sequence.

    Columns that belong to no token of a sequence are 0; kernels write nothing for tokens outside of all sequences.
    """
    nheads, total_q = delta.shape
    batch = cu_seqlens_q.shape[0] - 1
    softmax_d = delta.new_zeros(nheads, total_q + 128 * batch)
    tokens = torch.arange(total_q, device=delta.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:], tokens, right=True)  # tokens after the last sequence get ``batch``
    lies_outside = (sequence == batch) | (tokens < cu_seqlens_q[0])
    return softmax_d.index_copy_(1, tokens + 128 * sequence, delta.masked_fill(lies_outside, 0.0))
