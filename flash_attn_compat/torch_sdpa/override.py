"""Overrides PyTorch's attention operators while sdpa is switched on: while at least one policy is acquired.

PyTorch's dispatcher belongs to the process, so a policy applies to every thread.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.library import Library

from flash_attn_compat.held import HeldPolicies
from flash_attn_compat.torch_sdpa import attention, efficient, graphs
from flash_attn_compat.torch_sdpa.policy import Override, Policy

_KEYS = {"cuda": ("CUDA", "AutogradCUDA"), "cpu": ("CPU", "AutogradCPU")}
HOOK = "flash_attn_compat"

_active: tuple[Override, Library] | None = None


def sdpa(always: bool = False) -> AbstractContextManager[None]:
    """Run PyTorch's attention operators on our kernels during a block, in all threads; blocks may nest and overlap.

    always: also on GPUs of compute capability 8.0 and newer
    """
    return applied(Policy(always=always))


@contextlib.contextmanager
def applied(policy: Policy) -> Iterator[None]:
    """Override PyTorch's operators during a block, for the calls that ``policy`` serves."""
    acquire(policy)
    try:
        yield
    finally:
        release(policy)


def acquire(policy: Policy) -> None:
    """Override PyTorch's operators from now on. If several policies are acquired, the widest is active.

    Before PyTorch 2.5, which has no enable_gqa, this warns and changes nothing.
    """
    if "enable_gqa" not in str(torch.ops.aten.scaled_dot_product_attention.default._schema):
        message = f"sdpa needs PyTorch 2.5, and this is {torch.__version__}: its own attention stays"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return
    _held.acquire(policy)


def release(policy: Policy) -> None:
    """Undo one ``acquire``; once all are undone, PyTorch's operators are as before."""
    _held.release(policy)


def active_policy() -> Policy | None:
    """Return the policy that says which calls our kernels take, or None while PyTorch computes all of them."""
    return _active[0].policy if _active else None


def _activate(policy: Policy | None) -> None:
    try:
        _register_or_remove(policy)
    finally:
        graphs.follow(active_policy())


_held = HeldPolicies[Policy](lambda policy: (policy.always, -policy.least_products), _activate)


def _register_or_remove(policy: Policy | None) -> None:
    global _active
    if _active is not None:
        override, library = _active
        if policy is not None and policy.device == override.device:
            override.policy = policy
            return
        override.policy = None
        if policy is None and _other_threads_run():
            return
        library._destroy()
        _active = None
    if policy is not None:
        override = Override(policy)
        _active = override, _register(override)
    for name in (attention.NAME, efficient.FORWARD, efficient.BACKWARD):
        # Traces cache each operator's kernels, and a registration from Python does not clear that cache.
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()


def _other_threads_run() -> bool:
    """Whether there are other threads: one may wait for the GIL to run our kernel, and would crash without it.

    The kernel then stays registered and passes every call on to PyTorch.
    """
    return threading.active_count() > 1


def _register(override: Override) -> Library:
    library = Library("aten", "IMPL")
    for key in _KEYS[override.device]:
        library.impl(attention.NAME, attention.make_operator(override), key)
    for name in (efficient.FORWARD, efficient.BACKWARD):
        library.impl(name, efficient.make_operator(override, name), efficient.KEY, with_keyset=True)
    return library


class Activated:
    """The handle that torch.nn.attention keeps while our implementation is activated; ``remove`` ends that."""

    def __init__(self) -> None:
        self._policy = Policy(always=True)
        acquire(self._policy)

    def remove(self) -> None:
        release(self._policy)


def register_with_torch() -> None:
    """Make ``torch.nn.attention.activate_flash_attention_impl("flash_attn_compat")`` override the operators.

    It does the same as ``flash_attn_compat.sdpa(always=True)``; restore_flash_attention_impl() ends it. Raises
    RuntimeError before PyTorch 2.11, which has no such hook.
    """
    import torch.nn.attention

    register: Any = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no register_flash_attention_impl, which 2.11 brought: use "
            "flash_attn_compat.patch(sdpa=True) or flash_attn_compat.sdpa()"
        )
    register(HOOK, register_fn=Activated)
