"""The clock and power of a GPU while it is timed, with stand-ins for NVML."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flash_attn_compat.gpu_state import GpuState, Monitor, summarize

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
