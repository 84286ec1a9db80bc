"""Runs at the start of a patched process's children: there too, patch()'s changes to other packages are applied.

Python imports only one sitecustomize, so this file runs the one that it hides.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_site = os.path.join(os.path.dirname(_here), "site")
# If a working flash-attn keeps the name, site/ is not on the path.
_has_the_name = _site in map(os.path.abspath, sys.path)

sys.path.append(_site)
import _flash_attn_compat_startup  # noqa: E402

sys.path.pop()
_flash_attn_compat_startup.wait_for_imports(stand_in=_site if _has_the_name else "")

_elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != _here]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _elsewhere)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
