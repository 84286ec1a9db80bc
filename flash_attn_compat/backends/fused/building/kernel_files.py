"""Files that outlive the process: compiled kernels, and results of self-tests, tuning and measurements.

``read`` trusts a file only if it is a regular file, if only this user and root could have written it, and if it begins
with the digest of its name and payload. Otherwise ``read`` returns None, and the caller computes the payload again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import stat
import sys
import tempfile
import warnings
from pathlib import Path

from flash_attn_compat import settings

_DIGEST = hashlib.sha256().digest_size
_MAX_BYTES = 2**28  # far more than a compiled kernel, which has some 2**17
_NO_HOME = f"there is no home directory: set {settings.CACHE} to a folder"


def folder() -> Path:
    """Return FLASH_ATTN_COMPAT_CACHE, or the user's cache directory of this platform.

    Raises RuntimeError where the path starts at a home directory and there is none.
    """
    chosen = settings.value_of(settings.CACHE)
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flash_attn_compat"


def describe_folder() -> str:
    """Return the folder's path, or the reason why there is no folder."""
    try:
        return str(folder())
    except RuntimeError:
        return f"no folder: {_NO_HOME}"


def write_error() -> str | None:
    """Return the reason why no file can be written, or None. Creates the folder, as the first write does."""
    try:
        with tempfile.TemporaryFile(dir=create_folder()):
            return None
    except RuntimeError:
        return f"kernels cannot be kept: {_NO_HOME}"
    except OSError as error:
        return f"{describe_folder()} cannot be written: {error.strerror}"


def make_name(prefix: str, *parts: str) -> str:
    """Return a file name that is unique to ``prefix`` and ``parts``."""
    return f"{prefix}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}"


def read(name: str) -> bytes | None:
    """Return the payload written under ``name``; None where there is no file that can be trusted."""
    try:
        place = folder()
        with open(place / name, "rb", opener=open_nonblocking) as file:
            status = os.fstat(file.fileno())  # of the open file, since its name may belong to another file by now
            reason = _distrust_reason(status)
            content = b"" if reason or status.st_size > _MAX_BYTES else file.read(_MAX_BYTES)
    except PermissionError:
        reason, content = "you may not read them", b""
    except (OSError, RuntimeError, MemoryError):  # RuntimeError: there is no home directory
        return None
    if reason:
        _warn(place, reason)
        return None
    digest, payload = content[:_DIGEST], content[_DIGEST:]
    return payload if digest == _digest(name, payload) else None


def write_if_absent(name: str, payload: bytes) -> bytes:
    """Write ``payload`` unless the file exists. Return the file's payload, so all processes get the first writer's."""
    stored = read(name)
    if stored is None:
        write(name, payload, only_first=True)
        stored = read(name)
    return payload if stored is None else stored


def write(name: str, payload: bytes, only_first: bool = False) -> bool:
    """Write ``payload`` to the file ``name`` atomically; return False if the folder cannot be written.

    only_first: leave an existing file alone
    """
    try:
        place = create_folder()
    except (OSError, RuntimeError):
        return False
    temporary = place / f".{name}.{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb", opener=open_readable_by_all) as file:
            file.write(seal(name, payload))
        (os.link if only_first else os.replace)(temporary, place / name)  # readers see the old file or the new one
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def create_folder(name: str = "") -> Path:
    """Create the cache folder, or the folder ``name`` in it, with its parents, all with the same mode; return its path.

    Raises OSError, and RuntimeError if there is no home directory.
    """
    mode = 0o755 if settings.value_of(settings.CACHE) else 0o700  # a folder set by the user may be shared
    place = folder() / name
    for path in (*reversed(place.parents), place):
        if not path.is_dir():
            with contextlib.suppress(FileExistsError):  # another process was first
                path.mkdir(mode)  # not mkdir(parents=True), which ignores ``mode`` for the parents
                path.chmod(path.stat().st_mode & 0o777 | 0o700)  # even if the umask takes this user's own rights
    return place


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file, as open()'s ``opener``: never wait for a named pipe's writer, nor take a controlling terminal."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def open_readable_by_all(path: str, flags: int) -> int:
    """Open a file, as open()'s ``opener``: a new file can be read by all users, and written only by this user."""
    return os.open(path, flags, 0o644)


def seal(name: str, payload: bytes) -> bytes:
    """Return the content of the file ``name``: the digest of name and payload, then ``payload``."""
    return _digest(name, payload) + payload


def _digest(name: str, payload: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + payload).digest()


def _distrust_reason(file: os.stat_result) -> str | None:
    """Return the reason not to load the file, or None: it is not regular, or another user may have written its code."""
    if not stat.S_ISREG(file.st_mode):
        return "they are no regular files"
    if not hasattr(os, "getuid") or settings.is_on(settings.TRUST_CACHE):
        return None
    if file.st_uid not in (0, os.getuid()):
        return f"they belong to another user (uid {file.st_uid})"
    return "others may write them" if file.st_mode & 0o022 else None


@functools.cache
def _warn(place: Path, reason: str) -> None:
    """Warn that a file in ``place`` is not used, once in a process."""
    warnings.warn(
        f"kernels kept in {place} are not used but compiled anew: {reason}. Set {settings.CACHE} to a folder of your "
        f"own, or {settings.TRUST_CACHE}=1 if you trust whoever can write there",
        RuntimeWarning,
        stacklevel=2,
    )
