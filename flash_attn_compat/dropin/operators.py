"""torch.ops.flash_attn.*: the operators that flash-attn 2.8 registers, computed by our private functions.

Checkpointing policies and graph tools look them up by name. site/flash_attn registers them when it is imported; while
it is, modes see them in eager calls of the public functions too. Needs torch, unlike the rest of dropin.
"""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import private_interface, settings
from flash_attn_compat.dispatch import op_derivatives, ops
from flash_attn_compat.dispatch.autograd import is_wrapped
from flash_attn_compat.dispatch.ops import SPELLINGS
from flash_attn_compat.dropin import installed_package
from flash_attn_compat.private_interface import round_multiple

_WRITTEN = ("dq", "dk", "dv")
# Compiled checkpoints then recompute a forward with its own dropout mask. Early versions of PyTorch take no tags.
TAKES_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters
_DRAWS: dict[str, Any] = {"tags": (torch.Tag.nondeterministic_seeded,)} if TAKES_TAGS else {}
_ours: dict[str, object] = {}  # by name, as PyTorch keeps them


def register() -> None:
    """Define the operators that torch.ops.flash_attn lacks; those of somebody else are left alone.

    They stay for the life of the process, since code may hold them; a flash-attn imported later replaces them,
    as `torch.library.custom_op` lets it.
    """
    for name in installed_package.OPERATORS:
        if hasattr(torch.ops.flash_attn, name):
            continue
        function = getattr(private_interface, name)
        operator = torch.library.custom_op(
            f"flash_attn::{name}",
            _contiguous(function),
            mutates_args=_WRITTEN if name.endswith("backward") else (),
            schema=_schema(function),
            **_DRAWS if name.endswith("forward") else {},
        )
        operator.register_fake(_fake(function))
        op_derivatives.refuse_derivatives(operator, op_derivatives.refuse_private)
        _ours[f"flash_attn::{name}"] = operator
    ops.under_flash_attns_name = _by_name


def _by_name(arguments: tuple[Any, ...], return_dmask: bool) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return the results of flash-attn's operators under a mode; None if they are not ours or lack an argument.

    arguments: as our operators take them
    """
    given = dict(zip(ops.NAMES, arguments))
    name = "_flash_attn_forward" if given["cu_seqlens_q"] is None else "_flash_attn_varlen_forward"
    is_named = hasattr(sys.modules.get("flash_attn"), "_flash_attn_compat_api")
    if not is_named or not _is_ours(name) or any(given[field] is not None for field in _NOT_TAKEN):
        return None
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _Named.apply(name, return_dmask, *arguments)
    return found


# What flash-attn's backward does not take, and lengths that it takes as numbers alone.
_NOT_TAKEN = "block_table", "seqused_k", "leftpad_k", "max_seqlen_q_tensor", "max_seqlen_k_tensor"


def _is_ours(name: str) -> bool:
    """Not somebody else's, who registered it before or afterwards."""
    qualified = f"flash_attn::{name}"
    return qualified in _ours and torch._library.custom_ops._maybe_get_opdef(qualified) is _ours[qualified]


class _Named(torch.autograd.Function):
    """As flash-attn's own Functions: one operator forward, and one backward."""

    @staticmethod
    def forward(ctx: Any, name: str, return_dmask: bool, *arguments: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = getattr(torch.ops.flash_attn, name)(
            *arguments[:3], *_options(arguments), return_dmask
        )
        out, lse, dmask, rng_state = results
        ctx.name, ctx.used = name.replace("forward", "backward"), settings.used_backend()
        tensors = [value if isinstance(value, Tensor) else None for value in arguments]
        ctx.scalars = tuple(value if tensor is None else None for value, tensor in zip(arguments, tensors))
        ctx.save_for_backward(out, lse, rng_state, *tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(dmask, rng_state)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        unwanted = (None,) * (len(ctx.scalars) - 3)
        if dout is None and dlse is None:
            return (None,) * (2 + len(ctx.scalars))
        out, lse, rng_state, *tensors = ctx.saved_tensors
        arguments = [scalar if tensor is None else tensor for scalar, tensor in zip(ctx.scalars, tensors)]
        dout = torch.zeros_like(out) if dout is None else dout
        with settings.using_backend(ctx.used):
            # Flash-attn's operators take no gradient of the LSE, and have none of their own.
            if torch.is_grad_enabled():
                wanted = False, *ctx.needs_input_grad[2:5]  # slopes that are trained go another way
                derived = ops.differentiable(dout, dlse, rng_state, arguments, wanted)
                return None, None, *derived[1:], *unwanted
            if dlse is not None or is_wrapped(dout):
                return None, None, *ops.backward_op(dout, out, lse, rng_state, dlse, *arguments), *unwanted
            q, k, v = arguments[:3]
            gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            deterministic = arguments[ops.NAMES.index("deterministic")]
            operator = getattr(torch.ops.flash_attn, ctx.name)
            operator(dout, q, k, v, out, lse, *gradients, *_options(arguments), deterministic, rng_state)
        return None, None, *gradients, *unwanted


def _options(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return flash-attn's arguments from the lengths to alibi_slopes, in its operators' order."""
    x = dict(zip(ops.NAMES, arguments))
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k") if x["cu_seqlens_q"] is not None else ()
    x["softmax_scale"] = x["q"].shape[-1] ** -0.5 if x["softmax_scale"] is None else x["softmax_scale"]
    names = "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes"
    return tuple([x[name] for name in (*lengths, *names)])


def _schema(function: Callable[..., object]) -> str:
    """As torch.library infers them from flash-attn's functions."""
    hints = typing.get_type_hints(function)
    arguments = []
    for index, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        # Numbers that flash-attn wants may be None for our functions.
        kind = f"Tensor(a{index}!)?" if name in _WRITTEN else SPELLINGS[hints[name]].replace("float?", "float")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        arguments.append(f"{kind} {name}{default}")
    results = "Tensor" if hints["return"] is Tensor else "(Tensor, Tensor, Tensor, Tensor)"
    return f"({', '.join(arguments)}) -> {results}"


def _contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """With results as the fake functions promise them to compilers."""

    @functools.wraps(function)
    def contiguous(*arguments: Any, **named: Any) -> Any:
        found = function(*arguments, **named)
        return tuple(result.contiguous() for result in found) if isinstance(found, tuple) else found

    return contiguous


def _fake(function: Callable[..., Any]) -> Callable[..., Any]:
    """What compilers are told of the results: their shapes and dtypes."""
    signature = inspect.signature(function)

    def fake(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        q, starts = given["q"], given.get("cu_seqlens_q")
        if "dout" in given and starts is not None:
            return q.new_empty((q.shape[1], q.shape[0] + 128 * (starts.shape[0] - 1)), dtype=torch.float32)
        rows = round_multiple(q.shape[1] if starts is None else given["max_seqlen_q"], 128)
        if "dout" in given:
            return q.new_empty((q.shape[0], q.shape[2], rows), dtype=torch.float32)
        keys = round_multiple(given["k"].shape[1] if starts is None else given["max_seqlen_k"], 128)
        return ops.unwritten(q, given["v"], starts, True, (rows, keys) if given["return_softmax"] else None)

    return fake
