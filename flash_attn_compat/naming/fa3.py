"""Let FlashAttention-3's name, flash_attn_interface, lead to our functions, where that is asked for and it is free."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import ExitStack
from pathlib import Path

SITE_FA3 = str(Path(__file__).resolve().parent / "site_fa3")
_NAME = "flash_attn_interface"


def answer(undo: ExitStack) -> None:
    """Put the directory with the name and its metadata at the end of sys.path and of children's PYTHONPATH.

    A module of that name which is there already, in a child ours, stays.
    """
    if importlib.util.find_spec(_NAME) is not None:
        return
    sys.path.append(SITE_FA3)
    entries = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), SITE_FA3]
    os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    importlib.invalidate_caches()
    undo.callback(_withdraw)


def _withdraw() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != SITE_FA3]
    kept = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", SITE_FA3)]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    if not kept:
        del os.environ["PYTHONPATH"]
    sys.modules.pop(_NAME, None)
    sys.path_importer_cache.pop(SITE_FA3, None)
    importlib.invalidate_caches()
