"""Puts our implementations in front of PyTorch's, and takes them away again: while anybody holds the switch.

PyTorch's dispatcher belongs to the whole process, so what one holder switches on holds for every thread.
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
from flash_attn_compat.torch_sdpa.policy import Front, Wish

_KEYS = {"cuda": ("CUDA", "AutogradCUDA"), "cpu": ("CPU", "AutogradCPU")}
HOOK = "flash_attn_compat"

_lock = threading.RLock()
_holders: list[Wish] = []
_in_front: tuple[Front, Library] | None = None


def sdpa(always: bool = False) -> AbstractContextManager[None]:
    """PyTorch's attention operators run on our kernels during a block, in all threads; blocks may nest and overlap.

    always: on GPUs of compute capability 8.0 and newer too
    """
    return switched(Wish(always=always))


@contextlib.contextmanager
def switched(wish: Wish) -> Iterator[None]:
    """A wish is in force during a block."""
    hold(wish)
    try:
        yield
    finally:
        let_go(wish)


def hold(wish: Wish) -> None:
    """Serve the operators from now on; where several hold the switch, the one who wishes for the most decides.

    Before PyTorch 2.5, whose operators know no grouped heads yet, this warns and nothing changes.
    """
    if "enable_gqa" not in str(torch.ops.aten.scaled_dot_product_attention.default._schema):
        message = f"sdpa needs PyTorch 2.5, and this is {torch.__version__}: its own attention stays"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return
    with _lock:
        _holders.append(wish)
        try:
            _renew()
        except BaseException:  # nobody would ever let go
            _holders.remove(wish)
            raise


def let_go(wish: Wish) -> None:
    """The end of one ``hold``; that of the last one leaves everything as it was before the first."""
    with _lock:
        if wish in _holders:
            _holders.remove(wish)
        _renew()


def wished() -> Wish | None:
    """What is in force."""
    return _in_front[0].wish if _in_front else None


def _renew() -> None:
    try:
        _place()
    finally:
        graphs.turn(wished())


def _place() -> None:
    global _in_front
    wanted = max(_holders, key=lambda wish: (wish.always, -wish.least_products), default=None)
    if _in_front is not None:
        front, library = _in_front
        if wanted is not None and wanted.device == front.device:
            front.wish = wanted
            return
        front.wish = None
        if wanted is None and _others_may_call():
            return
        library._destroy()
        _in_front = None
    if wanted is not None:
        front = Front(wanted)
        _in_front = front, _register(front)
    for name in (attention.NAME, efficient.FORWARD, efficient.BACKWARD):
        # What tracing found to be behind a key before; only registrations from C++ would make it look again.
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()


def _others_may_call() -> bool:
    """Whether a thread may be about to run an implementation: one that waits for the GIL would run what is no more.

    Ours then stays, lets everything pass, and goes with the next that is switched off by a single thread.
    """
    return threading.active_count() > 1


def _register(front: Front) -> Library:
    library = Library("aten", "IMPL")
    for key in _KEYS[front.device]:
        library.impl(attention.NAME, attention.implementation(front), key)
    for name in (efficient.FORWARD, efficient.BACKWARD):
        library.impl(name, efficient.implementation(front, name), efficient.KEY, with_keyset=True)
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
