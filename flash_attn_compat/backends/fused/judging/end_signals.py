"""Note in an open file that a signal asked this process to end, before the signal acts.

A Python handler would not do: only the main thread may set one, it runs late or never while C code blocks, and a
process with one no longer ends by the signal's default action. faulthandler's handlers are C code. They run at once, in
whatever thread the signal meets, write the thread's traceback into a file, and pass the signal on: to the default
action, or to the handler that the caller has set. ``signal.getsignal`` returns what it returned before.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys

_NAMES = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_MAX_ACTION_BYTES = 512  # more than a struct sigaction of any platform
# A part of whatever faulthandler writes.
NOTE = b"(most recent call first)"
_IS_AVAILABLE = hasattr(faulthandler, "register") and sys.platform != "win32"

# The handlers write to this descriptor, which stays open: one that a handler still writes to must not become another
# file's. It is a copy of the file's descriptor while signals are noted, and of /dev/null's before and after.
_sink: int | None = None
# The actions that we have set, by signal.
_installed: dict[int, bytes] = {}


def note_in(descriptor: int) -> None:
    """Write to the file ``descriptor`` if a signal asks this process to end; ends what an earlier call began."""
    global _sink  # noqa: PLW0603
    if not _IS_AVAILABLE:
        return
    with contextlib.suppress(OSError):
        if _sink is None:
            _sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, _sink, inheritable=False)
        # Default actions first: only beside one of these it is known which handler is faulthandler's, and a signal for
        # which the caller has called faulthandler.register keeps the caller's file.
        for number in sorted(_SIGNALS, key=lambda number: not _is_default(_get_action(number))):
            if number not in _installed and _may_install(number):
                faulthandler.register(number, _sink, all_threads=False, chain=True)
                _installed[number] = _get_action(number)


def stop() -> None:
    """Note signals no more, and set the actions that were there before ``note_in``."""
    for number in list(_installed):
        with contextlib.suppress(OSError):
            current = _get_action(number)
            faulthandler.unregister(number)
            if _handler(current) != _handler(_installed.pop(number)):  # the caller has set another one meanwhile
                _set_action(number, current)
    if _sink is not None:
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, _sink, inheritable=False)
            os.close(nowhere)


def _may_install(number: int) -> bool:
    """Whether the signal has its default action, or a handler in Python."""
    action = _get_action(number)
    if _is_default(action):
        return True
    known = {_handler(one) for one in _installed.values()}
    return callable(signal.getsignal(number)) and bool(known) and _handler(action) not in known


def _is_default(action: bytes) -> bool:
    return _handler(action) == signal.SIG_DFL


def _handler(action: bytes) -> int:
    """Return the handler's address, which comes first in a struct sigaction, or SIG_DFL or SIG_IGN."""
    return ctypes.c_void_p.from_buffer_copy(action).value or 0


def _get_action(number: int) -> bytes:
    action = ctypes.create_string_buffer(_MAX_ACTION_BYTES)
    if ctypes.CDLL(None).sigaction(number, None, action):
        raise OSError(f"sigaction failed for signal {number}")
    return action.raw


def _set_action(number: int, action: bytes) -> None:
    ctypes.CDLL(None).sigaction(number, ctypes.create_string_buffer(action, len(action)), None)
