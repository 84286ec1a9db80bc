"""Leaves no test with the name flash_attn answered, and starts interpreters for those that need a fresh one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flash_attn_compat.naming import unpatch

REPOSITORY = str(Path(__file__).resolve().parents[2])


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    unpatch()
    assert "flash_attn" not in sys.modules, "a test left the name flash_attn answered"


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs this interpreter with arguments; the package is importable there, nothing else is inherited."""

    def run(*arguments: str, cwd: Path | str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": REPOSITORY, "OMP_NUM_THREADS": "1", **environment}
        return subprocess.run(
            [sys.executable, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=120
        )

    return run
