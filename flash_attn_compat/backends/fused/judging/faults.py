"""Kernels that ended a process in their self-test: later processes on the same machine decline them.

A self-test writes a file, the mark, beside the kernels and removes it after its launches. The process holds a lock on
the mark while it lives. A mark without a lock therefore belongs to a process that ended during the self-test. A locked
mark belongs to a running self-test, in any process, container or node. File systems without locks get no marks.

Which ends are a fault of the kernel? A crash (SIGSEGV, SIGABRT, os._exit) and a broken context. A process that was told
to end is none: it was interrupted (KeyboardInterrupt), exits in order, or got a signal that asks it to end
(end_signals.py). SIGKILL leaves no trace: it counts, as it may be the only end of a kernel that hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flash_attn_compat import settings
from flash_attn_compat.backends.fused.building import kernel_files
from flash_attn_compat.backends.fused.building.nvrtc import ContextLost
from flash_attn_compat.backends.fused.judging import end_signals

_FOLDER = "trials"
# The first bytes of a mark: the self-test runs, or it broke the GPU's context. A broken mark counts even while locked.
_TRYING, _BROKEN = b"trying ", b"broken "
_MAX_MARK_BYTES = 2**20
RETRY_COMMAND = "flash-attn-compat doctor --again"


def marks_folder() -> Path:
    """Return the folder of the marks. Raises RuntimeError where there is no home directory."""
    return kernel_files.folder() / _FOLDER


def decline_reason(trial: str) -> str | None:
    """Return the reason to decline the kernels of ``trial``, a name without dots; None without a mark of a fault."""
    return next((reason for _, reason in _find_fault_marks(trial)), None)


def list_reasons() -> list[str]:
    """Return one sentence for each self-test that ended a process or broke its context."""
    return list(dict.fromkeys(reason for _, reason in _find_fault_marks()))


def remove_marks() -> int:
    """Remove the marks of faults, so that these kernels are tested again; returns the number of files."""
    removed = 0
    for path, _ in list(_find_fault_marks()):
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    return removed


@contextlib.contextmanager
def watch_trial(trial: str, kernels: str, sticky_error: Callable[[], str | None]) -> Iterator[None]:
    """Guard the launches of a self-test. If they break the GPU's context, keeps a mark and raises ContextLost.

    trial: name of the mark, without dots; kernels: their names, for messages
    sticky_error: waits for the GPU; returns the error that broke its context for good, or None
    """
    earlier = sticky_error()
    if earlier is not None:
        raise ContextLost(f"this process's use of the GPU was broken before {kernels} could be tried: {earlier}")
    mark, lost, raised = _Mark(trial), None, None
    try:
        mark.begin(f"{kernels} ended a process when tried on this GPU")
        try:
            yield
        except BaseException as error:  # noqa: BLE001  raised again
            raised = error
        lost = sticky_error()
        if lost is not None:
            mark.keep(f"{kernels} broke a process's use of this GPU when tried: {lost}")
    finally:  # an interrupt may come in every line above
        mark.end()
    if lost is None:
        if raised is not None:
            raise raised
        return
    next_time = "it is noted, and other kernels will serve" if mark.is_kept else f"with {settings.FUSED}=0"
    raise ContextLost(
        f"{kernels} broke this process's use of the GPU when tried for the first time: {lost}. Start the program "
        f"again: {next_time}"
    ) from raised


class _Mark:
    """The mark of a running self-test of this process. ``is_kept``: whether later processes find it."""

    def __init__(self, trial: str) -> None:
        self._process = _process
        self._name = f"{trial}.{_process}.{secrets.token_hex(8)}"
        self.is_kept = False
        self._file: io.FileIO | None = None

    def begin(self, reason: str) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
            path = kernel_files.create_folder(_FOLDER) / self._name
            self._file = open(path, "xb", buffering=0, opener=kernel_files.open_readable_by_all)  # noqa: SIM115
            with _changing:
                _running.append(self)
                end_signals.note_in(self._file.fileno())
            if _acquire_lock(self._file, wait=True):
                self._write(_TRYING + reason.encode())

    def keep(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._write(_BROKEN + reason.encode())
            self.is_kept = self._file is not None

    def end(self) -> None:
        """Remove the mark unless it is kept."""
        with contextlib.suppress(OSError):
            if self._file is not None and not self.is_kept:
                self._file.truncate(0)  # an empty mark counts as none, even without its lock
        with _changing:
            if self in _running:
                _running.remove(self)
            if _running and _running[-1]._file is not None:
                end_signals.note_in(_running[-1]._file.fileno())
            else:
                end_signals.stop()
        if self._file is not None:
            self._file.close()  # before the removal, which Windows refuses for an open file
            self._file = None
        if not self.is_kept and self._process == _process:
            with contextlib.suppress(OSError):
                os.unlink(marks_folder() / self._name)

    def _write(self, payload: bytes) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate(0)
            self._file.write(kernel_files.seal(f"{_FOLDER}/{self._name}", payload))

    def leave_to_parent(self) -> None:
        """Let go of the file in a forked child: the trial is the parent's, and so is the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


# Marks of this process, the token in their names, and the lock of both and of end_signals.
_running: list[_Mark] = []
_process = secrets.token_hex(8)
_changing = threading.RLock()


@atexit.register
def _end_all() -> None:
    """End the trials of daemon threads: an interpreter that exits in order was not ended by a kernel."""
    while _running:
        _running[-1].end()


def _leave_all_to_parent() -> None:
    global _process, _changing
    _process, _changing = secrets.token_hex(8), threading.RLock()  # another thread may have held the parent's
    if _running:
        end_signals.stop()
    while _running:
        _running.pop().leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def _find_fault_marks(trial: str = "") -> Iterator[tuple[Path, str]]:
    """Yield path and reason of each mark of a fault: no living process locks it, or it says that a context broke.

    trial: whose marks; "" for those of all trials
    """
    try:
        names = sorted(entry.name for entry in os.scandir(marks_folder()))
    except (OSError, RuntimeError):
        return
    for name in names:
        if trial and name.partition(".")[0] != trial:
            continue
        path = marks_folder() / name
        content = kernel_files.read(f"{_FOLDER}/{name}") or b""
        if not content.startswith(_BROKEN):
            is_whole = content.startswith(_TRYING)
            if not (is_whole or _notes_a_signal(name)) or not _is_abandoned(path):
                continue
            if _remove_if_told_to_end(name, names) or not is_whole:
                continue
        reason = content.partition(b" ")[2].decode(errors="replace")
        yield path, f"{reason} ({path}; `{RETRY_COMMAND}` lets it be tried again)"


def _remove_if_told_to_end(name: str, names: list[str]) -> bool:
    """Remove the marks of a process that is gone if a signal had asked it to end; returns whether one had.

    name: of one of its marks; names: all in the folder
    """
    siblings = [other for other in names if other.split(".")[1:2] == name.split(".")[1:2]]
    noted = {other for other in siblings if _notes_a_signal(other)}
    if not noted:
        return False
    for other in sorted(siblings, key=noted.__contains__):  # the note last: another process may look meanwhile
        with contextlib.suppress(OSError):
            if not (kernel_files.read(f"{_FOLDER}/{other}") or b"").startswith(_BROKEN):
                os.unlink(marks_folder() / other)
    return True


def _notes_a_signal(name: str) -> bool:
    """Whether end_signals wrote to the mark, whose seal is broken then."""
    with contextlib.suppress(OSError), open(marks_folder() / name, "rb", opener=kernel_files.open_nonblocking) as file:
        return end_signals.NOTE in file.read(_MAX_MARK_BYTES)
    return False


def _is_abandoned(path: Path) -> bool:
    try:
        with open(path, "rb", buffering=0, opener=kernel_files.open_nonblocking) as file:
            # A self-test that ends now empties its mark before it releases the lock.
            return _acquire_lock(file, wait=False) and bool(file.read(1))
    except OSError:
        return False


def _acquire_lock(file: io.FileIO, wait: bool) -> bool:
    """Lock ``file`` until it is closed; returns whether that worked. wait: for an exclusive lock; else a shared one."""
    try:
        if sys.platform == "win32":
            import msvcrt

            position = file.tell()
            file.seek(2**30)  # beyond the content, which others must be able to read
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            file.seek(position)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # another process holds the lock, or the file system has no locks
        return False
    return True
