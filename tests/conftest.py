"""Settings of every test: one thread per process (the suite runs one per core) and no backend forced from outside."""

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile

os.environ.pop("FLASH_ATTN_COMPAT_BACKEND", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# verify and doctor report faults of earlier runs on this machine, and reading hundreds of marks takes a quarter of a
# second each time. Beside a GPU the usual folder stays: it has the compiled kernels.
if "FLASH_ATTN_COMPAT_CACHE" not in os.environ and not shutil.which("nvidia-smi"):
    CACHE = tempfile.TemporaryDirectory(prefix="flash_attn_compat_tests_", ignore_cleanup_errors=True)
    os.environ["FLASH_ATTN_COMPAT_CACHE"] = CACHE.name  # workers and child processes inherit it

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.forms.support import RecordingReference, Serve
    from tests.kernels.fused_on_cpu import LaunchRecord

MOST_PROCESSES = 14  # each takes about 1 GB, and 0.7 GB of a GPU that it uses


def pytest_xdist_auto_num_workers() -> int:
    """The number of processes for ``-n auto``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_PROCESSES)


def pytest_configure(config: pytest.Config) -> None:
    """Copy a worker of pytest-xdist, unless the conftest.py of a folder that was asked for has imported our modules."""
    from tests.tools import interpreters

    is_worker, is_clean = hasattr(config, "workerinput"), "flash_attn_compat" not in sys.modules
    if is_worker and is_clean and interpreters.CAN_FORK and os.path.isdir("/proc/self/fd"):
        interpreters.copy_this_process()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Beside a GPU, compile the kernels of the whole suite before its processes start.

    Each process compiles a kernel that it does not find, so without this several would compile the same ones.
    """
    is_whole = session.config.args == [str(path) for path in session.config.getini("testpaths")]
    is_worker = hasattr(session.config, "workerinput")
    excludes_gpu = "not gpu" in session.config.option.markexpr
    if is_whole and not is_worker and not excludes_gpu and shutil.which("nvidia-smi"):
        subprocess.run([sys.executable, "-m", "tests.fused_coverage", "--only"], check=False)


gc.disable()  # until all tests are known: what importing and collecting make stays for good
MODULES = pytest.StashKey[int]()  # how many there were when garbage collections last left them out


def pytest_collection_finish() -> None:
    """Not in the process that only hands tests out, which so needs no PyTorch."""
    import torch

    torch.set_num_threads(1)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` without an NVIDIA GPU: `pytest -m gpu` runs them alone."""
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


@pytest.fixture(autouse=True)
def _pytorchs_choices() -> Iterator[None]:
    """Put PyTorch's switches of attention kernels back: a benchmark's main turns off, for good, what Turing lacks."""
    import torch

    kernels, names = torch.backends.cuda, ("flash", "mem_efficient", "math", "cudnn")
    switches = [
        (getattr(kernels, f"enable_{name}_sdp"), getattr(kernels, f"{name}_sdp_enabled")())
        for name in names
        if hasattr(kernels, f"enable_{name}_sdp")
    ]
    yield
    for switch, was_on in switches:
        switch(was_on)
    # PyTorch keeps the answer for the process, and a test may have acted out a machine without a GPU.
    getattr(getattr(sys.modules.get("torch.utils._triton"), "has_triton", None), "cache_clear", lambda: None)()


@pytest.fixture
def copied_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes are copies of this one, which start at once, unless autograd's threads wait for a GPU here."""
    import torch

    from flash_attn_compat import isolation
    from tests.tools.interpreters import CAN_FORK

    if CAN_FORK and not torch.cuda.is_available():
        monkeypatch.setattr(isolation, "_START", "fork")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile knows no graph of another test."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> "RecordingReference":
    """A backend that serves and records every call."""
    from tests.forms.support import RecordingReference, serve_by

    backend = RecordingReference()
    serve_by(monkeypatch, backend)
    return backend


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch, tmp_path: "Path") -> "Iterator[LaunchRecord]":
    """Our kernels serve every call, run by the emulator as a Turing GPU would run them."""
    from tests.paper_gpu import PaperGpu, placed

    with placed(PaperGpu(computes=True, forced="fused"), monkeypatch, tmp_path) as found:
        yield found


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: "Path") -> "Iterator[LaunchRecord]":
    """As ``turing``, of capability 9.0."""
    from tests.paper_gpu import PaperGpu, placed

    with placed(PaperGpu(90, computes=True, forced="fused"), monkeypatch, tmp_path) as found:
        yield found


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A stand-in for the CUDA driver, in C++."""
    from tests.forms.support import driver_stand_in

    return ctypes.CDLL(driver_stand_in(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: "Path") -> "Serve":
    """From a backend to a block in which it serves CPU tensors: emulated, or by a stand-in."""
    from flash_attn_compat import use_backend
    from tests.answers import others_kernels
    from tests.kernels import fused_on_cpu

    def serving(backend: str) -> Any:
        if backend == "fused":
            fused_on_cpu.emulate(monkeypatch)
        elif backend in others_kernels.BACKENDS:
            others_kernels.install(monkeypatch, backend, tmp_path)
        return use_backend(backend)

    return serving
