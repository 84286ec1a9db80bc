"""What commands that measure a GPU rest on: its limits, clock and power, child processes, and the path of a result."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import math
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attn_compat import card, isolation
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.card import Limits
from flash_attn_compat.gpu_state import GpuState, Monitor, summarize
from flash_attn_compat.isolation import Ended, read_concurrently, run_in_children
from flash_attn_compat.output_path import output_path
from tests.tools.interpreters import CAN_FORK
from verify import bench, compare
from verify.bench_run import Plan
from verify.timing import DeviceLost
from verify.workloads import DECODE, FULL, SMALL, Workload, bytes_of, fitted, of_lengths, visible_scores, workload

GIB = 2.0**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """A GPU of 4 GiB as number 1, which is current; returns the caps that are set."""
    caps: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=4 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: caps.append(given))
    return caps


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_memory_is_capped_so_that_pytorch_raises_before_a_driver_uses_the_hosts(
    device: str, gpu: list[tuple[float, int]]
) -> None:
    assert card.cap_memory(torch.device(device)) == 0.9 * 4 * GIB and gpu == [(0.9, 1)]


def test_a_cpu_has_no_limits(gpu: list[tuple[float, int]]) -> None:
    limits = card.measure_limits(torch.device("cpu"), torch.float32)
    assert limits == card.NO_LIMITS == Limits(math.inf, math.inf) and not gpu


@pytest.mark.parametrize(
    ("index", "release", "hip", "expected"),
    [
        (0, "6.8.0-generic", None, False),
        (1, "6.8.0-generic", None, True),
        (0, "5.15.153.1-microsoft-standard-WSL2", None, True),
        (1, "6.8.0-generic", "6.2", False),
    ],
)
def test_a_timer_is_known_from_the_driver_and_below_wsl(
    index: int,
    release: str,
    hip: str | None,
    expected: bool,
    driver_library: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = nvrtc.Driver(driver_library)
    monkeypatch.setattr(nvrtc, "driver", lambda: driver)
    monkeypatch.setattr(card, "platform", SimpleNamespace(release=lambda: release))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert card.has_timer(torch.device("cuda", index)) == expected


@pytest.mark.parametrize(("timer", "seconds"), [(True, 0.5), (False, 2.0)])
def test_launches_stay_far_below_two_seconds_where_a_timer_runs(
    timer: bool, seconds: float, gpu: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "has_timer", lambda device: timer)
    monkeypatch.setattr(card, "_speed", lambda device, dtype: 1e12)
    assert card.measure_limits(torch.device("cuda"), torch.float16) == Limits(0.9 * 4 * GIB, seconds * 1e12)


@pytest.mark.parametrize("name", [each.name for each in (*FULL, *DECODE)])
@pytest.mark.parametrize("limits", [Limits(3.6 * GIB, 3e11), Limits(0.5 * GIB, 3e9)], ids=["GTX 1650", "less"])
def test_every_workload_fits_a_small_card_and_says_how_much_of_it_is_left(name: str, limits: Limits) -> None:
    given = next(each for each in (*FULL, *DECODE) if each.name == name)
    found = fitted(given, limits)
    launch = card.count_flops(found.nheads, found.head_dim, visible_scores(found), not found.decode)
    assert bytes_of(found) <= limits.memory and launch <= limits.flops_of_launch
    label, _, share = found.name.partition(" (1/")
    shape = f"decode_{found.batch}x{found.capacity}"
    assert label == re.sub(r"^decode_\d+x\d+", shape, name) and (found == given) == (not share)
    if share:
        ratio = bytes_of(given) / bytes_of(found)
        assert ratio > int(share.rstrip(")")) / 3 and found.nheads == given.nheads and found.head_dim == given.head_dim


def test_a_large_card_is_given_every_workload_whole() -> None:
    limits = Limits(0.9 * 80 * GIB, 2 * 3e14)
    assert [fitted(each, limits) for each in (*FULL, *DECODE)] == [*FULL, *DECODE]


@pytest.mark.parametrize("each", SMALL, ids=lambda each: each.name)
def test_the_estimate_of_a_calls_memory_is_no_less_than_its_tensors(each: Workload) -> None:
    call = each.call("cpu", torch.float16)
    held = sum(x.nbytes for x in (*call.args.values(), call.dout) if isinstance(x, torch.Tensor) and x.dim() > 2)
    assert held <= bytes_of(each)


def test_halves_of_one_long_sequence_are_shorter() -> None:
    (long,) = of_lengths([32768])
    found = fitted(long, Limits(math.inf, 8.0 * 32 * 128 * 0.5 * 8192**2))
    assert found.seqlens_q == found.seqlens_k == (8192,) and found.name == "causal_32768 (1/4)"
    window = workload("window", (16384,), (8, 8), 64, causal=True, window=(1024, 0))
    assert fitted(window, Limits(bytes_of(window) / 2, math.inf)).window == (512, 0)


def test_bench_takes_workloads_that_fit_and_tells_a_device_that_gives_up_at_its_first_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan([replace(SMALL[0], name="given")], [], "cpu", torch.float32)
    monkeypatch.setattr(bench, "measure_limits", lambda device, dtype: Limits(bytes_of(SMALL[0]) / 2, math.inf))
    assert [each.name for each in bench.on_card(plan).workloads] == ["given (1/2)"]

    def give_up(plan: Plan) -> Plan:
        raise DeviceLost("forward broke this process's use of the GPU")

    monkeypatch.setattr(bench, "on_card", give_up)
    from verify.cli import main

    assert main(["bench", "--only", "cross_short_q", "--rivals", "none"]) == 1
    assert "failed at the first call: forward broke" in " ".join(capsys.readouterr().out.split())


def test_verify_caps_memory_before_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(compare, "cap_memory", lambda device: done.append(device.type))
    monkeypatch.setattr(compare, "run", lambda *given: done.append("run") or iter(()))
    asked = compare.Asked(None, ["chunked"], ["cpu"], True, ["head_dim 52"], True)
    assert list(compare.steps(0, asked)) == [] and done == ["cpu", "run"]


# ---------------------------------------------------------------- the clock and power of a GPU while it is timed

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def stand_in(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], int], milliwatts: Callable[[], int]) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: clock())
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: milliwatts())


def raises(error: Exception) -> Callable[[], int]:
    def read() -> int:
        raise error

    return read


def test_readings_give_medians_and_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, powers = iter((585, 1590, 1200)), iter((30_000, 69_400, 70_000))
    stand_in(monkeypatch, lambda: next(clocks), lambda: next(powers))
    monitor = Monitor(CUDA)
    for _ in range(3):
        monitor.read()
    assert monitor.median() == GpuState(1200.0, 69.4)
    assert monitor.median(first=1) == GpuState(1395.0, 69.7)
    assert monitor.median(first=3) is None
    assert monitor.summarize() == "clock 1,200 MHz (585 to 1,590), power 69 W (30 to 70)"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("nvidia-ml-py does not seem to be installed"), "pip install nvidia-ml-py"),
        (RuntimeError("Driver Not Loaded"), "RuntimeError: Driver Not Loaded"),
    ],
)
def test_an_error_of_nvml_ends_the_readings_with_its_reason(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    stand_in(monkeypatch, raises(error), lambda: calls.append(1) or 0)
    monitor = Monitor(CUDA)
    monitor.read()
    monitor.read()
    assert told in monitor.decline_reason and not calls
    assert monitor.summarize() == f"clock and power unknown: {monitor.decline_reason}"
    assert monitor.median() is None


@pytest.mark.parametrize(("device", "hip"), [(CPU, None), (CUDA, "6.2")])
def test_devices_without_nvml_are_not_read(device: torch.device, hip: str | None, monkeypatch) -> None:
    stand_in(monkeypatch, raises(AssertionError("read")), lambda: 0)
    monkeypatch.setattr(torch.version, "hip", hip)
    monitor = Monitor(device)
    monitor.read()
    assert monitor.summarize() == "clock and power unknown: only NVIDIA GPUs have NVML"


def test_no_states_make_no_line() -> None:
    assert summarize([]) == ""


# ---------------------------------------------------------------- steps in child processes

needs_fork = pytest.mark.skipif(not CAN_FORK, reason="processes cannot be copied here")
lost = False


def steps(first: int, plan: list[str]) -> Iterator[tuple[str, int]]:
    """Yield steps that return their process, or end it."""
    global lost  # noqa: PLW0603
    for what in plan[first:]:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            os._exit(3)
        if what == "raise":
            raise ValueError("no such backend")
        lost = what == "lose"
        yield what, os.getpid()


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used a GPU cannot be copied")
    monkeypatch.setattr(isolation, "_START", "fork")
    monkeypatch.setattr(isolation, "_gpu_is_lost", lambda: lost)


def told(plan: list[str]) -> tuple[list[str], int]:
    """Return each step's result, and the number of processes."""
    found: list[Any] = list(run_in_children(len(plan), steps, plan))
    processes = {one[1] for one in found if not isinstance(one, Ended)}
    return [one.how if isinstance(one, Ended) else one[0] for one in found], len(processes)


KILLED, EXITED = "its process ended by SIGKILL", "its process ended with exit code 3"


@needs_fork
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(
    ("plan", "expected", "processes"),
    [
        (["right"] * 3, ["right"] * 3, 1),
        (["right", "kill", "right"], ["right", KILLED, "right"], 2),
        (["kill", "exit", "right"], [KILLED, EXITED, "right"], 1),
        (["right", "lose", "right", "right"], ["right", "lose", "right", "right"], 2),
        (["right", "lose"], ["right", "lose"], 1),
        (["right", "kill"], ["right", KILLED], 1),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else str(value),
)
def test_each_step_has_a_result_even_if_its_process_ends(plan: list[str], expected: list[str], processes: int) -> None:
    assert told(plan) == (expected, processes)


@needs_fork
@pytest.mark.usefixtures("forking")
def test_after_so_many_ended_processes_the_rest_is_told_as_not_done() -> None:
    found, _ = told(["exit"] * (isolation.MOST_ENDED + 2))
    assert found == [EXITED] * isolation.MOST_ENDED + ["not done: 6 processes ended before"] * 2


@needs_fork
@pytest.mark.usefixtures("forking")
def test_an_error_of_a_step_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no such backend"):
        told(["right", "raise", "right"])


@needs_fork
@pytest.mark.usefixtures("forking")
def test_closing_the_results_early_leaves_no_process() -> None:
    results = run_in_children(3, steps, ["right"] * 3)
    _, child = next(results)  # type: ignore[misc]
    results.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_children_are_new_interpreters_that_find_the_steps_module_where_it_was_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy could not use the GPU. `flash-attn-compat verify` takes the clone from sys.path again.

    What lies in the current folder under the name of a library is not run.
    """
    if sys.version_info >= (3, 11):
        for name in ("pickle.py", "multiprocessing.py"):
            (tmp_path / name).write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "far_steps.py").write_text(
        "import os\n"
        "def steps(first, parent):\n"
        "    for number in range(first, 2):\n"
        "        if number: os._exit(3)\n"
        "        yield number, os.getpid() != parent\n"
    )
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        module = importlib.import_module("far_steps")
    first, second = run_in_children(2, module.steps, os.getpid())
    assert first == (0, True) and isinstance(second, Ended) and second.how == EXITED


@pytest.mark.parametrize(
    ("code", "expected"),
    [(-signal.SIGTERM, "ended by SIGTERM"), (1, "exit code 1"), (-999, "exit code -999"), (None, "exit code None")],
)
def test_the_end_of_a_process_in_words(code: int | None, expected: str) -> None:
    assert isolation._describe_exit(code).endswith(expected)


@pytest.mark.parametrize(("error", "expected"), [(None, False), (RuntimeError("CUDA error"), True)])
def test_a_gpu_is_lost_where_waiting_for_it_fails(
    error: Exception | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("torch.cuda.synchronize", wait)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    assert not isolation._gpu_is_lost(), "nobody used one"
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert isolation._gpu_is_lost() == expected


def test_iterators_that_advance_side_by_side_give_their_own_results_and_errors_in_order() -> None:
    def counting(last: int) -> Iterator[int]:
        yield from range(last)
        if last == 2:
            raise ValueError("two")

    first, second, third = read_concurrently([counting(last) for last in (3, 2, 0)])
    assert [next(second), next(first), next(second), next(first)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="two"):
        next(second)
    assert [*first] == [2] and [*third] == []


# ---------------------------------------------------------------- the path of an option is tried before the work

has_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")


def test_a_new_file_is_not_left_behind_and_an_old_one_keeps_its_content_and_time(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    os.utime(old, (1, 1))
    assert [output_path(str(path)) for path in (old, new)] == [old, new] and [*tmp_path.iterdir()] == [old]
    assert old.read_text() == "{}" and old.stat().st_mtime == 1


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_to_a_new_file_stays_and_its_file_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "new.json")
    output_path(str(tmp_path / "link"))
    assert os.listdir(tmp_path) == ["link"]


@has_pipes
def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    """Opening it would wait for a reader, or end a reader's wait."""
    os.mkfifo(tmp_path / "pipe")
    assert output_path(str(tmp_path / "pipe")) == tmp_path / "pipe"


@pytest.mark.parametrize("exists", [True, False])
def test_a_file_that_may_not_be_written_is_refused(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening it decides: root may write to a file of any mode."""

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    if exists:
        (tmp_path / "file").touch()
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(argparse.ArgumentTypeError, match=r"cannot write .*file: Permission denied"):
        output_path(str(tmp_path / "file"))


@has_pipes
def test_a_pipe_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe", stat.S_IRUSR)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(argparse.ArgumentTypeError, match="pipe: Permission denied"):
        output_path(str(tmp_path / "pipe"))
