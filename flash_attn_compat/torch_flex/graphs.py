"""Recompiles graphs of flex_attention when flex is switched on or off, since they then call other kernels.

Each trace of flex_attention adds a guard to the graph, so that graphs with and without our kernels coexist. It also
changes the key of PyTorch's caches on disk, so that processes with and without our kernels do not share graphs. At a
trace, not before, inductor's lowerings are replaced too: replacing them imports inductor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_compat import settings
from flash_attn_compat.core.torch_state import mark_caches
from flash_attn_compat.torch_flex import inductor
from flash_attn_compat.torch_flex.policy import Policy

_MARK = "flex"


class _State:
    """policy: the active policy, None while flex is off; is_watching: whether ``_watch_traces`` has run"""

    policy: Policy | None = None
    is_watching = False


def follow(policy: Policy | None) -> None:
    """Make later traces depend on this active policy; None for PyTorch's own kernels."""
    _State.policy = policy
    if policy is None:
        inductor.restore()
    else:
        _watch_traces()


def _watch_traces() -> None:
    """Let every trace of flex_attention from now on add the guard, whether or not flex is on at that time.

    Graphs traced before have no guard, so they are compiled again.
    """
    if _State.is_watching:
        return
    _State.is_watching = True
    operators = torch.ops.higher_order
    for operator in (operators.flex_attention, operators.flex_attention_backward):
        table = operator.python_key_table
        table[FakeTensorMode] = _tracing(table[FakeTensorMode])
        operator._dispatch_cache.clear()
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is not None and convert_frame.input_codes.seen:
        torch._dynamo.reset_code_caches()


def _tracing(fake: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap PyTorch's implementation for fake tensors, which every trace runs: call ``_note_trace`` first."""

    @functools.wraps(fake)
    def traced(*arguments: Any, **named: Any) -> Any:
        _note_trace()
        return fake(*arguments, **named)

    return traced


def _note_trace() -> None:
    if _State.policy is not None:
        inductor.replace(_State.policy)
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.source import GlobalStateSource

    context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(_guard_of(_state())))
    mark_caches(_MARK, _state())


def _state() -> str | None:
    """Return the state of flex as a word, which a guard compares; None if flex is off."""
    policy = _State.policy
    if policy is None:
        return None
    forced = settings.value_of(settings.CAPABILITY) or ""
    return f"{policy.device}{'-always' * policy.always}-{inductor.VERSION}-{forced}"


@functools.cache
def _guard_of(then: str | None) -> functools.partial[None]:
    """Return the guard for a state of flex, one object for each state, since Dynamo compares guards."""
    return functools.partial(FLEX_SWITCH, then=then)


def FLEX_SWITCH(builder: Any, guard: Any, then: str | None) -> None:
    """Add a guard to Dynamo: the state of flex is ``then``. Named in capitals, as Dynamo names its guards."""
    words = [f"flash_attn_compat's flex is {then or 'off'}"]
    add, is_unchanged = builder.guard_manager.root.add_lambda_guard, lambda _: _state() == then
    try:
        add(is_unchanged, words, guard.user_stack)
    except TypeError:  # older versions of PyTorch take no stack
        add(is_unchanged, words)
