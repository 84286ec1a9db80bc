"""Which flash_attn this environment holds: a real one, or this package's stand-in for the name. Nothing is imported."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

EXTENSION = "flash_attn_2_cuda"
# The stand-in: a package and its metadata.
SITE = str(Path(__file__).resolve().parent / "dropin" / "site")
# A sitecustomize, for child processes.
SITE_START = str(Path(__file__).resolve().parent / "dropin" / "site_start")
# Metadata of flash-attn 2.6.3 alone: it precedes SITE where that interface is asked for.
SITE_2_6 = str(Path(__file__).resolve().parent / "dropin" / "site_2_6")
# FlashAttention-3's name.
SITE_FA3 = str(Path(__file__).resolve().parent / "dropin" / "site_fa3")
# What the __init__ of a stand-in, and of no real flash_attn, names.
_MARK = "flash_attn_compat"


@dataclass(frozen=True)
class RealFlashAttn:
    """A flash-attn that is not ours: where it lies, its version, and why it cannot serve here (None: it can)."""

    location: str
    version: str | None
    unusable_because: str | None

    @property
    def usable(self) -> bool:
        return self.unusable_because is None


_swapped: RealFlashAttn | None = None


def swapped() -> RealFlashAttn | None:
    """The real package that runs on our functions at present: to call it would go in circles."""
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


def first_spec(path: list[str] | None = None) -> ModuleSpec | None:
    """What the finders find for flash_attn, whatever sys.modules holds; `path` stands in for sys.path."""
    for finder in sys.meta_path:
        leads_to_stand_in = path is not None and hasattr(finder, "stand_in")
        if hasattr(finder, "find_spec") and not leads_to_stand_in:
            spec = finder.find_spec("flash_attn", path if finder is PathFinder else None)
            # A directory without __init__ (a stray folder, FlashAttention 4 by itself) is no flash-attn 2.
            if spec is not None and spec.origin is not None:
                return spec
    return None


def real_spec() -> ModuleSpec | None:
    """The spec of a flash_attn that is not our stand-in, even where the stand-in comes first."""
    spec = first_spec([entry for entry in sys.path if not _holds_stand_in(entry)])
    return None if is_stand_in_spec(spec) else spec


def _holds_stand_in(entry: str) -> bool:
    return entry in (SITE, SITE_2_6) or is_stand_in_spec(PathFinder.find_spec("flash_attn", [entry]))


def location() -> str | None:
    """The directory of that package, or None."""
    return _location_on(tuple(sys.path))


def error_line(error: BaseException) -> str:
    """An error of somebody else's package in a line: its type, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@functools.lru_cache(maxsize=8)
def _location_on(path: tuple[str, ...]) -> str | None:
    spec = real_spec()
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def stated_version(location: str) -> tuple[int, ...] | None:
    """(major, minor) as the package's own file states it, read without importing it."""
    try:
        text = (Path(location) / "__init__.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^__version__\s*=\s*[\"'](\d+)\.(\d+)", text, re.MULTILINE)
    return None if found is None else (int(found[1]), int(found[2]))
