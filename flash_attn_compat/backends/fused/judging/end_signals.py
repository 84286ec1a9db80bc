"""If a signal asks this process to end, write that to an open file, before the signal acts.

A Python handler could not: only the main thread may set one, it runs late or never while C code blocks, and a process
with one no longer ends by the signal's default action. The handlers of faulthandler are C code. They run at once, in
the thread that gets the signal, write this thread's traceback to a file, and pass the signal on to the default action,
or to the handler that the caller has set. ``signal.getsignal`` returns what it returned before.
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
_MAX_ACTION_BYTES = 512  # no platform's struct sigaction is larger
# A text that every traceback of faulthandler contains.
NOTE = b"(most recent call first)"
_IS_AVAILABLE = hasattr(faulthandler, "register") and sys.platform != "win32"

# The handlers write to this descriptor: to the file while signals are noted, to /dev/null before and after. It is never
# closed, because a handler may still be writing when another file gets its number.
_sink: int | None = None
# The actions that this module has set, by signal.
_installed: dict[int, bytes] = {}


def note_in(descriptor: int) -> None:
    """From now on, write to the file ``descriptor``, and no longer to an earlier one, if a signal asks us to end."""
    global _sink  # noqa: PLW0603
    if not _IS_AVAILABLE:
        return
    with contextlib.suppress(OSError):
        if _sink is None:
            _sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, _sink, inheritable=False)
        # Signals with the default action come first, because they show which handler is faulthandler's own. With that,
        # a signal for which the caller has called faulthandler.register is recognised, and left to the caller's file.
        for number in sorted(_SIGNALS, key=lambda number: not _is_default(_get_action(number))):
            if number not in _installed and _may_install(number):
                faulthandler.register(number, _sink, all_threads=False, chain=True)
                _installed[number] = _get_action(number)


def stop() -> None:
    """Stop noting signals, and restore the actions that the signals had before ``note_in``."""
    for number in list(_installed):
        with contextlib.suppress(OSError):
            current = _get_action(number)
            faulthandler.unregister(number)
            if _handler(current) != _handler(_installed.pop(number)):  # the caller has set one since: keep it
                _set_action(number, current)
    if _sink is not None:
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, _sink, inheritable=False)
            os.close(nowhere)


def _may_install(number: int) -> bool:
    """Whether the signal has its default action or a Python handler, so that faulthandler's may be put before it."""
    action = _get_action(number)
    if _is_default(action):
        return True
    known = {_handler(one) for one in _installed.values()}
    return callable(signal.getsignal(number)) and bool(known) and _handler(action) not in known


def _is_default(action: bytes) -> bool:
    return _handler(action) == signal.SIG_DFL


def _handler(action: bytes) -> int:
    """Return the first field of a struct sigaction: the handler's address, SIG_DFL or SIG_IGN."""
    return ctypes.c_void_p.from_buffer_copy(action).value or 0


def _get_action(number: int) -> bytes:
    action = ctypes.create_string_buffer(_MAX_ACTION_BYTES)
    if ctypes.CDLL(None).sigaction(number, None, action):
        raise OSError(f"sigaction failed for signal {number}")
    return action.raw


def _set_action(number: int, action: bytes) -> None:
    ctypes.CDLL(None).sigaction(number, ctypes.create_string_buffer(action, len(action)), None)
