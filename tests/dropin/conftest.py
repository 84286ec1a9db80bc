"""After every test of this folder, unpatch() restores the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from flash_attn_compat.dropin import unpatch

NAMES = ("flash_attn", "flash_attn_2_cuda", "flash_attn_interface")


def state() -> tuple[object, ...]:
    """Return the state that patch() may change, here and for child processes."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(("FLASH_ATTN", "PYTHONPATH"))}
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in NAMES}
    finders = [finder for finder in sys.meta_path if type(finder).__name__ != "VendorImporter"]  # setuptools' own
    paths = [place for place in sys.path if not place.endswith("_vendor")]  # setuptools' own, at its import
    return paths, finders, environment, modules


@pytest.fixture(autouse=True)
def everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = state()
    yield
    unpatch()
    monkeypatch.undo()
    assert state() == before
