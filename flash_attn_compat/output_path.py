"""Files that a command will write at its end, tried before its work: minutes of it are not lost to a mistyped path."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path


def output_path(text: str) -> Path:
    """The path of an option such as --json, for argparse's ``type``. Whatever is there stays as it is.

    Raises ArgumentTypeError where no file can be written there.
    """
    path = Path(text)
    try:
        reason = _folder_error(path)
        if reason is None:
            _try(path)
    except OSError as error:
        reason = error.strerror
    except ValueError as error:  # of a null byte
        reason = str(error)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {reason}")
    return path


def _folder_error(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder"
    parent = path.absolute().parent
    return None if parent.is_dir() else f"there is no folder {parent}"


def _try(path: Path) -> None:
    """Open the file as writing will, without changing it; raises OSError."""
    is_new = not path.exists()
    if is_new or stat.S_ISREG(path.stat().st_mode):
        with open(path, "ab"):
            pass
        if is_new:
            os.unlink(os.path.realpath(path))  # of a link to a file that is not there: the file
    elif not os.access(path, os.W_OK):  # opening a pipe or a device would already be heard on its other side
        raise PermissionError(13, "Permission denied")
