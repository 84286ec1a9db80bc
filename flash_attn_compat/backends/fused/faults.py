"""Kernels that ended a process in their self-test: later processes on the same machine decline them.

A self-test writes a file, the mark, beside the kernels and removes it after its launches. The process holds a lock on
the mark while it lives. A mark without a lock therefore belongs to a process that ended during the self-test. A locked
mark belongs to a running self-test, in any process, container or node. File systems without locks get no marks.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from flash_attn_compat import settings
from flash_attn_compat.backends.fused import cache
from flash_attn_compat.backends.fused.nvrtc import ContextLost

_FOLDER = "trials"
# The first bytes of a mark: the self-test runs, or it broke the GPU's context. A broken mark counts even while locked.
_TRYING, _BROKEN = b"trying ", b"broken "
RETRY_COMMAND = "flash-attn-compat doctor --again"


def marks_folder() -> Path:
    """Return the folder of the marks. Raises RuntimeError where there is no home directory."""
    return cache.folder() / _FOLDER


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
    mark, raised = _Mark(trial, f"{kernels} ended a process when tried on this GPU"), None
    try:
        yield
    except BaseException as error:  # noqa: BLE001  raised again
        raised = error
    lost = sticky_error()
    if lost is None:
        mark.remove()
        if raised is not None:
            raise raised
        return
    mark.keep(f"{kernels} broke a process's use of this GPU when tried: {lost}")
    next_time = "it is noted, and other kernels will serve" if mark.is_kept else f"with {settings.FUSED}=0"
    raise ContextLost(
        f"{kernels} broke this process's use of the GPU when tried for the first time: {lost}. Start the program "
        f"again: {next_time}"
    ) from raised


class _Mark:
    """The mark of a running self-test of this process. ``is_kept``: whether later processes find it."""

    def __init__(self, trial: str, reason: str) -> None:
        self._name = f"{trial}.{secrets.token_hex(8)}"
        self.is_kept = False
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
            marks_folder().mkdir(parents=True, exist_ok=True, mode=0o755)
            self._file = open(marks_folder() / self._name, "xb", buffering=0, opener=cache.open_readable_by_all)  # noqa: SIM115
            if _acquire_lock(self._file, wait=True):
                self._write(_TRYING + reason.encode())

    def keep(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._write(_BROKEN + reason.encode())
            self.is_kept = self._file is not None
        self._close()

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.truncate(0)  # an empty mark counts as none, even without its lock
                if sys.platform == "win32":  # Windows cannot remove an open file
                    self._close()
                os.unlink(marks_folder() / self._name)
        self._close()

    def _write(self, payload: bytes) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate(0)
            self._file.write(cache.seal(f"{_FOLDER}/{self._name}", payload))

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


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
        content = cache.read(f"{_FOLDER}/{name}")
        if content is None:
            continue
        path = marks_folder() / name
        if content.startswith(_BROKEN) or (content.startswith(_TRYING) and _is_abandoned(path)):
            reason = content.partition(b" ")[2].decode(errors="replace")
            yield path, f"{reason} ({path}; `{RETRY_COMMAND}` lets it be tried again)"


def _is_abandoned(path: Path) -> bool:
    try:
        with open(path, "rb", buffering=0) as file:
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
