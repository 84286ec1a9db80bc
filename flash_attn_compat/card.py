"""What commands that measure must know of a GPU: its memory, its speed, and whether a display's timer ends kernels."""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Callable
from typing import NamedTuple

import torch

import flash_attn_compat
from flash_attn_compat.backends.fused import nvrtc

# Of a GPU's memory: a driver of Windows, also below WSL, moves what lies beyond into the host's instead of raising.
MEMORY_SHARE = 0.9
# Seconds that one launch may take: where a timer ends it after two, and where it only takes the user's time.
_UNDER_TIMER, _OTHERWISE = 0.5, 2.0
_EXEC_TIMEOUT = 17  # CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT
_BATCH, _SEQLEN, _HEADS, _HEAD_DIM = 4, 1024, 8, 64


class Limits(NamedTuple):
    """How much a problem may ask for: bytes of memory, and floating-point operations of one launch."""

    memory: float
    flops_of_launch: float


NO_LIMITS = Limits(math.inf, math.inf)


def measure(device: torch.device, dtype: torch.dtype) -> Limits:
    """Cap this process's memory on ``device``, time a small call there, and return what problems may ask for."""
    if device.type != "cuda":
        return NO_LIMITS
    seconds = _UNDER_TIMER if has_timer(device) else _OTHERWISE
    return Limits(cap_memory(device), seconds * _speed(device, dtype))


def cap_memory(device: torch.device) -> float:
    """Let PyTorch raise where this process would take more than MEMORY_SHARE; returns that in bytes."""
    if device.type != "cuda":
        return math.inf
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE, index)
    return MEMORY_SHARE * float(torch.cuda.get_device_properties(index).total_memory)


def has_timer(device: torch.device) -> bool:
    """Whether a kernel of some seconds is ended, since a display waits for it."""
    if torch.version.hip is not None:
        return False
    if "microsoft" in platform.release().lower():  # WSL, whose driver does not know of Windows' timer
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        return bool(nvrtc.driver().attribute(index, _EXEC_TIMEOUT))
    except nvrtc.KernelError:  # no driver that can be asked
        return False


def flops(nheads: int, head_dim: int, visible: float, training: bool) -> float:
    """Of the largest launch: a forward has two products of the ``visible`` scores, dkdv four."""
    return 2.0 * (4 if training else 2) * nheads * head_dim * visible


def _speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations in a second, of our kernels or whatever serves instead: the slower of the two."""
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
    return flops(_HEADS, _HEAD_DIM, float(_BATCH * _SEQLEN**2), False) / slowest


def _seconds(run: Callable[[], object]) -> float:
    """The fastest of three, by the GPU's clock."""
    run()
    found: list[float] = []
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1e3)
    return max(min(found), 1e-6)
