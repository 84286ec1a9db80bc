"""Files that outlive the process: compiled kernels, and what was found out about them.

A file is trusted only as far as it can be checked: it belongs to this user, and begins with a digest of its name and of
what was written. Whatever goes wrong on the way, the caller makes its content anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from pathlib import Path

from flash_attn_compat import settings

_DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """FLASH_ATTN_COMPAT_CACHE, or the user's cache directory of this platform."""
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


def name_of(prefix: str, *parts: str) -> str:
    """The name of a file for what follows from ``parts``: another one if any of them differs."""
    return f"{prefix}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}"


def read(name: str) -> bytes | None:
    """What was written under ``name``; None where there is nothing that can be trusted."""
    try:
        path = folder() / name
        if not _is_ours(path):
            return None
        content = path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    digest, payload = content[:_DIGEST], content[_DIGEST:]
    return payload if digest == _digest(name, payload) else None


def write(name: str, payload: bytes) -> bool:
    """Keep ``payload`` under ``name``, whole or not at all; False where the folder cannot be written."""
    try:
        place = folder()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=place, prefix=f".{name}.")
    except (OSError, RuntimeError):
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(name, payload) + payload)
        os.replace(temporary, place / name)  # readers see the old file or the new one
        return True
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return False


def _digest(name: str, payload: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + payload).digest()


def _is_ours(path: Path) -> bool:
    """Whether this user or root wrote the file: code of anybody else's is not run."""
    return not hasattr(os, "getuid") or path.stat().st_uid in (0, os.getuid())
