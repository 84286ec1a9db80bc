"""The raw extension's name, answered by flash_attn_compat.flash_attn_2_cuda itself (the same module object)."""

import importlib
import sys

import flash_attn  # noqa: F401  (makes flash_attn_compat importable)

sys.modules[__name__] = importlib.import_module("flash_attn_compat.flash_attn_2_cuda")
