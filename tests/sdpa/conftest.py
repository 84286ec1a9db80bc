from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa import originals

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(originals.needs_grouped_heads)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchRecord]:
    """Ours in front of PyTorch's operators on a CPU, with the kernels emulated; every launch is written down."""
    with originals.cpu_stand_ins(), originals.served(monkeypatch) as launches:
        yield launches


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchRecord]:
    """As ``served``, but launches are recorded and compute nothing, for tests that look at launches alone."""
    with originals.cpu_stand_ins(), originals.served(monkeypatch, computes=False) as launches:
        yield launches
