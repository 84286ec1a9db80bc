"""Find out which flash_attn this environment has, a real one or our stand-in for the name, without importing it."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

EXTENSION = "flash_attn_2_cuda"
# The directory on sys.path from which `import flash_attn` gets our stand-in: a package and its metadata.
SITE = str(Path(__file__).resolve().parent / "dropin" / "site")
# The directory of a sitecustomize.py, which Python runs at the start of a patched process's children.
SITE_START = str(Path(__file__).resolve().parent / "dropin" / "site_start")
# The directory of flash-attn 2.6.3's metadata. With api="2.6" it precedes SITE on sys.path.
SITE_2_6 = str(Path(__file__).resolve().parent / "dropin" / "site_2_6")
# The directory of our module under FlashAttention-3's name, flash_attn_interface.
SITE_FA3 = str(Path(__file__).resolve().parent / "dropin" / "site_fa3")
# The directory of our package under FlashAttention-4's name: flash_attn/cute and no other part of flash_attn.
SITE_FA4 = str(Path(__file__).resolve().parent / "dropin" / "site_fa4")
# A word in the __init__ of every stand-in, and of no real flash_attn.
_MARK = "flash_attn_compat"


@dataclass(frozen=True)
class RealFlashAttn:
    """A real flash-attn: its directory, its version, and why it cannot serve here (None if it can)."""

    location: str
    version: str | None
    unusable_because: str | None

    @property
    def usable(self) -> bool:
        return self.unusable_because is None


_swapped: RealFlashAttn | None = None


def swapped_package() -> RealFlashAttn | None:
    """Return the real flash-attn that patch() made call our functions, or None. Our backends must not call it back."""
    return _swapped


def set_swapped(real: RealFlashAttn | None) -> None:
    global _swapped  # noqa: PLW0603  a fact of the process
    _swapped = real


def is_stand_in_spec(spec: ModuleSpec | None) -> bool:
    """Whether this spec of flash_attn leads to our stand-in (in site/ or installed), not to the real package."""
    if spec is None or not spec.origin or not spec.origin.endswith("__init__.py"):
        return False
    try:
        return _MARK in Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def find_first_spec(path: list[str] | None = None) -> ModuleSpec | None:
    """Return the spec that the import system finds for flash_attn, or None, whether or not it is imported already.

    path: used instead of sys.path
    """
    for finder in sys.meta_path:
        leads_to_stand_in = path is not None and hasattr(finder, "stand_in")
        if hasattr(finder, "find_spec") and not leads_to_stand_in:
            spec = finder.find_spec("flash_attn", path if finder is PathFinder else None)
            # A directory without __init__ (a stray folder, or FlashAttention 4 alone) is no flash-attn 2.
            if spec is not None and spec.origin is not None:
                return spec
    return None


def find_real_spec() -> ModuleSpec | None:
    """Return the spec of a real flash_attn, even if our stand-in comes before it; None if there is none."""
    spec = find_first_spec([entry for entry in sys.path if not _holds_stand_in(entry)])
    return None if is_stand_in_spec(spec) else spec


def _holds_stand_in(entry: str) -> bool:
    return entry in (SITE, SITE_2_6) or is_stand_in_spec(PathFinder.find_spec("flash_attn", [entry]))


def find_location() -> str | None:
    """Return the directory of the real flash_attn, or None."""
    return _find_location(tuple(sys.path))


def format_error(error: BaseException) -> str:
    """Return an error of another package in one line: its type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@functools.lru_cache(maxsize=8)
def _find_location(path: tuple[str, ...]) -> str | None:
    spec = find_real_spec()
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def read_version(location: str) -> tuple[int, ...] | None:
    """Return (major, minor) from the package's __init__ file, without importing it; None if it states none."""
    try:
        text = (Path(location) / "__init__.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    version = re.search(r"^__version__\s*=\s*[\"'](\d+)\.(\d+)", text, re.MULTILINE)
    return None if version is None else (int(version[1]), int(version[2]))
