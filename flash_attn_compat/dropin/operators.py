"""torch.ops.flash_attn.*: the operators that flash-attn 2.8 registers, computed by our private functions.

Checkpointing policies and graph tools look them up by name. Importing flash_attn, if it is our stand-in, registers
them. While it is imported, dispatch modes see them in eager calls of the public functions too. Needs torch, unlike most
of dropin.
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
from flash_attn_compat.dispatch import ops
from flash_attn_compat.dispatch.autograd import is_wrapped
from flash_attn_compat.dispatch.ops import SPELLINGS
from flash_attn_compat.dispatch.pytorch import observers
from flash_attn_compat.dropin import installed_package
from flash_attn_compat.private_interface import round_multiple

_WRITTEN = ("dq", "dk", "dv")
# With this tag, compiled checkpoints recompute a forward with its own dropout mask. PyTorch 2.4 takes no tags.
TAKES_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters
_DRAWS: dict[str, Any] = {"tags": (torch.Tag.nondeterministic_seeded,)} if TAKES_TAGS else {}
_ours: dict[str, object] = {}  # by qualified name: the operator as PyTorch holds it


def register() -> None:
    """Define the operators that torch.ops.flash_attn lacks; existing ones of other packages stay.

    Ours stay for the life of the process, since code may hold them. A real flash-attn imported later replaces them by
    `torch.library.custom_op`.
    """
    for name in installed_package.OPERATORS:
        if hasattr(torch.ops.flash_attn, name):
            continue
        function = getattr(private_interface, name)
        operator = torch.library.custom_op(
            f"flash_attn::{name}",
            _with_contiguous_results(function),
            mutates_args=_WRITTEN if name.endswith("backward") else (),
            schema=_schema(function),
            **_DRAWS if name.endswith("forward") else {},
        )
        operator.register_fake(_make_fake(function))
        observers.refuse_transforms(operator, observers.refuse_private)
        _ours[f"flash_attn::{name}"] = operator
    ops.under_flash_attns_name = _call_operators


def _call_operators(arguments: tuple[Any, ...], return_dmask: bool) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Call torch.ops.flash_attn's forward operator, so that a dispatch mode sees it, and return its results.

    Returns None if the operator is not ours or cannot take an argument of the call. arguments: in the order of
    ops.NAMES
    """
    values = dict(zip(ops.NAMES, arguments))
    name = "_flash_attn_forward" if values["cu_seqlens_q"] is None else "_flash_attn_varlen_forward"
    is_named = hasattr(sys.modules.get("flash_attn"), "_flash_attn_compat_api")
    if not is_named or not _is_ours(name) or any(values[field] is not None for field in _UNSUPPORTED):
        return None
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _OperatorCall.apply(name, return_dmask, *arguments)
    return results


# Arguments that flash-attn's backward does not take, and lengths that it takes as int only.
_UNSUPPORTED = (
    "block_table", "seqused_k", "leftpad_k", "max_seqlen_q_tensor", "max_seqlen_k_tensor", "k_descale", "v_descale"
)  # fmt: skip


def _is_ours(name: str) -> bool:
    """Whether the registered operator is ours: another package may have registered it before or afterwards."""
    qualified = f"flash_attn::{name}"
    return qualified in _ours and torch._library.custom_ops._maybe_get_opdef(qualified) is _ours[qualified]


class _OperatorCall(torch.autograd.Function):
    """Calls one operator of torch.ops.flash_attn forward and one backward, as flash-attn's own Functions do."""

    @staticmethod
    def forward(ctx: Any, name: str, return_dmask: bool, *arguments: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = getattr(torch.ops.flash_attn, name)(
            *arguments[:3], *_operator_options(arguments), return_dmask
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
        no_gradients = (None,) * (len(ctx.scalars) - 3)
        if dout is None and dlse is None:
            return (None,) * (2 + len(ctx.scalars))
        out, lse, rng_state, *tensors = ctx.saved_tensors
        arguments = [scalar if tensor is None else tensor for scalar, tensor in zip(ctx.scalars, tensors)]
        dout = torch.zeros_like(out) if dout is None else dout
        with settings.using_backend(ctx.used):
            # flash-attn's operators take no gradient of the LSE, and are not differentiable themselves.
            if torch.is_grad_enabled() or is_wrapped(dout) or is_wrapped(dlse):
                needs_grad = False, *ctx.needs_input_grad[2:5]  # slopes with gradients are never passed here
                derived = ops.differentiable(dout, dlse, rng_state, arguments, needs_grad)
                return None, None, *derived[1:], *no_gradients
            if dlse is not None:
                return None, None, *ops.backward_op(dout, out, lse, rng_state, dlse, *arguments), *no_gradients
            q, k, v = arguments[:3]
            gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            deterministic = arguments[ops.NAMES.index("deterministic")]
            operator = getattr(torch.ops.flash_attn, ctx.name)
            operator(dout, q, k, v, out, lse, *gradients, *_operator_options(arguments), deterministic, rng_state)
        return None, None, *gradients, *no_gradients


def _operator_options(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments that flash-attn's operator takes after q, k, v and out, in its order.

    arguments: those of our operator, in the order of ops.NAMES. The result is the cu_seqlens and max_seqlens of a
    packed call, then dropout_p and the others up to alibi_slopes.
    """
    x = dict(zip(ops.NAMES, arguments))
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k") if x["cu_seqlens_q"] is not None else ()
    x["softmax_scale"] = x["q"].shape[-1] ** -0.5 if x["softmax_scale"] is None else x["softmax_scale"]
    names = "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes"
    return tuple([x[name] for name in (*lengths, *names)])


def _schema(function: Callable[..., object]) -> str:
    """Return the schema that torch.library infers for flash-attn's function of this name."""
    hints = typing.get_type_hints(function)
    arguments = []
    for index, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:  # flash-attn's function lacks it
            continue
        # Our functions accept None for numbers that flash-attn's require.
        kind = f"Tensor(a{index}!)?" if name in _WRITTEN else SPELLINGS[hints[name]].replace("float?", "float")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        arguments.append(f"{kind} {name}{default}")
    results = "Tensor" if hints["return"] is Tensor else "(Tensor, Tensor, Tensor, Tensor)"
    return f"({', '.join(arguments)}) -> {results}"


def _with_contiguous_results(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with contiguous results, which the fake functions promise to compilers."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        results = function(*arguments, **named)
        return tuple(result.contiguous() for result in results) if isinstance(results, tuple) else results

    return call


def _make_fake(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the fake function, which gives compilers the results' shapes and dtypes."""
    signature = inspect.signature(function)

    def fake(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        values = bound.arguments
        q, starts = values["q"], values.get("cu_seqlens_q")
        if "dout" in values and starts is not None:
            return q.new_empty((q.shape[1], q.shape[0] + 128 * (starts.shape[0] - 1)), dtype=torch.float32)
        rows = round_multiple(q.shape[1] if starts is None else values["max_seqlen_q"], 128)
        if "dout" in values:
            return q.new_empty((q.shape[0], q.shape[2], rows), dtype=torch.float32)
        keys = round_multiple(values["k"].shape[1] if starts is None else values["max_seqlen_k"], 128)
        return ops.unwritten(q, values["v"], starts, True, (rows, keys) if values["return_softmax"] else None)

    return fake
