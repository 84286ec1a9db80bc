"""What every test needs: one thread per process (the suite runs one per core) and no backend forced from outside."""

import gc
import os
import sys

os.environ.pop("FLASH_ATTN_COMPAT_BACKEND", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fused_on_cpu import Launches
    from tests.support import Asked

gc.disable()  # until all tests are known: what importing and collecting make stays for good
MODULES = pytest.StashKey[int]()  # how many there were when garbage collections last left them out


def pytest_collection_finish() -> None:
    """Not in the process that only hands tests out, which so needs no PyTorch."""
    import torch

    torch.set_num_threads(1)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``gpu`` need an NVIDIA GPU: `pytest -m gpu` runs them alone."""
    import torch

    from flash_attn_compat import settings

    if len(sys.modules) > item.config.stash.get(MODULES, 0) + 100:
        gc.collect()
        gc.freeze()  # libraries stay: to look at them again took half a second each time
        item.config.stash[MODULES] = len(sys.modules)
    for marker in item.iter_markers("gpu"):
        lowest = marker.kwargs.get("capability", (7, 5))
        if (
            not torch.cuda.is_available()
            or settings.capability(torch.device("cuda", torch.cuda.current_device())) < lowest
        ):
            pytest.skip(f"needs an NVIDIA GPU of compute capability {lowest[0]}.{lowest[1]}")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> "Asked":
    """Serves every call, and knows them."""
    from tests.support import Asked, serve_by

    backend = Asked()
    serve_by(monkeypatch, backend)
    return backend


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Launches]":
    """Our kernels serve every call, run by the emulator as a Turing GPU would run them."""
    from flash_attn_compat import use_backend
    from tests import fused_on_cpu

    with use_backend("fused"):
        yield fused_on_cpu.emulate(monkeypatch, 75)
