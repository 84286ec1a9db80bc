"""layers of flash-attn 2.6."""

from __future__ import annotations

from types import ModuleType

from flash_attn_compat.api_2_6._others import import_submodule


def __getattr__(name: str) -> ModuleType:
    return import_submodule(__name__, name)
