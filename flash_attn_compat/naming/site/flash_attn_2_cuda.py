"""The raw extension's name, which leads to flash_attn_compat's module of that name (the same module object)."""

import importlib
import sys

import flash_attn  # noqa: F401  (makes flash_attn_compat importable)

from flash_attn_compat.naming import finder

sys.modules[__name__] = importlib.import_module(finder.source_name("flash_attn_2_cuda", finder.stand_in_api()))
