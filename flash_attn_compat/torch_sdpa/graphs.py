"""Makes compiled graphs depend on the override, which changes the operator of calls with grouped heads.

A trace of such a call adds a guard to Dynamo, so that graphs with and without the override coexist, and a mark to the
key of PyTorch's caches on disk, so that processes with and without it do not share graphs.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from flash_attn_compat import settings
from flash_attn_compat.core.entry import PLAIN
from flash_attn_compat.core.torch_state import mark_caches
from flash_attn_compat.torch_sdpa.policy import Policy

_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd
_NOWHERE = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)

# Call PyTorch's composition, the operator's kernel for no device; redispatch_boxed parses fewer arguments than a call.
compose = functools.partial(_OPERATOR._handle.redispatch_boxed, _NOWHERE)


class _State:
    """switch: the device type of the active override, or None; is_watching: whether _watch_traces has run"""

    switch: str | None = None
    is_watching = False


def trace(query: Any, *others: Any, **named: Any) -> Any:
    """Run PyTorch's composition of a call that may be traced."""
    if named.get("enable_gqa") and type(query) not in PLAIN:
        _add_guard()
    return compose(query, *others, **named)


def follow(policy: Policy | None) -> None:
    """Make later traces depend on this active policy; None for no override."""
    _State.switch = None if policy is None else policy.device
    if policy is not None:
        _watch_traces()


def _watch_traces() -> None:
    """From the first override on, let traces of PyTorch's composition add the guard, with the override active or not.

    Only tracing reads the operator's table in Python. Older graphs have no guard and are compiled again.
    """
    if _State.is_watching:
        return
    _State.is_watching = True
    if _COMPOSED not in _OPERATOR.py_kernels:
        _OPERATOR.py_impl(_COMPOSED)(trace)
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is not None and convert_frame.input_codes.seen:
        torch._dynamo.reset_code_caches()


def _add_guard() -> None:
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.source import GlobalStateSource

    context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(_guard_of(_State.switch)))
    mark_caches("sdpa", _State.switch and f"{_State.switch}{settings.forced_capability() or ''}")


@functools.cache
def _guard_of(then: str | None) -> functools.partial[None]:
    """Return the same guard for the same state of the switch, since Dynamo compares guards."""
    return functools.partial(SDPA_SWITCH, then=then)


def SDPA_SWITCH(builder: Any, guard: Any, then: str | None) -> None:
    """A guard, named as Dynamo names guards: the switch is unchanged."""
    words = [f"flash_attn_compat.sdpa is {then or 'off'}"]
    add, is_unchanged = builder.guard_manager.root.add_lambda_guard, lambda _: _State.switch == then
    try:
        add(is_unchanged, words, guard.user_stack)
    except TypeError:  # older versions of PyTorch take no stack
        add(is_unchanged, words)
