"""The clock and the power of a GPU while calls are timed: a card at its power limit lowers its clock."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

NVML_HINT = "pip install nvidia-ml-py"


class GpuState(NamedTuple):
    """The SM clock in MHz and the power draw in watts."""

    clock_mhz: float
    power_w: float

    def __str__(self) -> str:
        return f"{self.clock_mhz:,.0f} MHz, {self.power_w:.0f} W"


class Monitor:
    """Readings of one GPU's clock and power. decline_reason: why NVML gives none, or no more; "" while it does"""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readings: list[GpuState] = []
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        self.decline_reason = "" if is_nvidia else "only NVIDIA GPUs have NVML"

    def read(self) -> None:
        """Add one reading. Call it right after a timed run: NVML reports the sample period that has just passed.

        An error ends the readings and becomes the decline reason, so no timing depends on NVML.
        """
        if self.decline_reason:
            return
        try:
            clock, milliwatts = torch.cuda.clock_rate(self.device), torch.cuda.power_draw(self.device)
        except ModuleNotFoundError as error:
            self.decline_reason = f"{error} ({NVML_HINT})"
        except Exception as error:  # noqa: BLE001  NVML has errors of its own, and some cards report no power
            self.decline_reason = f"{type(error).__name__}: {error}"
        else:
            self.readings.append(GpuState(float(clock), milliwatts / 1e3))

    def median(self, first: int = 0) -> GpuState | None:
        """Return the medians of the readings from number ``first`` on; None without one."""
        readings = self.readings[first:]
        return GpuState(*map(statistics.median, zip(*readings, strict=True))) if readings else None

    def summarize(self) -> str:
        """Return the lowest, median and highest clock and power, or why they are unknown."""
        return summarize(self.readings) or f"clock and power unknown: {self.decline_reason or 'nothing was timed'}"


def summarize(states: list[GpuState]) -> str:
    """Return one line with the median, lowest and highest clock and power; "" without states."""
    if not states:
        return ""
    clocks, powers = (sorted(values) for values in zip(*states, strict=True))
    return (
        f"clock {statistics.median(clocks):,.0f} MHz ({clocks[0]:,.0f} to {clocks[-1]:,.0f}), "
        f"power {statistics.median(powers):.0f} W ({powers[0]:.0f} to {powers[-1]:.0f})"
    )
