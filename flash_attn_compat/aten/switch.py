"""Puts our implementations in front of PyTorch's, and takes them away again: while anybody holds the switch.

PyTorch's dispatcher belongs to the whole process, so what one holder switches on serves every thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.library import Library

from flash_attn_compat.aten import attention, efficient
from flash_attn_compat.aten.wish import Wish

_KEYS = {"cuda": ("CUDA", "AutogradCUDA"), "cpu": ("CPU", "AutogradCPU")}
HOOK = "flash_attn_compat"

_lock = threading.RLock()
_holders: list[Wish] = []
_registered: tuple[Wish, Library] | None = None


@contextlib.contextmanager
def sdpa(always: bool = False) -> Iterator[None]:
    """PyTorch's attention operators are served for the length of a block, in all threads; blocks may nest and overlap.

    always: on GPUs of compute capability 8.0 and newer too
    """
    wish = Wish(always=always)
    hold(wish)
    try:
        yield
    finally:
        let_go(wish)


def hold(wish: Wish) -> None:
    """Serve the operators from now on; where several hold the switch, the one who wishes for the most decides."""
    with _lock:
        _holders.append(wish)
        _renew()


def let_go(wish: Wish) -> None:
    """The end of one ``hold``; that of the last one leaves everything as it was before the first."""
    with _lock:
        if wish in _holders:
            _holders.remove(wish)
        _renew()


def wished() -> Wish | None:
    """What is in force."""
    return _registered[0] if _registered else None


def _renew() -> None:
    global _registered
    wanted = max(_holders, key=lambda wish: (wish.always, -wish.least_products), default=None)
    if wanted == wished():
        return
    if _registered is not None:
        _registered[1]._destroy()
        _registered = None
    if wanted is not None:
        _registered = wanted, _register(wanted)
    for name in (attention.NAME, efficient.FORWARD, efficient.BACKWARD):
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()  # by which compilers know what a key leads to


def _register(wish: Wish) -> Library:
    library = Library("aten", "IMPL")
    for key in _KEYS[wish.device]:
        library.impl(attention.NAME, attention.serving(wish), key)
    library.impl(efficient.FORWARD, efficient.serving_forward(wish), efficient.KEY, with_keyset=True)
    library.impl(efficient.BACKWARD, efficient.serving_backward(wish), efficient.KEY, with_keyset=True)
    return library


class Activated:
    """What torch.nn.attention keeps of an implementation that it activated."""

    def __init__(self) -> None:
        self._wish = Wish(always=True)
        hold(self._wish)

    def remove(self) -> None:
        let_go(self._wish)


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
