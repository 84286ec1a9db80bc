"""The directory that holds the name flash_attn, and putting it on the path of this process and of its children.

site/ is an ordinary directory with a package and its metadata, so that everything that looks for flash_attn finds real
files: find_spec, pkgutil, importlib.metadata, pkg_resources, interpreters started later. The metadata list their files
in SOURCES.txt: by a RECORD, a pip in a child of a patched process would remove them. site_start/ holds a sitecustomize.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import ExitStack

from flash_attn_compat.dropin.undo import insert, remove
from flash_attn_compat.installed import SITE, SITE_2_6, SITE_START


def entries(api: str | None) -> list[str]:
    """The directories that have the name with this interface."""
    return [SITE_2_6, SITE] if api == "2.6" else [SITE]


def put_on_path(undo: ExitStack, wanted: list[str], before: str | None = None) -> None:
    """Directories onto sys.path, and for children onto PYTHONPATH.

    before: a sys.path entry that they must precede.
    """
    for entry in wanted:
        _add_to_sys_path(undo, entry, before)
        _add_to_pkg_resources(undo, entry)
        undo.callback(sys.path_importer_cache.pop, entry, None)
    add_to_pythonpath(undo, wanted)
    undo.callback(importlib.invalidate_caches)
    importlib.invalidate_caches()


def _add_to_sys_path(undo: ExitStack, entry: str, before: str | None) -> None:
    if entry in sys.path and (before not in sys.path or sys.path.index(entry) <= sys.path.index(before)):
        return
    # At the end, so that anything really installed wins; children get it by PYTHONPATH, which comes first there.
    follower = before if before is not None else SITE
    insert(sys.path, sys.path.index(follower) if follower in sys.path else len(sys.path), entry, undo)


def add_to_pythonpath(undo: ExitStack, wanted: list[str]) -> None:
    """For child processes alone: `wanted` and our sitecustomize, before everything else on PYTHONPATH.

    A sitecustomize behind ours is run by it; a broken flash_attn behind ours is hidden.
    """
    original = os.environ.get("PYTHONPATH")
    entries = original.split(os.pathsep) if original else []
    kept = [entry for entry in entries if entry not in (SITE_START, *wanted)]
    changed = os.pathsep.join([SITE_START, *wanted, *kept])
    if changed == original:
        return
    os.environ["PYTHONPATH"] = changed
    added = [entry for entry in (SITE_START, *wanted) if entry not in entries]
    undo.callback(_restore_pythonpath, original, changed, added)


def _restore_pythonpath(original: str | None, changed: str, added: list[str]) -> None:
    current = os.environ.get("PYTHONPATH", "")
    if current != changed:
        # Somebody else changed it meanwhile: take out our entries and leave theirs.
        kept = [entry for entry in current.split(os.pathsep) if entry not in added]
        original = os.pathsep.join(kept) or original
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original


def _add_to_pkg_resources(undo: ExitStack, entry: str) -> None:
    """pkg_resources reads sys.path once, at its import: one that is loaded already gets the entry here."""
    pkg_resources = sys.modules.get("pkg_resources")
    working_set = getattr(pkg_resources, "working_set", None)
    if working_set is None or entry in working_set.entries:
        return
    working_set.add_entry(entry)

    def forget() -> None:
        remove(working_set.entries, entry)
        for key in working_set.entry_keys.pop(entry, []):
            if getattr(working_set.by_key.get(key), "location", None) == entry:
                del working_set.by_key[key]

    undo.callback(forget)
