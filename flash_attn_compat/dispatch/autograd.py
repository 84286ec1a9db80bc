"""One autograd.Function that runs every backend, and computes gradients if autograd records.

Packed inputs (qkv, or q and kv) enter the autograd graph whole. So their gradient is one packed tensor, written once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import torch_state
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, Gradients, Result
from flash_attn_compat.core.entry import Entry
from flash_attn_compat.core.features import SLOPES_GRADIENT, Feature
from flash_attn_compat.core.inputs import DenseInputs, Inputs, Options, new_tuple
from flash_attn_compat.dispatch import choice
from flash_attn_compat.dispatch.pytorch import at_exit, heads_first
from flash_attn_compat.dispatch.serve import LSE, backward_inputs, compute, compute_by, gradients

_BACKWARD = int(Feature.BACKWARD)


def unpack(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return q, k and v as views of checked inputs (q, k, v), (q, kv) or (qkv,)."""
    return inputs if len(inputs) == 3 else (*inputs[:-1], *inputs[-1].unbind(-3))


# out, softmax_lse, S_dmask. The type is Any, because an output that the call does not ask for may be None.
_Outputs = tuple[Any, Any, Any]


def attend(inputs: tuple[Tensor, ...], x: Inputs, options: Options) -> _Outputs:
    """Return (out, softmax_lse, S_dmask) of a call over views of ``inputs``, recorded if the call needs gradients.

    softmax_lse and S_dmask may be None if the call does not ask for them. x, options: as in ``find`` of serve.py
    """
    if options.use & _BACKWARD:
        slopes = unwrapped(x.alibi_slopes) if options.use & SLOPES_GRADIENT else None
        recorded: Any = _record(x, options, None, slopes, *map(unwrapped, inputs))
        return recorded if type(recorded) is tuple else (recorded, None, None)
    entry, result = compute(x, options)
    return _outputs(result) if entry.call.use & LSE else (result.out, None, None)


def record_heads_first(name: str, x: DenseInputs, options: Options) -> Tensor | None:
    """Return ``out`` as (batch, heads, seqlen, head_dim), recorded by autograd, as a tensor that is no view.

    Returns None if another backend than ``name`` would serve the call.
    """
    out: Tensor | None = _record(x, options, name, None, unwrapped(x.q), unwrapped(x.k), unwrapped(x.v))
    return out


def _outputs(result: Result) -> _Outputs:
    return result.out, result.lse.contiguous(), result.probabilities


def gradient_of_lse(dlse: Tensor | None, lse: Tensor | None) -> Tensor | None:
    """Return dlse as kernels take it: 0 for a row without keys, since its LSE is +inf whatever the inputs are."""
    return None if dlse is None or lse is None else dlse.masked_fill(lse.isinf(), 0.0).resolve_neg()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Inputs, options: Options, heads_first_by: str | None, slopes: Tensor | None, *inputs: Tensor
    ) -> Any:  # fmt: skip
        """Return ``out``, with the options' LSE also softmax_lse and S_dmask: autograd wraps one output in less time.

        heads_first_by: the only backend that may serve, for a call from ``record_heads_first``; None for others
        """
        found = compute(x, options) if heads_first_by is None else compute_by(heads_first_by, x, options)
        if found is None:
            return None
        ctx.entry, result = found
        ctx.used, ctx.inputs, ctx.family, ctx.watch = settings.used_backend(), len(inputs), type(x), None
        ctx.set_materialize_grads(False)
        if heads_first_by is not None:
            out, ctx.watch, x = heads_first.make_own(result.out, x)
        ctx.save_for_backward(*inputs, result.out, result.softmax_lse, result.rng_state, *x[3:], *result.saved)
        if heads_first_by is not None:
            return out
        return _outputs(result) if ctx.entry.call.use & LSE else result.out

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, _: object = None
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if settings.used_backend() != ctx.used:  # on a GPU a backward runs in another thread
            with settings.using_backend(ctx.used):
                found: tuple[Tensor | None, ...] = _Attention.backward(ctx, dout, dlse, _)
                return found
        if dout is None and dlse is None:
            return tuple([None] * (4 + ctx.inputs))
        if dout is not None and type(dout) is not Tensor:
            dout = dout.clone()  # a collective's pending result: clone() waits for it
        inputs, x, result = _restore(ctx)
        is_differentiated = torch.is_grad_enabled() or is_wrapped(dout) or is_wrapped(dlse)
        if ctx.watch is not None and dout is not None:
            dout = dout.transpose(1, 2)
            x = heads_first.with_mask_of_forward(ctx.watch, ctx.entry, x, result.saved)
            if ctx.watch.out._version and not is_differentiated:  # differentiable_gradients computes its own ``out``
                result = result._replace(out=_out_again(ctx.entry, x, result.rng_state))
        x = backward_inputs(x, result.rng_state)
        _, _, _, wants_slopes, *wanted = ctx.needs_input_grad
        if is_differentiated:
            call = ctx.entry.call.over(x)
            leaves = (call.alibi_slopes, *inputs)
            return None, None, None, *differentiable_gradients(leaves, (wants_slopes, *wanted), call, dout, dlse)
        of_slopes = gradient_of_slopes(ctx.entry.call.over(x), dout, dlse) if wants_slopes else None
        out, lse = result.out, result.softmax_lse
        dout = torch.zeros_like(out) if dout is None else dout
        upstream = BackwardInputs(dout, out, lse, result.rng_state, result.saved, gradient_of_lse(dlse, lse))
        if len(inputs) == 3:
            return None, None, None, of_slopes, *gradients(ctx.entry, x, upstream)[1].gradients
        packed = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)
        gradients(ctx.entry, x, upstream, into=Gradients(*unpack(packed)))
        return None, None, None, of_slopes, *packed


def _out_again(entry: Entry, x: Any, rng_state: Tensor | None) -> Tensor:
    """Compute ``out`` a second time, because the caller has overwritten the first one."""
    again = x._replace(rng_state=rng_state)
    return compute(again, entry.options)[1].out  # not by ``entry``'s run: hooks may have moved tensors


def _restore(ctx: Any) -> tuple[tuple[Tensor, ...], Inputs, Result]:
    """Return what ``forward`` saved: the recorded tensors, the call's inputs (views of these), and its result."""
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them at the first access only
    begin, end = ctx.inputs + 3, ctx.inputs + len(ctx.family._fields)
    inputs = saved[: ctx.inputs]
    x = new_tuple(ctx.family, unpack(inputs) + saved[begin:end])
    return inputs, x, new_tuple(Result, (*saved[ctx.inputs : begin], saved[end:], None))


def gradient_of_slopes(call: AttentionCall, dout: Tensor | None, dlse: Tensor | None) -> Tensor:
    """Return the gradient of ``call.alibi_slopes``: compute the forward again by differentiable operators."""
    q, k, v, slopes = call.q.detach(), call.k.detach(), call.v.detach(), call.alibi_slopes
    assert slopes is not None
    leaf = slopes.detach().requires_grad_()
    wanted = True, False, False, False
    call = call._replace(use=call.use & ~Feature.GIVEN_LSE)
    found, *_ = differentiable_gradients((leaf, q, k, v), wanted, call, dout, dlse)
    assert found is not None  # it was wanted
    return found


def is_wrapped(gradient: Tensor | None) -> bool:
    """Whether torch.func or is_grads_batched=True wraps a gradient, which then has no memory for a kernel."""
    return gradient is not None and (_is_transformed(gradient) or _is_batched(gradient))


# Used in place of Function.apply, which spends time in Python on a search for transforms that cannot be here.
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_record, unwrapped = super(torch.autograd.Function, _Attention).apply, torch._C._functorch.unwrap_if_dead


def differentiable_gradients(
    inputs: tuple[Tensor | None, ...], wanted: tuple[bool, ...], call: AttentionCall, dout: Tensor | None,
    dlse: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """Return gradients that autograd can differentiate again: compute the forward again by differentiable operators.

    inputs: the call's slopes, then (q, k, v), (q, kv) or (qkv,)
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
        # Separate views, because flash_attn_func(x, x, x) needs three gradients, one for each use of x.
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
    """Return the gradient; if autograd found none, as when no row sees a key, zeros that can be differentiated."""
    if gradient is not None:
        return gradient
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)
