from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flash_attn_compat.torch_flex import launch, override
from flash_attn_compat.torch_flex.policy import Policy
from tests import fused_on_cpu
from tests.fused_on_cpu import LaunchRecord


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchRecord]:
    """Our kernels under flex_attention on a CPU, emulated; every launch is written down."""
    launches = fused_on_cpu.emulate(monkeypatch)
    monkeypatch.setattr(launch, "_runs", {})
    torch._dynamo.reset()
    with override.applied(Policy("cpu")):
        yield launches
    torch._dynamo.reset()
