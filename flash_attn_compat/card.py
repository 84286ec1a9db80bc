"""A GPU's limits for commands that measure: memory, speed, and whether a display's timer ends long kernels."""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Callable
from typing import NamedTuple

import torch

import flash_attn_compat
from flash_attn_compat.backends.fused.building import nvrtc

# The share of a GPU's memory that may be used. Beyond it, Windows' drivers (also under WSL) use host memory silently.
MEMORY_SHARE = 0.9
# The longest time of one launch, in seconds: where the driver ends kernels after two seconds, and elsewhere.
_UNDER_TIMER, _OTHERWISE = 0.5, 2.0
_EXEC_TIMEOUT = 17  # CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT
_BATCH, _SEQLEN, _HEADS, _HEAD_DIM = 4, 1024, 8, 64


class Limits(NamedTuple):
    """The largest problem to run: bytes of memory, and floating-point operations of one launch."""

    memory: float
    flops_of_launch: float


NO_LIMITS = Limits(math.inf, math.inf)


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Cap this process's memory on ``device``, time a small call there, and return the limits for problems."""
    if device.type != "cuda":
        return NO_LIMITS
    seconds = _UNDER_TIMER if has_timer(device) else _OTHERWISE
    return Limits(cap_memory(device), seconds * _speed(device, dtype))


def cap_memory(device: torch.device) -> float:
    """Make PyTorch raise beyond MEMORY_SHARE of the device's memory; return the share in bytes."""
    if device.type != "cuda":
        return math.inf
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE, index)
    return MEMORY_SHARE * float(torch.cuda.get_device_properties(index).total_memory)


def has_timer(device: torch.device) -> bool:
    """Whether the driver ends a kernel after some seconds because the GPU drives a display."""
    if torch.version.hip is not None:
        return False
    if "microsoft" in platform.release().lower():  # WSL: its driver does not report Windows' timer
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        return bool(nvrtc.driver().attribute(index, _EXEC_TIMEOUT))
    except nvrtc.KernelError:  # no usable driver
        return False


def count_flops(nheads: int, head_dim: int, visible: float, training: bool) -> float:
    """Return the floating-point operations of a call's largest launch.

    The forward kernel computes two matrix products over the visible scores, the kernel for dk and dv in training four.

    visible: the number of scores of one head that the mask leaves
    """
    return 2.0 * (4 if training else 2) * nheads * head_dim * visible


def _speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return floating-point operations per second, of our kernels or of the chosen backend, whichever is slower."""
    shape = _BATCH, _SEQLEN, _HEADS, _HEAD_DIM
    q = torch.randn(shape, dtype=dtype, device=device)

    def attend() -> object:
        return flash_attn_compat.flash_attn_func(q, q, q)

    def fused() -> object:
        with flash_attn_compat.use_backend("fused"):
            return attend()

    slowest = _seconds(attend)
    with contextlib.suppress(flash_attn_compat.BackendNotSupported):
        slowest = max(slowest, _seconds(fused))
    return count_flops(_HEADS, _HEAD_DIM, float(_BATCH * _SEQLEN**2), False) / slowest


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of three runs, measured by CUDA events."""
    run()
    times: list[float] = []
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return max(min(times), 1e-6)
