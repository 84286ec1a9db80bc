"""Eager calls of torch.ops.higher_order.flex_attention and of its backward.

flex_attention passes graphs of its functions to these operators. We register a kernel under the device's own dispatch
key: PyTorch calls it after autograd, autocast, dispatch modes and transforms, and before its own composition, which
computes the calls that we decline. A second kernel under autograd's key serves calls without gradients sooner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn_compat.backends.fused.flex import (
    BlockLists,
    Blocks,
    FlexBackwardRun,
    FlexInputs,
    FlexRun,
    FlexUpstream,
)
from flash_attn_compat.core.entry import PLAIN
from flash_attn_compat.core.inputs import new_tuple
from flash_attn_compat.core.torch_state import count_modes, transforms_are_on
from flash_attn_compat.dispatch import choice
from flash_attn_compat.settings import is_explaining
from flash_attn_compat.torch_flex import functions, launch, policy, warm
from flash_attn_compat.torch_flex.calls import WHOLE, FlexBackwardCall, FlexCall, lists_of, make_blocks, sizes_of
from flash_attn_compat.torch_flex.functions import Functions
from flash_attn_compat.torch_flex.policy import Policy

Operator = Callable[..., Any]


class Switch:
    """Holds the active policy; while it is None, our kernel passes every call on to PyTorch."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy


def make_forward(switch: Switch, original: Operator) -> Operator:
    """Return our kernel of the forward operator. original: PyTorch's, for the calls that we decline"""

    def forward(*arguments: Any) -> Any:
        active = switch.policy
        if active is None:
            return original(*arguments)
        results = _forward(active, arguments)
        if results is None:
            choice.served[launch.PYTORCH] += 1
            return original(*arguments)
        return _count_and_complete(*results)

    return forward


def make_autograd_forward(switch: Switch, original: Operator) -> Operator:
    """Return our kernel of the forward operator under autograd's key, which computes calls that autograd ignores.

    PyTorch's kernel there wraps each call in an autograd function and dispatches the operator again, which takes about
    a fifth of a warm call. original: PyTorch's kernel, for all other calls
    """

    def forward(*arguments: Any) -> Any:
        active = switch.policy
        results = None if active is None or not _are_ignored_by_autograd(arguments) else _forward(active, arguments)
        return original(*arguments) if results is None else _count_and_complete(*results)

    return forward


def _are_ignored_by_autograd(arguments: tuple[Any, ...]) -> bool:
    """Whether the operator's next kernel is the device's own: no gradient, tangent, mode, transform or subclass."""
    if count_modes() or transforms_are_on() or forward_ad._current_level >= 0:
        return False
    q, k, v, _, mask, _, _, own, others = arguments
    of_mask = [x for x in (*mask, *others) if isinstance(x, Tensor)]  # whose gradients PyTorch refuses, recorded or not
    of_scores = [x for x in (q, k, v, *own) if isinstance(x, Tensor)]
    for x in (*of_scores, *of_mask):
        if type(x) not in PLAIN:
            return False
    wanted = (*of_scores, *of_mask) if torch.is_grad_enabled() else of_mask
    return not any([x.requires_grad for x in wanted])


def _count_and_complete(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Return the operator's results for those of our kernels."""
    choice.served[launch.KERNELS] += 1
    return (out, lse, _no_maxima(lse)) if returns_maxima() else (out, lse)


def make_backward(switch: Switch, original: Operator) -> Operator:
    """Return our kernel of the backward operator, whoever computed the forward. original: PyTorch's kernel"""

    def backward(*arguments: Any) -> Any:
        active = switch.policy
        found = None if active is None else _backward(active, FlexBackwardCall(*arguments))
        return original(*arguments) if found is None else found

    return backward


@functools.cache
def returns_maxima() -> bool:
    """Whether the operator's third result is the rows' largest scores, as from PyTorch 2.9 on."""
    import torch.nn.attention.flex_attention as module

    return hasattr(module, "AuxRequest")


def _no_maxima(lse: Tensor) -> Tensor:
    """Return unset memory in place of max_scores, which no caller asked for, as Triton's kernels do."""
    return torch.empty_like(lse)


def _forward(active: Policy, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """Return out and LSE of a call; None if PyTorch computes it."""
    q, k, v, score_mod, mask, scale, options, own, others = arguments
    rows, keys, mask_mod = mask[-3:]
    name, has_lists, captured = warm.name_of(score_mod, mask_mod), (rows, keys) != (WHOLE, WHOLE), (*own, *others)
    lists = mask[2:6] if has_lists else ()
    fixed = (
        active, name, type(scale), scale, rows, keys, len(own), len(others), options.get("BACKEND"),
        options.get("OUTPUT_MAX"), q.numel(), k.numel(),
    )  # fmt: skip
    tensors = q, k, v, *lists, *captured
    guarded = None if name is None else warm.find_guarded(fixed, tensors)
    if guarded is not None:
        blocks = new_tuple(Blocks, (rows, keys, new_tuple(BlockLists, lists), None)) if has_lists else None
        read = tuple([captured[place] for place in guarded.known]) if guarded.known else ()
        results: tuple[Tensor, Tensor] = guarded.run(new_tuple(FlexInputs, (q, k, v, read, (), blocks)))
        return results
    call = FlexCall(*arguments)
    key = None if name is None else warm.make_key(fixed, (q, k, v), (*mask[2:6], *captured))
    prepared, run = warm.find(key), None
    if prepared is not None:
        inputs = _inputs_of(prepared.functions, call, backward=False)
        run = prepared.runs.get(inputs.numbers)
    if prepared is None or run is None:
        if is_explaining():
            _explain(list(_all_reasons(active, call)))
        found = _prepare_forward(active, call)
        if isinstance(found, str):
            return None
        known, inputs, run = found
        prepared = warm.keep(key, known, inputs.numbers, run)
    if not inputs.numbers:
        warm.guard(fixed, tensors, run, prepared.functions.printed.tensors)
    out, lse = run(inputs)
    return out, lse


def _prepare_forward(active: Policy, call: FlexCall) -> tuple[Functions, FlexInputs, FlexRun] | str:
    """Return a call's functions, its inputs and the function that computes it, or the first reason to decline it."""
    reason = next(policy.eager_reasons(active, call), None)
    if reason is not None:
        return reason
    found = functions.find(call, backward=False)
    if isinstance(found, str):
        return found
    inputs = _make_inputs(found, call, backward=False)
    if isinstance(inputs, str):
        return inputs
    run = launch.find_forward(found, inputs, call.scale)
    return run if isinstance(run, str) else (found, inputs, run)


def _make_inputs(found: Functions, call: FlexCall, backward: bool) -> FlexInputs | str:
    """Return the kernels' inputs, or the reason to decline the call, for which PyTorch may raise its own error."""
    tensors = functions.captured_tensors(found, call.captured)
    return functions.find_short_tensor(found, tensors, call[:2]) or _inputs_of(found, call, backward)


def _inputs_of(found: Functions, call: FlexCall, backward: bool) -> FlexInputs:
    captured, mask = call.captured, call.block_mask
    tensors, numbers = functions.captured_tensors(found, captured), functions.captured_numbers(found, captured)
    inputs: FlexInputs = new_tuple(
        FlexInputs, (*call[:3], tensors, numbers, make_blocks(*sizes_of(mask), lists_of(mask), backward))
    )
    return inputs


def _all_reasons(active: Policy, call: FlexCall) -> Iterator[str]:
    """Yield every reason to decline a call."""
    reasons = list(policy.eager_reasons(active, call))
    yield from reasons
    if not functions.is_graph(call.score_mod) or not functions.is_graph(call.mask_mod):
        return
    found = functions.find(call, backward=False)
    inputs = found if isinstance(found, str) else _make_inputs(found, call, backward=False)
    if isinstance(inputs, str):
        yield inputs
    elif not reasons and not isinstance(found, str):
        run = launch.find_forward(found, inputs, call.scale)
        if isinstance(run, str):
            yield run


def _explain(reasons: list[str]) -> None:
    """Raise Explained, which carries the answer to ``flash_attn_compat.explain``. reasons: to decline the call"""
    computed_by = launch.PYTORCH if reasons else launch.KERNELS
    raise choice.Explained(choice.Explanation(computed_by, {launch.KERNELS: reasons, launch.PYTORCH: []}))


def _require_gradients(call: FlexBackwardCall) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in call.score_mod_other_buffers)


def _backward(active: Policy, call: FlexBackwardCall) -> Any:
    """Return the gradients of a call; None if PyTorch computes them."""
    if call.grad_out is None and call.grad_logsumexp is None:
        return None
    if policy.gradient_reason(_require_gradients(call)):
        return None
    forward = call.forward()
    dout = torch.zeros_like(call.out) if call.grad_out is None else call.grad_out
    upstream = FlexUpstream(call.out, call.logsumexp, dout, call.grad_logsumexp)
    key = _backward_key(active, call, dout)
    prepared, run = warm.find(key), None
    if prepared is not None:
        found, inputs = prepared.functions, _inputs_of(prepared.functions, forward, backward=True)
        run = prepared.runs.get(inputs.numbers)
    if run is None:
        new = _prepare_backward(active, forward, upstream)
        if new is None:
            return None
        found, inputs, run = new
        warm.keep(key, found, inputs.numbers, run)
    dq, dk, dv, *others = run(inputs, upstream)
    return dq, dk, dv, functions.captured_gradients(found, others, len(call.score_mod_other_buffers))


def _backward_key(active: Policy, call: FlexBackwardCall, dout: Tensor) -> Hashable:
    """Return the key of a backward. dout: the gradient of out, zeros if it has none"""
    own, others, mask, options = *call[-2:], call.block_mask, call.kernel_options
    name = warm.name_of(call.fw_graph, mask[-1])
    wanted = tuple([isinstance(x, Tensor) and x.requires_grad for x in own])
    backends = options.get("BACKEND"), options.get("OUTPUT_MAX")
    fixed = name, active, mask[-3], mask[-2], type(call.scale), call.scale, wanted, *backends
    aligned = *call[:5], dout, call.grad_logsumexp
    return None if name is None else warm.make_key(fixed, aligned, (*mask[2:10], *own, *others))


def _prepare_backward(
    active: Policy, call: FlexCall, upstream: FlexUpstream
) -> tuple[Functions, FlexInputs, FlexBackwardRun] | None:
    """Return a call's functions, its inputs and the function that computes its gradients; None to decline it."""
    if next(policy.eager_reasons(active, call), None):
        return None
    found = functions.find(call, backward=True)
    inputs = found if isinstance(found, str) else _make_inputs(found, call, backward=True)
    if isinstance(found, str) or isinstance(inputs, str):
        return None
    run = launch.find_backward(found, inputs, call.scale, upstream)
    return None if isinstance(run, str) else (found, inputs, run)
