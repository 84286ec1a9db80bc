"""One autograd Function for every backend: from a call to outputs, with gradients where autograd records.

Packed inputs enter the graph whole, so that their gradient is one packed tensor written once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import torch_state
from flash_attn_compat.core.call import (
    NEEDS_GRAD,
    SLOPES_GRADIENT,
    AttentionCall,
    BackwardInputs,
    DenseInputs,
    Gradients,
    Inputs,
    Result,
    new_inputs,
)
from flash_attn_compat.core.prepared import Prepared
from flash_attn_compat.dispatch import at_exit, choice
from flash_attn_compat.dispatch.call_cache import settled
from flash_attn_compat.dispatch.serve import backward_tensors, find, gradients, run


def unpack(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return q, k and v as views of checked inputs (q, k, v), (q, kv) or (qkv,)."""
    return inputs if len(inputs) == 3 else (*inputs[:-1], *inputs[-1].unbind(-3))


# out, softmax_lse, S_dmask. Any, because an output is None exactly where the call does not ask for it.
Outputs = tuple[Tensor, Any, Any]


def attend(inputs: tuple[Tensor, ...], tensors: Inputs, scalars: tuple[Any, ...], flags: int) -> Outputs:
    """Return (out, softmax_lse, S_dmask) of a call over views of ``inputs``, recorded if the call needs gradients.

    softmax_lse and S_dmask may be None where the call does not ask for them. The others are the arguments of ``find``.
    """
    if type(tensors) is not DenseInputs:
        tensors, flags = settled(tensors, flags)
    prepared = find(tensors, scalars, flags)
    if flags & NEEDS_GRAD:
        slopes = unwrapped(tensors.alibi_slopes) if flags & SLOPES_GRADIENT else None
        outputs: Outputs = _record(prepared, tensors, slopes, *map(unwrapped, inputs))
        return outputs
    prepared, result = run(prepared, tensors)
    return _outputs(result) if prepared.call.return_lse else (result.out, None, None)


def _outputs(result: Result) -> Outputs:
    return result.out, result.lse.contiguous(), result.probabilities


def gradient_of_lse(dlse: Tensor | None, lse: Tensor | None) -> Tensor | None:
    """Return dlse as kernels take it: 0 where a row has no keys, for its LSE, +inf, depends on nothing."""
    return None if dlse is None or lse is None else dlse.masked_fill(lse.isinf(), 0.0).resolve_neg()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prepared: Prepared, tensors: Inputs, slopes: Tensor | None, *inputs: Tensor
    ) -> Outputs:  # fmt: skip
        ctx.prepared, result = run(prepared, tensors)
        ctx.used, ctx.inputs = settings.used_backend(), len(inputs)
        ctx.save_for_backward(*inputs, result.out, result.softmax_lse, result.rng_state, *tensors[3:-1], *result.saved)
        ctx.set_materialize_grads(False)
        return _outputs(result) if ctx.prepared.call.return_lse else (result.out, None, None)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
        if settings.used_backend() != ctx.used:  # on a GPU this is autograd's own thread
            with settings.using_backend(ctx.used):
                return _Attention.backward(ctx, dout, dlse, _)
        saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them at the first access only
        inputs, (out, lse, rng_state, *rest) = saved[: ctx.inputs], saved[ctx.inputs :]
        if dout is None and dlse is None:
            return (None,) * (3 + len(inputs))
        if dout is not None and type(dout) is not Tensor:
            dout = dout.clone()  # waits for a pending collective
        family = ctx.prepared.family
        count = len(family._fields) - 4  # from the slopes to before rng_state
        tensors = backward_tensors(new_inputs(family, (*unpack(inputs), *rest[:count], None)), rng_state)
        if torch.is_grad_enabled() or is_wrapped(dout) or is_wrapped(dlse):
            call = ctx.prepared.call.over(tensors)
            leaves = (call.alibi_slopes, *inputs)
            return None, None, *differentiable_gradients(leaves, ctx.needs_input_grad[2:], call, dout, dlse)
        of_slopes = None
        if ctx.needs_input_grad[2]:
            of_slopes = gradient_of_slopes(ctx.prepared.call.over(tensors), dout, dlse)
        dout = torch.zeros_like(out) if dout is None else dout
        upstream = BackwardInputs(dout, out, lse, rng_state, tuple(rest[count:]), gradient_of_lse(dlse, lse))
        if len(inputs) == 3:
            return None, None, of_slopes, *gradients(ctx.prepared, tensors, upstream)[1].gradients
        packed = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)
        gradients(ctx.prepared, tensors, upstream, into=Gradients(*unpack(packed)))
        return None, None, of_slopes, *packed


def gradient_of_slopes(call: AttentionCall, dout: Tensor | None, dlse: Tensor | None) -> Tensor:
    """Return the gradient of ``call.alibi_slopes``, by a second forward in differentiable operations."""
    q, k, v, slopes = call.q.detach(), call.k.detach(), call.v.detach(), call.alibi_slopes
    assert slopes is not None
    leaf = slopes.detach().requires_grad_()
    wanted = True, False, False, False
    found, *_ = differentiable_gradients((leaf, q, k, v), wanted, call._replace(given_lse=False), dout, dlse)
    assert found is not None  # it was wanted
    return found


def is_wrapped(gradient: Tensor | None) -> bool:
    """Whether torch.func or is_grads_batched=True wraps a gradient, which then has no memory for a kernel."""
    return gradient is not None and (_is_transformed(gradient) or _is_batched(gradient))


# The parts of Function.apply that are needed here; the rest is Python that looks for transforms, and costs time.
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_record, unwrapped = super(torch.autograd.Function, _Attention).apply, torch._C._functorch.unwrap_if_dead
# The same backward for other Functions: takes a context with the same fields and the gradients of the three outputs.
differentiate = _Attention.backward


def differentiable_gradients(
    inputs: tuple[Tensor | None, ...], wanted: tuple[bool, ...], call: AttentionCall, dout: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """Return gradients that can be differentiated again, by a second forward in differentiable operations.

    inputs: the call's slopes, then its tensors as ``unpack`` takes them
    wanted: for each input, whether its gradient is wanted; the others are None in the result
    """
    create_graph = torch.is_grad_enabled()
    if call.dropout_p and call.rng_state is None:
        raise RuntimeError(
            "create_graph=True needs a dropout mask that can be drawn again, as is_grads_batched=True does, and the "
            "kernel that served this call keeps its own: use dropout_p=0, or compute the forward under "
            'flash_attn_compat.use_backend("chunked")'
        )
    at_exit.wait_for_autograd(call.q)
    with torch.enable_grad(), torch_state.without_autocast(call.q.device):
        # Separate views: flash_attn_func(x, x, x) has three gradients in x.
        slopes = None if inputs[0] is None else inputs[0].view_as(inputs[0])
        tensors = tuple([tensor.view_as(tensor) for tensor in inputs[1:] if tensor is not None])
        (q, k, v), inputs = unpack(tensors), (slopes, *tensors)
        leaves = [tensor for tensor, is_wanted in zip(inputs, wanted) if is_wanted and tensor is not None]
        again = choice.as_differentiable(call._replace(q=q, k=k, v=v, alibi_slopes=slopes))
        result = choice.choose_unforced(again).forward(again)
        if dlse is not None and result.softmax_lse is not None:
            dlse = dlse.masked_fill(result.softmax_lse.isinf(), 0.0)
        given = [
            (output, gradient)
            for output, gradient in ((result.out, dout), (result.softmax_lse, dlse))
            if output is not None and gradient is not None and output.requires_grad
        ]
        outputs, upstreams = [output for output, _ in given], [gradient for _, gradient in given]
        options = {"create_graph": create_graph, "allow_unused": True}
        found = torch.autograd.grad(outputs, leaves, upstreams, **options) if given else ()
        gradients = iter(found or [None] * len(leaves))
        return [
            _or_zeros(next(gradients), tensor) if is_wanted and tensor is not None else None
            for tensor, is_wanted in zip(inputs, wanted)
        ]


def _or_zeros(gradient: Tensor | None, tensor: Tensor) -> Tensor:
    """Return the gradient, or differentiable zeros where no row sees a key."""
    if gradient is not None:
        return gradient
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)
