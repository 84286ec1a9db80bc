"""vLLM's own Python files where they are installed; where not, the tests of this folder are skipped by name."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import pytest


@functools.cache
def skip_reason() -> str | None:
    """Return the reason why vLLM's interface cannot be imported here, or None."""
    try:
        importlib.import_module("vllm.v1.attention.backend")
        importlib.import_module("vllm._custom_ops")
    except Exception as error:  # noqa: BLE001  # its wheel needs a GPU's libraries
        return f"vLLM cannot be imported: {type(error).__name__}: {error}"
    return None


@pytest.fixture(autouse=True)
def unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests say themselves which capability the GPU has."""
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CAPABILITY", raising=False)


@pytest.fixture
def backend() -> ModuleType:
    """The plugin's backend module, over the vLLM that is installed."""
    if reason := skip_reason():
        pytest.skip(reason)
    return importlib.import_module("flash_attn_compat.vllm.backend")
