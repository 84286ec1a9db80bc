from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.aten import originals
from tests.fused_on_cpu import Launches


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Ours in front of PyTorch's operators on a CPU, with the kernels emulated; every launch is written down."""
    with originals.stand_ins(), originals.served(monkeypatch) as launches:
        yield launches
