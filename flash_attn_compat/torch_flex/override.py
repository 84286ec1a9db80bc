"""Puts our kernels under flex_attention while flex is switched on, for every thread of the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C import DispatchKey

from flash_attn_compat.held import HeldPolicies
from flash_attn_compat.torch_flex import graphs, operator
from flash_attn_compat.torch_flex.operator import Switch
from flash_attn_compat.torch_flex.policy import Policy

LEAST_VERSION = (2, 6)
# By the type of the device: its own dispatch key, and autograd's for it.
_KEYS = {
    "cuda": (DispatchKey.CUDA, DispatchKey.AutogradCUDA),
    "cpu": (DispatchKey.CPU, DispatchKey.AutogradCPU),
}

_active: Switch | None = None


def flex(always: bool = False) -> AbstractContextManager[None]:
    """Run PyTorch's flex_attention on our kernels during a block, in all threads; blocks may nest and overlap.

    always: also on GPUs of compute capability 8.0 and newer
    """
    return applied(Policy(always=always))


@contextlib.contextmanager
def applied(policy: Policy) -> Iterator[None]:
    """Switch flex on during a block, for the calls that ``policy`` serves."""
    acquire(policy)
    try:
        yield
    finally:
        release(policy)


def acquire(policy: Policy) -> None:
    """Put our kernels under PyTorch's operators. If several policies are acquired, the widest is active.

    Raises RuntimeError before PyTorch 2.6.
    """
    old = find_old_version()
    if old is not None:
        raise RuntimeError(f"flex needs PyTorch 2.6 or newer, and this is {old}: leave flex off, or upgrade")
    _held.acquire(policy)


def find_old_version() -> str | None:
    """Return PyTorch's version if it is too old, or None."""
    version = str(torch.__version__)
    return version if tuple(map(int, version.split("+")[0].split(".")[:2])) < LEAST_VERSION else None


def release(policy: Policy) -> None:
    """Undo one ``acquire``; once all are undone, PyTorch's operators are as before."""
    _held.release(policy)


def active_policy() -> Policy | None:
    """Return the policy that says which calls our kernels take, or None while PyTorch computes all of them."""
    return _active.policy if _active else None


def _activate(policy: Policy | None) -> None:
    global _active  # noqa: PLW0603
    if (
        _active is not None
        and _active.policy is not None
        and (policy is None or policy.device != _active.policy.device)
    ):
        _remove(_active.policy)
        _active.policy = None  # a call that is in our kernel already reads None and calls PyTorch's
        _active = None
    if policy is not None:
        if _active is None:
            _active = Switch(policy)
            _register(_active, policy)
        _active.policy = policy
    graphs.follow(policy)


_held = HeldPolicies[Policy](lambda policy: policy.always, _activate)


def _operators() -> tuple[Any, Any]:
    import torch._higher_order_ops.flex_attention

    return torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward


def _register(switch: Switch, policy: Policy) -> None:
    own, autograd = _KEYS[policy.device]
    makers = operator.make_forward, operator.make_backward
    for found, make in zip(_operators(), makers):
        original = found.py_kernels[DispatchKey.CompositeExplicitAutograd]
        found.py_impl(own)(make(switch, original))
    forward = _operators()[0]
    original = forward.py_kernels[DispatchKey.Autograd]
    forward.py_impl(autograd)(operator.make_autograd_forward(switch, original))


def _remove(policy: Policy) -> None:
    for found in _operators():
        for key in _KEYS[policy.device]:
            found.py_kernels.pop(key, None)
        found._dispatch_cache.clear()
