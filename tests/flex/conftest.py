from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch.torch_version import TorchVersion

from flash_attn_compat.torch_flex import override
from flash_attn_compat.torch_flex.policy import Policy
from tests.flex import calls
from tests.kernels import fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord


class _Refused(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip("flex needs PyTorch 2.6 or newer", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip this folder where PyTorch is too old to import what it tests."""
    if TorchVersion(torch.__version__) >= "2.6":
        return None
    refused: pytest.Module = _Refused.from_parent(parent, path=module_path)
    return refused


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchRecord]:
    """Our kernels under flex_attention on a CPU, emulated; every launch is written down."""
    yield from _serve(fused_on_cpu.emulate, monkeypatch)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchRecord]:
    """As ``served``, but nothing computes the launches, and nothing keeps their tensors."""
    yield from _serve(fused_on_cpu.record, monkeypatch)


def _serve(
    act: Callable[[pytest.MonkeyPatch], LaunchRecord], monkeypatch: pytest.MonkeyPatch
) -> Iterator[LaunchRecord]:
    launches = act(monkeypatch)
    calls.forget_prepared(monkeypatch)
    torch._dynamo.reset()
    with override.applied(Policy("cpu")):
        yield launches
    torch._dynamo.reset()


@pytest.fixture
def inductor_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
