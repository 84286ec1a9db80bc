"""The directory that holds the name flash_attn, and putting it on the path of this process and of its children.

site/ is an ordinary directory with a package, its metadata and a sitecustomize, so that everything that looks for
flash_attn finds real files: find_spec, importlib.metadata, pkg_resources, interpreters started later.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from pathlib import Path

SITE = str(Path(__file__).resolve().parent / "site")
# What the __init__ of a stand-in, and of no real flash_attn, names.
_MARK = "flash_attn_compat"


def is_stand_in_spec(spec: ModuleSpec | None) -> bool:
    """Whether this spec of flash_attn leads to our stand-in (in site/ or installed), not to the real package."""
    if spec is None or not spec.origin or not spec.origin.endswith("__init__.py"):
        return False
    try:
        return _MARK in Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def put_on_path(undo: ExitStack, before: str | None = None) -> None:
    """Make site/ visible here and in children; `before` is a sys.path entry that it must precede."""
    _add_to_sys_path(undo, before)
    put_in_pythonpath(undo)
    _add_to_pkg_resources(undo)
    undo.callback(importlib.invalidate_caches)
    undo.callback(sys.path_importer_cache.pop, SITE, None)
    importlib.invalidate_caches()


def _add_to_sys_path(undo: ExitStack, before: str | None) -> None:
    if before is None and SITE in sys.path:
        return
    # At the end, so that anything really installed wins; children get it by PYTHONPATH, which comes first there.
    sys.path.insert(sys.path.index(before) if before in sys.path else len(sys.path), SITE)
    undo.callback(_remove_once, sys.path, SITE)


def put_in_pythonpath(undo: ExitStack) -> None:
    """Make site/ visible in child processes, where PYTHONPATH comes before anything installed."""
    original = os.environ.get("PYTHONPATH")
    entries = original.split(os.pathsep) if original else []
    if SITE in entries:
        return
    changed = os.pathsep.join([*entries, SITE])
    os.environ["PYTHONPATH"] = changed
    undo.callback(_restore_pythonpath, original, changed)


def _restore_pythonpath(original: str | None, changed: str) -> None:
    current = os.environ.get("PYTHONPATH", "")
    if current != changed:
        # Somebody else changed it meanwhile: take out our entry and leave theirs.
        original = os.pathsep.join(entry for entry in current.split(os.pathsep) if entry != SITE) or original
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original


def _add_to_pkg_resources(undo: ExitStack) -> None:
    """pkg_resources reads sys.path once, at its import: one that is loaded already is told."""
    pkg_resources = sys.modules.get("pkg_resources")
    working_set = getattr(pkg_resources, "working_set", None)
    if working_set is None or SITE in working_set.entries:
        return
    working_set.add_entry(SITE)

    def forget() -> None:
        _remove_once(working_set.entries, SITE)
        for key in working_set.entry_keys.pop(SITE, []):
            if getattr(working_set.by_key.get(key), "location", None) == SITE:
                del working_set.by_key[key]

    undo.callback(forget)


def _remove_once(entries: list[str], entry: str) -> None:
    if entry in entries:
        entries.remove(entry)
