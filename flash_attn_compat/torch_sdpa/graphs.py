"""Recompiles graphs with grouped heads when sdpa is switched on or off, since they then hold another operator.

Each trace of such a call adds a guard to the graph, so that graphs with and without our override coexist. It also
changes the key of PyTorch's caches on disk, so that processes with and without our override do not share graphs.
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

# Calls PyTorch's composition: with no dispatch key, PyTorch runs that kernel. A redispatch is faster than a call.
compose = functools.partial(_OPERATOR._handle.redispatch_boxed, _NOWHERE)


class _State:
    """switch: the device type that sdpa serves, None while it is off; is_watching: whether _watch_traces has run"""

    switch: str | None = None
    is_watching = False


def trace(query: Any, *others: Any, **named: Any) -> Any:
    """Run PyTorch's composition of a call. If a compiler traces grouped heads, add the guard to its graph."""
    if named.get("enable_gqa") and type(query) not in PLAIN:
        _add_guard()
    return compose(query, *others, **named)


def follow(policy: Policy | None) -> None:
    """Let graphs that torch.compile traces from now on hold only for this policy's device type. None: sdpa is off"""
    _State.switch = None if policy is None else policy.device
    if policy is not None:
        _watch_traces()


def _watch_traces() -> None:
    """Let every trace of PyTorch's composition from now on add the guard, whether or not sdpa is on at that time.

    It enters ``trace`` into the operator's Python table, which PyTorch reads only in traces. Graphs traced before have
    no guard, so they are compiled again.
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
    """Return the guard for a state of sdpa, one object for each state, since Dynamo compares guards."""
    return functools.partial(SDPA_SWITCH, then=then)


def SDPA_SWITCH(builder: Any, guard: Any, then: str | None) -> None:
    """Add a guard to Dynamo: the state of sdpa is ``then``. Named in capitals, as Dynamo names its guards."""
    words = [f"flash_attn_compat.sdpa is {then or 'off'}"]
    add, is_unchanged = builder.guard_manager.root.add_lambda_guard, lambda _: _State.switch == then
    try:
        add(is_unchanged, words, guard.user_stack)
    except TypeError:  # older versions of PyTorch take no stack
        add(is_unchanged, words)
