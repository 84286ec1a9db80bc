"""Kernels that ended a process in their self-test: later processes on the same machine decline them.

A self-test writes a file, the mark, beside the kernels and removes it after its launches. The process holds a lock on
the mark while it lives. A mark without a lock therefore belongs to a process that ended during the self-test. A locked
mark belongs to a running self-test, in any process, container or node. File systems without locks get no marks.

A crash (SIGSEGV, SIGABRT, os._exit) and a broken CUDA context count as faults of the kernel. A process that was told to
end does not: it was interrupted (KeyboardInterrupt), exited in order, or got a signal that asks it to end
(end_signals.py). SIGKILL leaves no trace and counts as a fault, because a kernel that hangs may be ended only by it.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flash_attn_compat import settings
from flash_attn_compat.backends.fused.building import kernel_files
from flash_attn_compat.backends.fused.building.nvrtc import ContextLost
from flash_attn_compat.backends.fused.judging import end_signals

_FOLDER = "trials"
# The first bytes of a mark: _TRYING while the self-test runs, _BROKEN if it broke the GPU's context. A mark that begins
# with _BROKEN counts even while a process locks it.
_TRYING, _BROKEN = b"trying ", b"broken "
_MAX_MARK_BYTES = 2**20
_DAY = 24 * 3600.0
RETRY_COMMAND = "flash-attn-compat doctor --again"


def marks_folder() -> Path:
    """Return the folder of the marks, the files of self-tests. Raises RuntimeError if there is no home directory."""
    return kernel_files.folder() / _FOLDER


def decline_reason(trial: str) -> str | None:
    """Return the reason to decline the kernels of a self-test; None if no mark says that it failed.

    trial: the name of the self-test, without dots
    """
    return next((reason for _, reason in _find_fault_marks(trial)), None)


def list_reasons() -> list[str]:
    """Return one sentence for each self-test that ended a process or broke its context."""
    return list(dict.fromkeys(reason for _, reason in _find_fault_marks()))


def remove_marks() -> int:
    """Remove all marks of faults, so that their kernels are tested again; return the number of removed files."""
    removed = 0
    for path, _ in list(_find_fault_marks()):
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    return removed


@contextlib.contextmanager
def watch_trial(trial: str, kernels: str, sticky_error: Callable[[], str | None]) -> Iterator[None]:
    """Guard the launches of a self-test: hold a mark meanwhile. If they break the GPU's context, keep it and raise.

    trial: the name of the self-test, without dots; kernels: the names of its kernels, for messages
    sticky_error: waits for the GPU; returns the error that broke its context for good, or None
    Raises ContextLost if the context broke.
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
    finally:  # also after an interrupt in any line above
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
    """The mark of a running self-test of this process. ``is_kept``: whether the file stays when the self-test ends."""

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
        """End the self-test: remove its mark unless the mark is to be kept."""
        with contextlib.suppress(OSError):
            if self._file is not None and not self.is_kept:
                self._file.truncate(0)  # other processes ignore an empty mark, even once it is unlocked
        with _changing:
            if self in _running:
                _running.remove(self)
            if _running and _running[-1]._file is not None:
                end_signals.note_in(_running[-1]._file.fileno())
            else:
                end_signals.stop()
        if self._file is not None:
            self._file.close()  # Windows cannot remove an open file
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
        """Close the file in a forked child, because the self-test and the lock belong to the parent."""
        if self._file is not None:
            self._file.close()
            self._file = None


# The marks of this process; the token in their file names; the lock for changes of these two and of end_signals.
_running: list[_Mark] = []
_process = secrets.token_hex(8)
_changing = threading.RLock()


@atexit.register
def _end_all() -> None:
    """At exit, remove the marks of self-tests in daemon threads: an interpreter that exits in order did not crash."""
    while _running:
        _running[-1].end()


def _leave_all_to_parent() -> None:
    global _process, _changing
    _process, _changing = secrets.token_hex(8), threading.RLock()  # another thread may hold the parent's lock
    if _running:
        end_signals.stop()
    while _running:
        _running.pop().leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def _find_fault_marks(trial: str = "") -> Iterator[tuple[Path, str]]:
    """Yield path and reason of each mark of a fault: one that no living process locks, or with a broken context.

    trial: the name of a self-test; "" for all of them
    """
    try:
        names = sorted(entry.name for entry in os.scandir(marks_folder()))
    except (OSError, RuntimeError):
        return
    for name in names:
        path = marks_folder() / name
        if _remove_if_left_empty(path) or (trial and name.partition(".")[0] != trial):
            continue
        content = kernel_files.read(f"{_FOLDER}/{name}") or b""
        if not content.startswith(_BROKEN):
            is_whole = content.startswith(_TRYING)
            if not (is_whole or _notes_a_signal(name)) or not _is_abandoned(path):
                continue
            if _remove_if_told_to_end(name, names) or not is_whole:
                continue
        reason = content.partition(b" ")[2].decode(errors="replace")
        yield path, f"{reason} ({path}; `{RETRY_COMMAND}` lets it be tried again)"


def _remove_if_left_empty(path: Path) -> bool:
    """Remove an empty mark that no process locks, and return whether it was one.

    Its process ended before it wrote to the mark, or after it emptied it. A younger mark than a day may belong to a
    process that is about to lock or to remove it.
    """
    with contextlib.suppress(OSError):
        with open(path, "rb", buffering=0, opener=kernel_files.open_nonblocking) as file:
            status = os.fstat(file.fileno())
            is_old = stat.S_ISREG(status.st_mode) and not status.st_size and status.st_mtime < time.time() - _DAY
            is_left = is_old and _acquire_lock(file, wait=False)
        if is_left:
            os.unlink(path)  # after the closing: Windows removes no open file
            return True
    return False


def _remove_if_told_to_end(name: str, names: list[str]) -> bool:
    """If a signal had asked a process to end, remove the marks that it left; return whether a signal had.

    name: the file name of one of its marks; names: all files of the folder
    """
    siblings = [other for other in names if other.split(".")[1:2] == name.split(".")[1:2]]
    noted = {other for other in siblings if _notes_a_signal(other)}
    if not noted:
        return False
    for other in sorted(siblings, key=noted.__contains__):  # other processes may look: remove the note last
        with contextlib.suppress(OSError):
            if not (kernel_files.read(f"{_FOLDER}/{other}") or b"").startswith(_BROKEN):
                os.unlink(marks_folder() / other)
    return True


def _notes_a_signal(name: str) -> bool:
    """Whether end_signals wrote into the mark (so that its digest no longer fits)."""
    with contextlib.suppress(OSError), open(marks_folder() / name, "rb", opener=kernel_files.open_nonblocking) as file:
        return end_signals.NOTE in file.read(_MAX_MARK_BYTES)
    return False


def _is_abandoned(path: Path) -> bool:
    try:
        with open(path, "rb", buffering=0, opener=kernel_files.open_nonblocking) as file:
            # An unlocked mark is abandoned unless it is empty: a self-test empties its mark before it unlocks it.
            return _acquire_lock(file, wait=False) and bool(file.read(1))
    except OSError:
        return False


def _acquire_lock(file: io.FileIO, wait: bool) -> bool:
    """Lock ``file`` until it is closed; return whether that worked.

    wait: whether to wait for an exclusive lock; else try a shared lock once
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            position = file.tell()
            file.seek(2**30)  # lock a byte beyond the content, because others must be able to read the content
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            file.seek(position)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # another process holds the lock, or the file system has no locks
        return False
    return True
