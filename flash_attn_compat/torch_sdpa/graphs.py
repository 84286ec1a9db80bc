"""Tells compilers of the switch: a graph of grouped heads that is traced under it holds another operator.

A trace of such a call puts the switch into Dynamo's guards, so that a graph with the switch and one without lie side by
side, and into the key of PyTorch's caches on disk, so that no process takes the graph of one that had it otherwise.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from flash_attn_compat import settings
from flash_attn_compat.core.prepared import PLAIN
from flash_attn_compat.torch_sdpa.policy import Policy

_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd
_NOWHERE = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
_MARK = "|flash_attn_compat.sdpa="

# PyTorch's composition is what the operator has where no device is known; this way of calling it parses the least.
compose = functools.partial(_OPERATOR._handle.redispatch_boxed, _NOWHERE)


class _State:
    """switch: the type of device whose calls are ours, None for no switch; is_watched: as _watch has it"""

    switch: str | None = None
    is_watched = False


def trace(*arguments: Any, **named: Any) -> Any:
    """PyTorch's composition, of a call that may be traced."""
    if named.get("enable_gqa") and type(arguments[0]) not in PLAIN:
        _note()
    return compose(*arguments, **named)


def turn(policy: Policy | None) -> None:
    """Graphs that are traced from now on belong to this policy; None for no switch."""
    _State.switch = None if policy is None else policy.device
    if policy is not None:
        _watch()


def _watch() -> None:
    """From the first switch on, PyTorch's composition notes itself where it is traced, with ours in front or not.

    Only tracing asks the operator's table in Python. Graphs that are older have no guard, and are compiled anew.
    """
    if _State.is_watched:
        return
    _State.is_watched = True
    if _COMPOSED not in _OPERATOR.py_kernels:
        _OPERATOR.py_impl(_COMPOSED)(trace)
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is not None and convert_frame.input_codes.seen:
        torch._dynamo.reset_code_caches()


def _note() -> None:
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.source import GlobalStateSource

    context.guards_context.dynamo_guards.add(GlobalStateSource().make_guard(_guard_of(_State.switch)))
    _tag_caches()


@functools.cache
def _guard_of(then: str | None) -> functools.partial[None]:
    """One for each state of the switch: guards are compared by it."""
    return functools.partial(SDPA_SWITCH, then=then)


def SDPA_SWITCH(builder: Any, guard: Any, then: str | None) -> None:
    """A guard for Dynamo, which names guards like this: the switch is as it was."""
    words = [f"flash_attn_compat.sdpa is {then or 'off'}"]
    add, is_as_then = builder.guard_manager.root.add_lambda_guard, lambda _: _State.switch == then
    try:
        add(is_as_then, words, guard.user_stack)
    except TypeError:  # of older PyTorch, which takes no stack
        add(is_as_then, words)


def _tag_caches() -> None:
    """Mark the keys of caches on disk while the switch is on, in this thread, and leave them as they were while not."""
    config: Any = getattr(torch.compiler, "config", None)
    tag = getattr(config, "cache_key_tag", None)
    if not isinstance(tag, str):  # before PyTorch 2.7, which kept no such graphs on disk
        return
    mark = "" if _State.switch is None else f"{_MARK}{_State.switch}{settings.forced_capability() or ''}"
    wanted = tag.partition(_MARK)[0] + mark
    if tag != wanted:
        config.cache_key_tag = wanted
