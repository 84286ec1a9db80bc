"""A kernel that ends a process when it is tried: it is named, and later processes refuse it and use another backend."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_attn_compat import backend_counts, explain, flash_attn_func, reset_backend_counts, use_backend
from flash_attn_compat.backends.fused import cache, faults, nvrtc, params, self_test
from flash_attn_compat.backends.fused.nvrtc import ContextLost
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.dispatch import call_cache
from tests import fused_on_cpu
from tests.interpreters import CAN_FORK, forked, forked_each
from tests.support import close, driver_stand_in, randn

PARAMS = struct.calcsize("<" + "".join(kind for _, kind in (*params.HEAD_FIELDS, *params.REST_FIELDS)))
TRIAL = "tried-abc"
needs_fork = pytest.mark.skipif(not CAN_FORK, reason="processes cannot be copied here")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the marks of this test lie."""
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", str(tmp_path))
    return tmp_path / "trials"


def marks(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def q(seed: int = 0) -> torch.Tensor:
    return randn(1, 20, 2, 64, seed=seed, dtype=torch.float16)


# ---- through the driver


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(driver_stand_in(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def start(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Start a process with a GPU, as far as kernels can see; ``start(kernel, code, blocking)``: that kernel faults."""
    real = {(module, name): getattr(module, name)
            for module, name in ((nvrtc, "kernel"), (cache, "read"), (cache, "write"),
                                 (faults, "marks_folder"))}  # fmt: skip
    fused_on_cpu.record(monkeypatch, tried=True)
    for (module, name), function in real.items():
        monkeypatch.setattr(module, name, function)
    monkeypatch.setattr(cuda_capture, "current_device", lambda: None)
    monkeypatch.setattr(nvrtc, "compile_variant", lambda variant, architecture: b"code")
    library.expect(PARAMS, 65536)

    def start(kernel: str = "none", code: int = 0, blocking: bool = False) -> None:
        library.fault_in(kernel.encode(), code, blocking)
        driver = nvrtc.Driver(library)
        monkeypatch.setattr(nvrtc, "driver", lambda: driver)
        self_test._passed.clear(), nvrtc._kernels.clear(), call_cache.forget()
        fused_on_cpu.FUSED.clear_failures()

    return start


@pytest.mark.parametrize("blocking", [True, False], ids=["CUDA_LAUNCH_BLOCKING=1", "asynchronous"])
@pytest.mark.parametrize("code", [700, 702, 719])
def test_a_kernel_that_faults_is_named_and_later_processes_use_the_next_backend(
    code: int, blocking: bool, start: Callable[..., None], folder: Path
) -> None:
    start("forward", code, blocking)
    with pytest.raises(ContextLost, match=r"^forward \(\{.*'D': 64.* broke this process's use of the GPU .*is noted"):
        flash_attn_func(q(), q(1), q(2))
    with use_backend("chunked"):
        expected = flash_attn_func(q(), q(1), q(2))
    (mark,) = marks(folder)
    for _ in range(2):
        start()
        reset_backend_counts()
        with pytest.warns(RuntimeWarning, match="a fused kernel is not used: forward .* broke a process") as told:
            found = flash_attn_func(q(), q(1), q(2))
        assert len(told) == 1 and str(mark) in str(told[0].message) and "doctor --again" in str(told[0].message)
        assert "fused" not in backend_counts() and sum(backend_counts().values()) == 1
        close(found, expected, 8.0)
    assert "failed before: forward" in str(explain(flash_attn_func, q(), q(1), q(2)))


def test_a_kernel_is_tried_again_on_request(start: Callable[..., None], folder: Path) -> None:
    start("forward", 700)
    with pytest.raises(ContextLost):
        flash_attn_func(q(), q(1), q(2))
    assert len(faults.list_reasons()) == 1 and faults.remove_marks() == 1
    assert not faults.list_reasons() and not marks(folder) and faults.remove_marks() == 0
    start()
    with pytest.warns(RuntimeWarning, match="computes wrong numbers"):  # the stand-in computes nothing
        flash_attn_func(q(), q(1), q(2))


def test_an_earlier_context_error_is_not_blamed_on_the_tried_kernel(
    start: Callable[..., None], library: ctypes.CDLL, folder: Path
) -> None:
    start("forward", 700)
    with pytest.raises(ContextLost):
        flash_attn_func(q(), q(1), q(2))
    faults.remove_marks()
    self_test._passed.clear()
    with pytest.raises(ContextLost, match=r"broken before forward .* could be tried: .*ILLEGAL_ADDRESS"):
        flash_attn_func(*[randn(1, 20, 2, 32, seed=seed, dtype=torch.float16) for seed in range(3)])
    assert not marks(folder)


# ---- what becomes of a mark


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), SystemExit(1), torch.cuda.OutOfMemoryError("no room")])
def test_a_finished_trial_leaves_no_mark(error: BaseException | None, folder: Path) -> None:
    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected, faults.watch_trial(TRIAL, "forward", lambda: None):
        assert len(marks(folder)) == 1 and faults.decline_reason(TRIAL) is None, "it is in progress"
        if error is not None:
            raise error
    assert not marks(folder) and faults.decline_reason(TRIAL) is None


def test_a_kernel_that_hangs_until_it_is_interrupted_leaves_its_mark(folder: Path) -> None:
    asked: list[str] = []

    def broken() -> str | None:
        asked.append("before and after")
        if len(asked) == 2:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt), faults.watch_trial(TRIAL, "forward", broken):
        pass
    assert "forward ended a process when tried on this GPU" in (faults.decline_reason(TRIAL) or "")


def ended_by(end: str) -> str:
    """A program that ends, or waits, in the middle of a trial."""
    return f"""
from flash_attn_compat.backends.fused import faults
import os, signal, sys, time
with faults.watch_trial({TRIAL!r}, "forward", lambda: None):
    print("tries", flush=True)
    {end}
"""


@needs_fork
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", "os._exit(1)"])
def test_a_process_that_ends_in_a_trial_leaves_a_mark_against_that_trial_alone(end: str, folder: Path) -> None:
    variables = {"FLASH_ATTN_COMPAT_CACHE": str(folder.parent)}
    assert forked(ended_by(end), **variables).returncode
    assert "forward ended a process" in (faults.decline_reason(TRIAL) or "")
    assert faults.decline_reason("tried-ab") is faults.decline_reason("tried-abcd") is None
    assert faults.remove_marks() == 1 and not marks(folder)


@needs_fork
def test_processes_that_try_the_same_kernel_at_once_do_not_refuse_it(folder: Path) -> None:
    code = f"""
from flash_attn_compat.backends.fused import faults
from flash_attn_compat.dispatch import call_cache
import os, time
os.environ["FLASH_ATTN_COMPAT_CACHE"] = {str(folder.parent)!r}
for _ in range(60):
    assert faults.decline_reason({TRIAL!r}) is None
    with faults.watch_trial({TRIAL!r}, "forward", lambda: None):
        time.sleep(0.001)
"""
    answers = forked_each([code] * 4)
    assert not any(answer.returncode for answer in answers), [answer.stderr for answer in answers]
    assert not marks(folder)


def test_a_mark_writable_by_others_is_ignored(folder: Path) -> None:
    with pytest.raises(ContextLost), faults.watch_trial(TRIAL, "forward", iter([None, "ILLEGAL_ADDRESS"]).__next__):
        pass
    assert faults.decline_reason(TRIAL)
    (mark,) = marks(folder)
    content = mark.read_bytes()
    mark.chmod(0o666)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert faults.decline_reason(TRIAL) is None
    mark.chmod(0o644)
    mark.write_bytes(b"rubbish" + content)
    assert faults.decline_reason(TRIAL) is None


@pytest.mark.parametrize("how", ["no locks", "not writable"])
def test_where_no_mark_can_be_left_kernels_are_tried_all_the_same(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "not writable":
        monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", os.devnull)
    else:
        monkeypatch.setattr("fcntl.flock", refuse_locks)
    with faults.watch_trial(TRIAL, "forward", lambda: None):
        assert faults.decline_reason(TRIAL) is None
    expected = pytest.raises(ContextLost, match="FUSED=0" if how == "not writable" else "is noted")
    with expected, faults.watch_trial(TRIAL, "forward", iter([None, "ILLEGAL_ADDRESS"]).__next__):
        pass
    assert bool(faults.decline_reason(TRIAL)) == (how == "no locks"), "what is known needs no lock"


def refuse_locks(*given: Any) -> None:
    raise OSError("Function not implemented")


@needs_fork
def test_without_locks_a_killed_process_leaves_nothing_that_counts(folder: Path) -> None:
    refused = "import fcntl\ndef refuse(*given): raise OSError\nfcntl.flock = refuse\n"
    code = refused + ended_by("os.kill(os.getpid(), signal.SIGKILL)")
    assert forked(code, FLASH_ATTN_COMPAT_CACHE=str(folder.parent)).returncode == -signal.SIGKILL
    assert faults.decline_reason(TRIAL) is None
