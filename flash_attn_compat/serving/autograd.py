"""From a call to its outputs, with gradients where they are wanted: one autograd Function for every backend.

Packed inputs enter the graph whole, so that their gradient is one packed tensor written once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends import Backend, KernelsFailed
from flash_attn_compat.engine import callers_state, checks
from flash_attn_compat.engine.append import Append, by_operators
from flash_attn_compat.engine.build import FORWARD, RECORDED, Purpose
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream, wants_transforms
from flash_attn_compat.engine.features import Feature
from flash_attn_compat.engine.layout import lse_dtype
from flash_attn_compat.engine.probabilities import signed_probabilities
from flash_attn_compat.serving import dispatch


def unpack(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of what the caller gave: (q, k, v), (q, kv) or (qkv,).

    Packed tensors hold them along their third axis from the end.
    """
    *alone, packed = inputs
    if len(alone) < 2:
        _check_packed(packed, 3 - len(alone))
        q, k, v = (*alone, *[packed.select(-3, index) for index in range(3 - len(alone))])
        return q, k, v
    q, k, v = inputs
    return q, k, v


def _check_packed(packed: Tensor, expected: int) -> None:
    name = {2: "kv", 3: "qkv"}[expected]
    checks.is_tensor(name, packed)
    axis = packed.dim() - 3
    if axis < 0:
        raise IndexError(f"Dimension out of range: {name} must have at least 4 dimensions, got {tuple(packed.shape)}")
    size = packed.shape[axis]
    if size < expected:
        raise IndexError(
            f"index {expected - 1} is out of bounds for dimension {axis} with size {size}: {name} of shape "
            f"{tuple(packed.shape)} must hold {expected} tensors along its third axis from the end"
        )
    if size > expected:
        raise RuntimeError(f"{name} must hold {expected} tensors along axis {axis}, got shape {tuple(packed.shape)}")


# out, softmax_lse, S_dmask. Any, because what the call does not ask for is None, and what it asks for is not.
Outputs = tuple[Tensor, Any, Any]


def purpose(inputs: tuple[Tensor, ...]) -> Purpose:
    """Whether autograd records a call of ``inputs``."""
    if torch.is_grad_enabled():
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:  # what is none, the checks refuse by name
                return RECORDED
    return FORWARD


def attend(inputs: tuple[Tensor, ...], call: AttentionCall) -> Outputs:
    """(out, softmax_lse, S_dmask) of ``call``, over views of ``inputs``; recorded for autograd if it needs_grad.

    S_dmask is None unless call.return_dmask, softmax_lse may be None unless call.return_lse.
    """
    if wants_transforms(*inputs):
        call = call._replace(transformed=True, needs_grad=False)
    elif call.needs_grad:
        outputs: Outputs = _Attention.apply(call, *inputs)
        return outputs
    return _finish(call, run_forward(call))


def run_forward(call: AttentionCall, new: Append | None = None) -> Result:
    """Serve a call outside autograd; ``new`` keys go into its cache first, once a backend is found for it."""
    return _served(call, new)[1]


def run_whole(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask, rng_state) of a call outside autograd; what it does not ask for has no elements."""
    result = run_forward(call)
    lse = result.lse.contiguous() if call.return_lse else call.q.new_empty(0, dtype=lse_dtype(call.q.dtype))
    rng_state = result.rng_state
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=call.q.device)
    return result.out, lse, signed_probabilities(call, rng_state), rng_state


def _served(call: AttentionCall, new: Append | None = None) -> tuple[Backend | None, Result]:
    """The backend that served the call (None if there was nothing to compute), and its result."""
    if callers_state.autocasts(call.q):
        with callers_state.without_autocast(call.q.device):
            return _served(call, new)
    backend = dispatch.choose_unless_empty(call)
    if new is not None:
        call = call._replace(q=by_operators(call, new))
    while backend is not None:
        try:
            result = backend.forward(call)
        except KernelsFailed as failure:
            backend = dispatch.choose_instead(backend, call, failure)
        else:
            dispatch.count(backend)
            return backend, result
    return None, _empty_result(call)


def run_backward(
    backend: Backend | None, call: AttentionCall, upstream: Upstream, into: Gradients | None = None
) -> tuple[Backend | None, Gradients]:
    """The gradients of a call, and the backend that computed them: ``backend``, or another where its kernels failed.

    backend: None for an empty call; into: written through their strides where given
    """
    if backend is None:
        gradients = into or Gradients(*map(torch.empty_like, (call.q, call.k, call.v)))
        for gradient in gradients:
            gradient.zero_()
        return None, gradients
    if callers_state.autocasts(call.q):
        with callers_state.without_autocast(call.q.device):
            return run_backward(backend, call, upstream, into)
    if upstream.dout.is_neg():
        upstream = upstream._replace(dout=upstream.dout.resolve_neg())
    has_dlse = upstream.dlse is not None
    # What the forward kept is for its own backend alone.
    if has_dlse and not backend.capabilities.features & Feature.LSE_GRADIENT:
        given = call.from_given_results(lse_gradient=True)
        other = dispatch.choose_whoever_is_named(given)
        return run_backward(other, given, upstream._replace(saved=()), into)
    if backend.has_failed and backend.reasons((given := call.from_given_results(has_dlse)).traits()):
        return run_backward(dispatch.choose(given), given, upstream._replace(saved=()), into)
    try:
        return backend, backend.backward(call, upstream, into)
    except KernelsFailed as failure:
        given = call.from_given_results(has_dlse)
        other = dispatch.choose_instead(backend, given, failure)
        return run_backward(other, given, upstream._replace(saved=()), into)


def gradient_of_lse(dlse: Tensor | None, lse: Tensor | None) -> Tensor | None:
    """As kernels take it. The LSE of a row without keys depends on nothing, whatever a loss makes of its infinity."""
    return None if dlse is None or lse is None else dlse.masked_fill(lse.isinf(), 0.0).resolve_neg()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: AttentionCall, *tensors: Tensor) -> Outputs:
        ctx.backend, result = _served(call)
        ctx.used = settings.used_backend()
        ctx.inputs = len(tensors)
        ctx.description = call.with_tensors()
        ctx.save_for_backward(
            *tensors, result.out, result.softmax_lse, result.rng_state,
            call.alibi_slopes, call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.leftpad_k, call.block_table,
            *result.saved,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        return _finish(call, result)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
        if settings.used_backend() != ctx.used:  # on a GPU this is autograd's own thread
            with settings.using_backend(ctx.used):
                return _Attention.backward(ctx, dout, dlse, _)
        saved = ctx.saved_tensors  # once: activation checkpointing recomputes them at the first look only
        inputs = saved[: ctx.inputs]
        out, lse, rng_state, slopes, cu_q, cu_k, used, leftpad, table, *kept = saved[ctx.inputs :]
        if dout is None and dlse is None:
            return None, *(None for _ in inputs)
        if dout is not None and type(dout) is not Tensor:
            dout = dout.clone()  # of a pending collective, that is its result
        q, k, v = map(Tensor.resolve_neg, unpack(inputs))  # as build made the call of them
        call = ctx.description.with_tensors(q, k, v, slopes, cu_q, cu_k, used, leftpad, table)
        call = call._replace(rng_state=rng_state)
        if torch.is_grad_enabled():
            return None, *_differentiable_gradients(inputs, ctx.needs_input_grad[1:], call, dout, dlse)
        dout = torch.zeros_like(out) if dout is None else dout
        upstream = Upstream(dout, out, lse, rng_state, tuple(kept), gradient_of_lse(dlse, lse))
        if len(inputs) == 3:
            return None, *run_backward(ctx.backend, call, upstream)[1]
        packed = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)
        run_backward(ctx.backend, call, upstream, into=Gradients(*unpack(packed)))
        return None, *packed


def _differentiable_gradients(
    inputs: tuple[Tensor, ...],
    wanted: tuple[bool, ...],
    call: AttentionCall,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:
    """Gradients that can be differentiated again: the forward once more in differentiable operations."""
    if call.dropout_p and call.rng_state is None:
        raise RuntimeError(
            "create_graph=True needs a dropout mask that can be drawn again, and the kernel that served this call "
            'keeps its own: use dropout_p=0, or compute the forward under flash_attn_compat.use_backend("chunked")'
        )
    again = call._replace(transformed=True, needs_grad=False)
    leaves = [tensor for tensor, is_wanted in zip(inputs, wanted) if is_wanted]
    with torch.enable_grad(), callers_state.without_autocast(call.q.device):
        result = dispatch.choose_whoever_is_named(again).forward(again)
        given = [
            (output, gradient)
            for output, gradient in ((result.out, dout), (result.softmax_lse, dlse))
            if output is not None and gradient is not None and output.requires_grad
        ]
        outputs, upstreams = [output for output, _ in given], [gradient for _, gradient in given]
        found = torch.autograd.grad(outputs, leaves, upstreams, create_graph=True, allow_unused=True) if given else ()
        gradients = iter(found or [None] * len(leaves))
        return [_or_zeros(next(gradients), tensor) if is_wanted else None for tensor, is_wanted in zip(inputs, wanted)]


def _or_zeros(gradient: Tensor | None, tensor: Tensor) -> Tensor:
    """The gradient, or zeros that can be differentiated too: no row sees a key."""
    if gradient is not None:
        return gradient
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)


def _finish(call: AttentionCall, result: Result) -> Outputs:
    if not call.return_lse:
        return result.out, None, None
    return result.out, result.lse.contiguous(), signed_probabilities(call, result.rng_state)


def _empty_result(call: AttentionCall) -> Result:
    """No rows or no keys anywhere: zeros, and +inf for rows without keys."""
    device = call.q.device
    lse = torch.full(call.lse_shape, torch.inf, dtype=lse_dtype(call.q.dtype), device=device)
    return Result(call.q.new_zeros(call.out_shape), lse, torch.zeros(2, dtype=torch.int64, device=device))
