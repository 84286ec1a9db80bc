"""What a child process of a patched one runs at its start: transformers' checks pass there as in the parent.

Python imports one sitecustomize only, so the one that this file hides is run as well.
"""

import importlib.machinery
import importlib.util
import os
import sys

import _flash_attn_compat_startup

_flash_attn_compat_startup.wait_for_imports()

_here = os.path.dirname(os.path.abspath(__file__))
_elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != _here]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _elsewhere)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
