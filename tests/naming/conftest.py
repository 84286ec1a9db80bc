"""Leaves no test with the name flash_attn answered."""

from __future__ import annotations

import sys

import pytest

from flash_attn_compat.naming import unpatch


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    unpatch()
    assert "flash_attn" not in sys.modules, "a test left the name flash_attn answered"
