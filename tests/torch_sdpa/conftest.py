from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fused_on_cpu import Launches
from tests.torch_sdpa import originals


@pytest.fixture(autouse=True)
def _has_grouped_heads() -> None:
    if "enable_gqa" not in str(torch.ops.aten.scaled_dot_product_attention.default._schema):
        pytest.skip("before PyTorch 2.5 the operators stay PyTorch's")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Ours in front of PyTorch's operators on a CPU, with the kernels emulated; every launch is written down."""
    with originals.stand_ins(), originals.served(monkeypatch) as launches:
        yield launches
