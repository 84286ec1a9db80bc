"""Makes compiled graphs depend on the switch of flex, which changes the kernels that inductor calls.

A trace of flex_attention adds a guard to Dynamo, so that graphs with and without our kernels coexist, and a mark to the
key of PyTorch's caches on disk, so that processes with and without them do not share graphs. A trace is also when
inductor's lowerings are replaced: inductor is not imported before.
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
    """policy: the active one; is_watching: whether ``_watch_traces`` has run"""

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
    """From the first policy on, let traces of the operators add the guard, with a policy active or not.

    Older graphs have no guard and are compiled again.
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
    """Return PyTorch's implementation for fake tensors, which every trace runs, with a note that it ran."""

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
    """Return the state of the switch as a word, None if it is off."""
    policy = _State.policy
    if policy is None:
        return None
    forced = settings.value_of(settings.CAPABILITY) or ""
    return f"{policy.device}{'-always' * policy.always}-{inductor.VERSION}-{forced}"


@functools.cache
def _guard_of(then: str | None) -> functools.partial[None]:
    """Return the same guard for the same state of the switch, since Dynamo compares guards."""
    return functools.partial(FLEX_SWITCH, then=then)


def FLEX_SWITCH(builder: Any, guard: Any, then: str | None) -> None:
    """A guard, named as Dynamo names guards: the switch is unchanged."""
    words = [f"flash_attn_compat's flex is {then or 'off'}"]
    add, is_unchanged = builder.guard_manager.root.add_lambda_guard, lambda _: _state() == then
    try:
        add(is_unchanged, words, guard.user_stack)
    except TypeError:  # older versions of PyTorch take no stack
        add(is_unchanged, words)
