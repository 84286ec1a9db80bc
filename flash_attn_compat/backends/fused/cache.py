"""Files that outlive the process: compiled kernels, and what was found out about them.

A file is trusted only as far as it can be checked: it is a regular file, nobody but this user and root could write it,
and it begins with a digest of its name and of what was written. Whatever goes wrong on the way, the caller makes its
content anew.
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
_NO_HOME = f"there is no home directory: set {settings.CACHE} to a folder"


def folder() -> Path:
    """FLASH_ATTN_COMPAT_CACHE, or the user's cache directory of this platform.

    Raises RuntimeError where that is in a home directory, and there is none.
    """
    chosen = settings.cache_folder()
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
    """The folder's path, or why there is no folder."""
    try:
        return str(folder())
    except RuntimeError:
        return f"no folder: {_NO_HOME}"


def write_error() -> str | None:
    """Why no file can be kept; None if one can. Creates the folder, as the first file that is kept does."""
    try:
        with tempfile.TemporaryFile(dir=_create_folder()):
            return None
    except RuntimeError:
        return f"kernels cannot be kept: {_NO_HOME}"
    except OSError as error:
        return f"{describe_folder()} cannot be written: {error.strerror}"


def make_name(prefix: str, *parts: str) -> str:
    """The name of a file for what follows from ``parts``: another one if any of them differs."""
    return f"{prefix}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}"


def read(name: str) -> bytes | None:
    """What was written under ``name``; None where there is nothing that can be trusted."""
    try:
        place = folder()
        with open(place / name, "rb", opener=_open_nonblocking) as file:
            against = _distrust_reason(os.fstat(file.fileno()))  # of what was opened, whatever has the name by now
            content = b"" if against else file.read()
    except PermissionError:
        against, content = "you may not read them", b""
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    if against:
        _warn(place, against)
        return None
    digest, payload = content[:_DIGEST], content[_DIGEST:]
    return payload if digest == _digest(name, payload) else None


def write_if_absent(name: str, payload: bytes) -> bytes:
    """What is kept under ``name``: ``payload``, unless another process has written there first. Then all have that."""
    found = read(name)
    if found is None:
        write(name, payload, only_first=True)
        found = read(name)
    return payload if found is None else found


def write(name: str, payload: bytes, only_first: bool = False) -> bool:
    """Keep ``payload`` under ``name``, whole or not at all; False where the folder cannot be written.

    only_first: what is there already stays
    """
    try:
        place = _create_folder()
    except (OSError, RuntimeError):
        return False
    temporary = place / f".{name}.{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb", opener=_open_readable_by_all) as file:
            file.write(seal(name, payload))
        (os.link if only_first else os.replace)(temporary, place / name)  # readers see the old file or the new one
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _create_folder() -> Path:
    place = folder()
    # A folder that somebody chose may be one to share.
    place.mkdir(parents=True, exist_ok=True, mode=0o755 if settings.cache_folder() else 0o700)
    return place


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file at once: a named pipe would wait for somebody to write, and a terminal become this process's own."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _open_readable_by_all(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def seal(name: str, payload: bytes) -> bytes:
    """The bytes of the file ``name``, from which ``read`` takes ``payload``."""
    return _digest(name, payload) + payload


def _digest(name: str, payload: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + payload).digest()


def _distrust_reason(file: os.stat_result) -> str | None:
    """Why it is no file, or somebody else may have written it: others' code is not run unasked."""
    if not stat.S_ISREG(file.st_mode):
        return "they are no regular files"
    if not hasattr(os, "getuid") or settings.trusts_cache():
        return None
    if file.st_uid not in (0, os.getuid()):
        return f"they belong to another user (uid {file.st_uid})"
    return "others may write them" if file.st_mode & 0o022 else None


@functools.cache
def _warn(place: Path, against: str) -> None:
    """Once in a process."""
    warnings.warn(
        f"kernels kept in {place} are not used but compiled anew: {against}. Set {settings.CACHE} to a folder of your "
        f"own, or {settings.TRUST_CACHE}=1 if you trust whoever can write there",
        RuntimeWarning,
        stacklevel=2,
    )
