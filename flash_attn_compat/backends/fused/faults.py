"""Kernels that ended a process when they were tried: later processes on the same machine refuse them.

A trial leaves a file, the mark, beside the kernels and removes it when its launches are done. The process holds a lock
on the mark while it lives. So a mark without a lock was left by a process that ended during the trial, while the mark
of a trial that goes on in another process, container or node says nothing. A file system without locks gets no marks.
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
# What a mark begins with: the trial goes on, or is known to have broken the GPU's context, whoever still holds a lock.
_TRYING, _BROKEN = b"trying ", b"broken "
RETRY_COMMAND = "flash-attn-compat doctor --again"


def marks_folder() -> Path:
    """The folder of the marks; raises RuntimeError where there is no home directory."""
    return cache.folder() / _FOLDER


def decline_reason(trial: str) -> str | None:
    """Why the kernels of ``trial``, a name without dots, are refused; None where no process is known to have ended."""
    return next((reason for _, reason in _find_fault_marks(trial)), None)


def list_reasons() -> list[str]:
    """What earlier processes left behind, a sentence for each trial."""
    return list(dict.fromkeys(reason for _, reason in _find_fault_marks()))


def remove_marks() -> int:
    """Remove what earlier processes left, so that these kernels are tried again; how many files that were."""
    removed = 0
    for path, _ in list(_find_fault_marks()):
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    return removed


@contextlib.contextmanager
def watch_trial(trial: str, kernels: str, broken: Callable[[], str | None]) -> Iterator[None]:
    """Around the launches of a trial: raises ContextLost, noted for later processes, if they break the GPU's context.

    kernels: their names, for people
    broken: waits for the GPU; returns what has broken its context for good, if anything has
    """
    earlier = broken()
    if earlier is not None:
        raise ContextLost(f"this process's use of the GPU was broken before {kernels} could be tried: {earlier}")
    mark, raised = _Mark(trial, f"{kernels} ended a process when tried on this GPU"), None
    try:
        yield
    except BaseException as error:  # noqa: BLE001  raised again
        raised = error
    lost = broken()
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
    """The mark of this process's trial. ``is_kept``: whether it was left for later processes."""

    def __init__(self, trial: str, reason: str) -> None:
        self._name = f"{trial}.{secrets.token_hex(8)}"
        self.is_kept = False
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
            marks_folder().mkdir(parents=True, exist_ok=True, mode=0o755)
            self._file = open(marks_folder() / self._name, "xb", buffering=0, opener=_open_readable_by_all)  # noqa: SIM115
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
                self._file.truncate(0)  # without the lock it says nothing from now on
                if sys.platform == "win32":  # where an open file cannot be removed
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
    """Marks that no living process holds, or that say that a context broke; and what they say."""
    try:
        names = sorted(entry.name for entry in os.scandir(marks_folder()))
    except (OSError, RuntimeError):
        return
    for name in names:
        if trial and name.partition(".")[0] != trial:
            continue
        said = cache.read(f"{_FOLDER}/{name}")
        if said is None:
            continue
        path = marks_folder() / name
        if said.startswith(_BROKEN) or (said.startswith(_TRYING) and _is_abandoned(path)):
            reason = said.partition(b" ")[2].decode(errors="replace")
            yield path, f"{reason} ({path}; `{RETRY_COMMAND}` lets it be tried again)"


def _is_abandoned(path: Path) -> bool:
    try:
        with open(path, "rb", buffering=0) as file:
            # A trial that ends now empties the file before it gives the lock away.
            return _acquire_lock(file, wait=False) and bool(file.read(1))
    except OSError:
        return False


def _acquire_lock(file: io.FileIO, wait: bool) -> bool:
    """Whether the lock on ``file`` is had, until it is closed. wait: to write under it, else it may be shared."""
    try:
        if sys.platform == "win32":
            import msvcrt

            position = file.tell()
            file.seek(2**30)  # what is locked there can still be read
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            file.seek(position)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held by another process, or a file system without locks
        return False
    return True


def _open_readable_by_all(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)
