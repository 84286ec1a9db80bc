"""Let FlashAttention-3's name, flash_attn_interface, lead to our functions, where that is asked for and it is free."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack

from flash_attn_compat.installed import SITE_FA3
from flash_attn_compat.naming import site_directory

_NAME = "flash_attn_interface"


def redirect(undo: ExitStack) -> None:
    """Put the directory with the name and its metadata onto sys.path and children's PYTHONPATH.

    A module of that name which is there already, in a child ours, stays.
    """
    if importlib.util.find_spec(_NAME) is None:
        undo.callback(sys.modules.pop, _NAME, None)
        site_directory.put_on_path(undo, [SITE_FA3])
