"""Check a command's output file before its work, so that a mistyped path does not cost minutes."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path


def output_path(text: str) -> Path:
    """Return the path of an option such as --json, for argparse's ``type``; an existing file is not changed.

    Raises ArgumentTypeError if no file can be written there.
    """
    path = Path(text)
    try:
        reason = _check_folder(path)
        if reason is None:
            _try_to_open(path)
    except OSError as error:
        reason = error.strerror
    except ValueError as error:  # the path has a null byte
        reason = str(error)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {reason}")
    return path


def _check_folder(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    parent = path.absolute().parent
    return None if parent.is_dir() else f"there is no folder {parent}"


def _try_to_open(path: Path) -> None:
    """Open the file for writing without changing it. Raises OSError."""
    is_new = not path.exists()
    if is_new or stat.S_ISREG(path.stat().st_mode):
        with open(path, "ab"):
            pass
        if is_new:
            os.unlink(os.path.realpath(path))  # the target of a dangling link goes, the link stays
    elif not os.access(path, os.W_OK):  # a pipe or a device: opening it would have an effect on its other side
        raise PermissionError(13, "Permission denied")
