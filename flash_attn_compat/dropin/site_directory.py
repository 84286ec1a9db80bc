"""Put the directory with the name flash_attn on the import path of this process and of its children.

site/ is an ordinary directory with a package and its metadata, so that find_spec, pkgutil, importlib.metadata,
pkg_resources and interpreters started later find real files. Its metadata list the files in SOURCES.txt instead of
RECORD, by which a pip in a child process would remove them. site_start/ holds a sitecustomize.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import ExitStack

from flash_attn_compat.dropin.undo import insert, remove
from flash_attn_compat.installed import SITE, SITE_2_6, SITE_START


def entries(api: str | None) -> list[str]:
    """Return the directories with the package and metadata of this interface, in the order of sys.path."""
    return [SITE_2_6, SITE] if api == "2.6" else [SITE]


def put_on_path(undo: ExitStack, directories: list[str], before: str | None = None) -> None:
    """Put directories on sys.path, and on PYTHONPATH for children.

    before: a sys.path entry that they must precede
    """
    for entry in directories:
        _add_to_sys_path(undo, entry, before)
        _add_to_pkg_resources(undo, entry)
        undo.callback(sys.path_importer_cache.pop, entry, None)
    add_to_pythonpath(undo, directories)
    undo.callback(importlib.invalidate_caches)
    importlib.invalidate_caches()


def _add_to_sys_path(undo: ExitStack, entry: str, before: str | None) -> None:
    if entry in sys.path and (before not in sys.path or sys.path.index(entry) <= sys.path.index(before)):
        return
    # Here ours goes to the end, so that an installed flash-attn wins. In children, PYTHONPATH puts ours first.
    follower = before if before is not None else SITE
    insert(sys.path, sys.path.index(follower) if follower in sys.path else len(sys.path), entry, undo)


def add_to_pythonpath(undo: ExitStack, directories: list[str]) -> None:
    """Put `directories` and our sitecustomize at the front of PYTHONPATH, for child processes only.

    Our sitecustomize runs the next one on the path. A broken flash_attn later on the path is hidden.
    """
    original = os.environ.get("PYTHONPATH")
    entries = original.split(os.pathsep) if original else []
    kept = [entry for entry in entries if entry not in (SITE_START, *directories)]
    changed = os.pathsep.join([SITE_START, *directories, *kept])
    if changed == original:
        return
    os.environ["PYTHONPATH"] = changed
    added = [entry for entry in (SITE_START, *directories) if entry not in entries]
    undo.callback(_restore_pythonpath, original, changed, added)


def _restore_pythonpath(original: str | None, changed: str, added: list[str]) -> None:
    current = os.environ.get("PYTHONPATH", "")
    if current != changed:
        # Other code has changed PYTHONPATH meanwhile: remove only our entries.
        kept = [entry for entry in current.split(os.pathsep) if entry not in added]
        original = os.pathsep.join(kept) or original
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original


def _add_to_pkg_resources(undo: ExitStack, entry: str) -> None:
    """Add the entry to an imported pkg_resources, which reads sys.path only once."""
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
