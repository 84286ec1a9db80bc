"""A kernel that ends a process when it is tried: it is named, and later processes refuse it and use another backend."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_attn_compat import backend_counts, explain, flash_attn_func, isolation, reset_backend_counts, use_backend
from flash_attn_compat.backends.fused.building import kernel_files, nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import ContextLost
from flash_attn_compat.backends.fused.judging import faults, self_test
from flash_attn_compat.backends.fused.launching import params
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.dispatch import call_cache
from tests.forms.inputs import randn
from tests.forms.support import close
from tests.kernels import fused_on_cpu
from tests.tools.interpreters import CAN_FORK, forked, forked_each

PARAMS = struct.calcsize("@" + "".join(kind for _, kind in (*params.HEAD_FIELDS, *params.REST_FIELDS)))
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


@pytest.fixture
def start(driver_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Start a process with a GPU, as far as kernels can see; ``start(kernel, code, blocking)``: that kernel faults."""
    real = {(module, name): getattr(module, name)
            for module, name in ((nvrtc, "kernel"), (kernel_files, "read"), (kernel_files, "write"),
                                 (faults, "marks_folder"))}  # fmt: skip
    fused_on_cpu.record(monkeypatch, tried=True)
    for (module, name), function in real.items():
        monkeypatch.setattr(module, name, function)
    monkeypatch.setattr(cuda_capture, "current_device", lambda: None)
    monkeypatch.setattr(nvrtc, "compile_variant", lambda variant, architecture: b"code")
    driver_library.expect(PARAMS, 65536)

    def start(kernel: str = "none", code: int = 0, blocking: bool = False) -> None:
        driver_library.fault_in(kernel.encode(), code, blocking)
        driver = nvrtc.Driver(driver_library)
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
    start: Callable[..., None], driver_library: ctypes.CDLL, folder: Path
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


@pytest.mark.parametrize("at", ["before the trial", "as it begins", "after it", "as its fault is noted"])
def test_an_interrupt_at_any_point_leaves_no_mark(at: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    asked: list[str] = []

    def sticky_error() -> str | None:
        asked.append("before" if not asked else "after")
        if at == f"{asked[-1]} the trial" or at == f"{asked[-1]} it":
            interrupt()
        return "ILLEGAL_ADDRESS" if at == "as its fault is noted" and len(asked) == 2 else None

    if at == "as it begins":
        monkeypatch.setattr(faults, "_acquire_lock", interrupt)
    if at == "as its fault is noted":
        monkeypatch.setattr(faults._Mark, "keep", interrupt)
    with pytest.raises(KeyboardInterrupt), faults.watch_trial(TRIAL, "forward", sticky_error):
        pass
    monkeypatch.undo()
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", str(folder.parent))
    assert not marks(folder) and faults.decline_reason(TRIAL) is None


def ended_by(end: str) -> str:
    """A program that ends, or waits, in the middle of a trial."""
    return f"""
from flash_attn_compat.backends.fused.judging import faults
import os, signal, sys, time
with faults.watch_trial({TRIAL!r}, "forward", lambda: None):
    print("tries", flush=True)
    {end}
"""


ENDS = [
    *("os.abort()", "os._exit(1)"),
    *(f"os.kill(os.getpid(), signal.{name})" for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")),
]


@needs_fork
@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ends_in_a_trial_leaves_a_mark_against_that_trial_alone(end: str, folder: Path) -> None:
    variables = {"FLASH_ATTN_COMPAT_CACHE": str(folder.parent)}
    assert forked(ended_by(end), **variables).returncode
    assert "forward ended a process" in (faults.decline_reason(TRIAL) or "")
    assert faults.decline_reason("tried-ab") is faults.decline_reason("tried-abcd") is None
    assert faults.remove_marks() == 1 and not marks(folder)


@needs_fork
def test_processes_that_try_the_same_kernel_at_once_do_not_refuse_it(folder: Path) -> None:
    code = f"""
from flash_attn_compat.backends.fused.judging import faults
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


@pytest.mark.parametrize(
    ("content", "days", "locked", "stays"),
    [(b"", 2, False, False), (b"", 0, False, True), (b"", 2, True, True), (b"x", 2, False, True)],
    ids=["empty and old", "empty and new", "empty and locked", "not empty"],
)
def test_a_look_removes_an_old_empty_mark_that_no_process_locks_and_no_other(
    content: bytes, days: int, locked: bool, stays: bool, folder: Path
) -> None:
    folder.mkdir()
    mark = folder / "tried-another.process.token"
    mark.write_bytes(content)
    written = time.time() - days * 86400
    os.utime(mark, (written, written))
    with open(mark, "rb+", buffering=0) as file:
        assert not locked or faults._acquire_lock(file, wait=True)
        assert faults.decline_reason(TRIAL) is None
        assert mark.exists() == stays


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


# ---- a process that is told to end

END_SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGXCPU"]
PLACES = {
    "in Python": "{send}",
    "in C": 'ctypes.PyDLL(None)["raise"](number)',
    "in C without the GIL": 'ctypes.CDLL(None)["raise"](number)',
    "while another trial runs": 'trial = faults.watch_trial("tried-b", "dq", sound); trial.__enter__(); {send}',
    "after another trial": "with faults.watch_trial('tried-b', 'dq', sound): pass\n    {send}",
}
SEND = "os.kill(os.getpid(), number)"
START = """
import ctypes, faulthandler, os, signal, sys, threading
from flash_attn_compat.backends.fused.judging import faults

sound = lambda: None
"""


def trial(within: str, before: str = "", after: str = "") -> str:
    """A program with a trial."""
    return f"{START}\n{before}\nwith faults.watch_trial({TRIAL!r}, 'forward', sound):\n    {within}\n{after}\n"


def run(code: str, folder: Path) -> int:
    """The exit code of a program whose marks lie in the folder."""
    answer = forked(code, FLASH_ATTN_COMPAT_CACHE=str(folder.parent))
    assert "Traceback" not in answer.stderr.replace("KeyboardInterrupt", ""), answer.stderr
    return answer.returncode


@needs_fork
@pytest.mark.parametrize(("name", "place"), [*product(END_SIGNALS[:1], PLACES), *product(END_SIGNALS[1:], ["in C"])])
def test_a_process_that_ends_by_a_signal_in_a_trial_ends_by_it_and_leaves_no_mark(
    name: str, place: str, folder: Path
) -> None:
    number = getattr(signal, name)
    default = f"number = {int(number)}; signal.signal(number, signal.SIG_DFL)"
    assert run(trial(PLACES[place].format(send=SEND), default), folder) == -number
    assert faults.decline_reason(TRIAL) is faults.decline_reason("tried-b") is None and not marks(folder)


@needs_fork
def test_a_signal_that_meets_the_main_thread_during_another_threads_trial_leaves_no_mark(folder: Path) -> None:
    code = f"""{START}
def work():
    with faults.watch_trial({TRIAL!r}, "forward", sound):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    assert run(code, folder) == -signal.SIGTERM
    assert faults.decline_reason(TRIAL) is None and not marks(folder)


@needs_fork
def test_a_signal_to_the_process_group_leaves_no_mark_in_any_process(folder: Path) -> None:
    """As a terminal sends SIGINT. One process of two has Python's handler, and gets a KeyboardInterrupt."""
    code = f"""{START}
os.setpgid(0, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that a shell runs in the background ignores it
ready, started = os.pipe()
if not os.fork():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with faults.watch_trial("tried-b", "dq", sound):
        os.write(started, b"1")
        threading.Event().wait()
os.read(ready, 1)
try:
    with faults.watch_trial({TRIAL!r}, "forward", sound):
        os.killpg(0, signal.SIGINT)
        threading.Event().wait()
except KeyboardInterrupt:
    sys.exit(0 if os.WTERMSIG(os.wait()[1]) == signal.SIGINT else 1)
"""
    assert run(code, folder) == 0
    assert faults.decline_reason(TRIAL) is faults.decline_reason("tried-b") is None and not marks(folder)


@needs_fork
@pytest.mark.parametrize(("handler", "called"), [("lambda n, _: called.append(n)", [15]), ("signal.SIG_IGN", [])])
def test_a_signal_that_the_caller_handles_or_ignores_does_what_it_did(
    handler: str, called: list[int], folder: Path
) -> None:
    before = f"number, called = 15, []; handler = {handler}; signal.signal(15, handler)"
    after = f"assert called == {called} and signal.getsignal(15) == handler and not os.listdir({str(folder)!r})"
    assert run(trial(SEND, before, after), folder) == 0


@needs_fork
def test_a_handler_that_ends_the_process_leaves_no_mark(folder: Path) -> None:
    before = "signal.signal(15, lambda number, frame: os._exit(4))"
    assert run(trial(f"{SEND.replace('number', '15')}; threading.Event().wait()", before), folder) == 4
    assert faults.decline_reason(TRIAL) is None and not marks(folder)


@needs_fork
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the system does not tell a process's actions")
def test_after_a_trial_every_signal_has_the_action_that_it_had(folder: Path) -> None:
    caught = "lambda: [line for line in open('/proc/self/status') if line.startswith(('SigCgt', 'SigIgn'))]"
    seen = f"caught = {caught}; before = caught(); python = [*map(signal.getsignal, range(1, 32))]"
    within = "inside = [*map(signal.getsignal, range(1, 32))]; assert inside == python and caught() != before"
    after = "assert caught() == before and [*map(signal.getsignal, range(1, 32))] == python"
    assert run(trial(within, seen, after), folder) == 0


@needs_fork
def test_a_handler_that_the_caller_sets_during_a_trial_stays(folder: Path) -> None:
    after = f"{SEND.replace('number', '15')}; assert called == [15]"
    assert run(trial("signal.signal(15, lambda n, _: called.append(n))", "called = []", after), folder) == 0


@needs_fork
def test_a_signal_for_which_the_caller_registered_faulthandler_keeps_the_callers_file(folder: Path) -> None:
    file, send = folder.parent / "callers", "os.kill(os.getpid(), signal.SIGUSR1)"
    before = f"file = open({str(file)!r}, 'w'); faulthandler.register(signal.SIGUSR1, file)"
    assert run(trial(send, before, send), folder) == 0
    assert file.read_text().count("most recent call first") == 2 and not marks(folder)


@needs_fork
@pytest.mark.parametrize("child", ["os.kill(os.getpid(), signal.SIGTERM)", "sys.exit()", "os._exit(0)"])
def test_a_forked_childs_end_says_nothing_of_its_parents_trial(child: str, folder: Path) -> None:
    within = f"child = os.fork()\n    if not child: {child}\n    os.waitpid(child, 0); os.abort()"
    assert run(trial(within), folder) == -signal.SIGABRT
    assert "forward ended a process" in (faults.decline_reason(TRIAL) or "")


@needs_fork
def test_a_forked_child_that_outlives_its_parent_does_not_hide_the_parents_mark(folder: Path) -> None:
    child = folder.parent / "child"
    code = f"""{START}
with faults.watch_trial({TRIAL!r}, "forward", sound):
    child = os.fork()
    if not child:
        threading.Event().wait(600)
        os._exit(0)
    open({str(child)!r}, "w").write(str(child))
    os.abort()
"""
    assert run(code, folder) == -signal.SIGABRT
    try:
        assert "forward ended a process" in (faults.decline_reason(TRIAL) or "")
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


@needs_fork
def test_an_interpreter_that_exits_in_order_during_a_threads_trial_leaves_no_mark(folder: Path) -> None:
    code = f"""{START}
import atexit
started = threading.Event()
def work():
    with faults.watch_trial({TRIAL!r}, "forward", sound):
        started.set()
        threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
started.wait()
assert faults.list_reasons() == [] and len(os.listdir({str(folder)!r})) == 1
atexit._run_exitfuncs()
"""
    assert run(code, folder) == 0
    assert not marks(folder)


def steps_in_a_trial(first: int) -> Iterator[int]:
    """Yield in the middle of a trial, and stay in it until the parent ends the process."""
    with faults.watch_trial(TRIAL, "forward", lambda: None):
        yield first
        threading.Event().wait()


@needs_fork
def test_a_child_whose_results_are_no_longer_wanted_leaves_no_mark(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used a GPU cannot be copied")
    monkeypatch.setattr(isolation, "_START", "fork")
    results = isolation.run_in_children(2, steps_in_a_trial)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert faults.decline_reason(TRIAL) is None and not marks(folder)
