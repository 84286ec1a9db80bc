"""Overrides PyTorch's attention operators by ours, as long as a policy is acquired.

PyTorch's dispatcher belongs to the whole process, so a policy holds for every thread.
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

from flash_attn_compat.torch_sdpa import attention, efficient, graphs
from flash_attn_compat.torch_sdpa.policy import Override, Policy

_KEYS = {"cuda": ("CUDA", "AutogradCUDA"), "cpu": ("CPU", "AutogradCPU")}
HOOK = "flash_attn_compat"

_lock = threading.RLock()
_holders: list[Policy] = []
_in_front: tuple[Override, Library] | None = None


def sdpa(always: bool = False) -> AbstractContextManager[None]:
    """PyTorch's attention operators run on our kernels during a block, in all threads; blocks may nest and overlap.

    always: on GPUs of compute capability 8.0 and newer too
    """
    return applied(Policy(always=always))


@contextlib.contextmanager
def applied(policy: Policy) -> Iterator[None]:
    """Acquire a policy for a block."""
    acquire(policy)
    try:
        yield
    finally:
        release(policy)


def acquire(policy: Policy) -> None:
    """Serve PyTorch's operators from now on. Of several policies, the one that serves most calls decides.

    Before PyTorch 2.5, whose operators know no grouped heads yet, this warns and nothing changes.
    """
    if "enable_gqa" not in str(torch.ops.aten.scaled_dot_product_attention.default._schema):
        message = f"sdpa needs PyTorch 2.5, and this is {torch.__version__}: its own attention stays"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return
    with _lock:
        _holders.append(policy)
        try:
            _renew()
        except BaseException:  # nobody would ever release it
            _holders.remove(policy)
            raise


def release(policy: Policy) -> None:
    """Undo one ``acquire``; after the last one, PyTorch's operators are as before the first."""
    with _lock:
        if policy in _holders:
            _holders.remove(policy)
        _renew()


def active_policy() -> Policy | None:
    """Return the policy in force, or None where PyTorch's operators are not overridden."""
    return _in_front[0].policy if _in_front else None


def _renew() -> None:
    try:
        _place()
    finally:
        graphs.turn(active_policy())


def _place() -> None:
    global _in_front
    wanted = max(_holders, key=lambda policy: (policy.always, -policy.least_products), default=None)
    if _in_front is not None:
        override, library = _in_front
        if wanted is not None and wanted.device == override.device:
            override.policy = wanted
            return
        override.policy = None
        if wanted is None and _others_may_call():
            return
        library._destroy()
        _in_front = None
    if wanted is not None:
        override = Override(wanted)
        _in_front = override, _register(override)
    for name in (attention.NAME, efficient.FORWARD, efficient.BACKWARD):
        # Tracing caches the kernel behind each key; only registrations from C++ would clear that cache.
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()


def _others_may_call() -> bool:
    """Whether a thread may be about to run an implementation: if it waits for the GIL, it would run a destroyed one.

    The override then stays and passes every call on to PyTorch, until a single thread releases a later policy.
    """
    return threading.active_count() > 1


def _register(override: Override) -> Library:
    library = Library("aten", "IMPL")
    for key in _KEYS[override.device]:
        library.impl(attention.NAME, attention.implementation(override), key)
    for name in (efficient.FORWARD, efficient.BACKWARD):
        library.impl(name, efficient.implementation(override, name), efficient.KEY, with_keyset=True)
    return library


class Activated:
    """The handle that torch.nn.attention keeps of an activated implementation."""

    def __init__(self) -> None:
        self._policy = Policy(always=True)
        acquire(self._policy)

    def remove(self) -> None:
        release(self._policy)


def register_with_torch() -> None:
    """Make ``torch.nn.attention.activate_flash_attention_impl("flash_attn_compat")`` switch the operators on.

    As ``flash_attn_compat.sdpa(always=True)`` does; restore_flash_attention_impl() switches them off. Raises
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
