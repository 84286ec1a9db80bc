"""Whether a GPU has tensor cores. With capability 7.5, GeForce GTX 16, T600 and T1000 have none; only timing shows it.

For each GPU model a loop of tensor-core instructions is timed, in GPU cycles and so independent of the clock rate. The
fastest of several launches decides, because other processes may use the GPU at the same time. All processes use the
first stored figure, until `tune` measures again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from flash_attn_compat import settings
from flash_attn_compat.backends.fused import cache, faults, launcher, nvrtc, tuned, variants
from flash_attn_compat.backends.fused.variants import Variant
from flash_attn_compat.core import arithmetic, cuda_capture
from flash_attn_compat.core.features import Feature, Traits

_TURING = (7, 5)
# Cycles of a tensor-core product: 8 or 16 with tensor cores, 32 and more without.
_MAX_CYCLES = 24.0
_BLOCKS, _LAUNCHES = 8, 5
_OVER_CACHE = Feature.SEQUSED_K | Feature.APPEND | Feature.PAGED
VARIANT = Variant("tensor_cores", "tensor_cores.cu", (("TYPE", variants.FP16),), 1, 256, 0)


def has_tensor_cores(device: int) -> bool:
    """Whether the GPU has tensor cores; True if that cannot be measured, or not now. May launch and wait."""
    if nvrtc.real_capability(device) != _TURING or cuda_capture.is_capturing(device):
        return True
    if settings.value_of(settings.FUSED) == "0" and cache.read(_file_name(device)) is None:
        return True
    result = _measure_once(nvrtc.device_name(device), device)
    arithmetic.note_tensor_cores(device, result)
    return result


def stored_result(device: int) -> bool | None:
    """Return the stored answer of ``has_tensor_cores``, or None if there is none. Launches nothing."""
    if nvrtc.real_capability(device) != _TURING:
        return True
    return None if cache.read(_file_name(device)) is None else has_tensor_cores(device)


def remeasure(device: int) -> bool:
    """Return ``has_tensor_cores``; where only timing shows it, measures now and replaces the stored figure."""
    if nvrtc.real_capability(device) == _TURING:
        cache.write(_file_name(device), f"{_measure_in_thread(device):.1f}".encode())
        _measure_once.cache_clear()
    return has_tensor_cores(device)


def estimate_times(traits: Traits) -> Mapping[str, float] | None:
    """Return relative times by backend name for untuned calls on a GPU without tensor cores; None for all other calls.

    PyTorch's half-precision kernels need tensor cores, as ours do; chunked multiplies in fp32 there. Steps over a cache
    get no estimate: fused reads the cache in place.
    """
    is_forced = settings.is_on(settings.FUSED)
    if traits.capability != _TURING or traits.gpu is None or is_forced or traits.features & _OVER_CACHE:
        return None
    indices = range(torch.cuda.device_count()) or (-1,)
    device = next((index for index in indices if nvrtc.device_name(index) == traits.gpu), None)
    if device is None or has_tensor_cores(device):
        return None
    warn_if_missing(device, traits.gpu)
    return {"chunked": 1.0, "fused": 4.0, "torch_efficient": 4.0, "sdpa": 4.0}


def warn_if_missing(device: int, gpu: str | None) -> None:
    """Warn once if the GPU has no tensor cores and no tuning result: the usual order of backends may be wrong there."""
    if gpu is not None and not has_tensor_cores(device) and tuned.find_card(gpu) is None:
        _warn(gpu)


@functools.cache
def _warn(gpu: str) -> None:
    warnings.warn(
        f"{gpu} has no tensor cores, which half precision needs to be fast: use float32 there if you can. Calls in "
        "half precision go to the backend chunked, which multiplies in fp32, until `flash-attn-compat tune` has timed "
        "all backends on this GPU",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _measure_once(name: str, device: int) -> bool:
    file = _file_name(device)
    try:
        figure = cache.read(file)
        if figure is None:
            figure = cache.write_if_absent(file, f"{_measure_in_thread(device):.1f}".encode())
        return float(figure) <= _MAX_CYCLES
    except nvrtc.ContextLost:
        raise
    except Exception:  # noqa: BLE001  a failed measurement must not fail the user's call
        return True


def _file_name(device: int) -> str:
    return cache.make_name("tensor-cores", nvrtc.device_name(device))


def _measure_in_thread(device: int) -> float:
    """Measure in a new thread, without the caller's modes. Raises KernelError if a measurement has ended a process."""
    reason = faults.decline_reason(_file_name(device))
    if reason is not None:
        raise nvrtc.KernelError(reason)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure_cycles, device).result()


def measure_cycles(device: int) -> float:
    """Return the cycles of one tensor-core product in a quarter of a multiprocessor. Waits for the GPU."""
    place, driver = torch.device("cuda", device) if device >= 0 else torch.device("cpu"), nvrtc.driver()
    with faults.watch_trial(_file_name(device), VARIANT.entry, lambda: driver.sticky_error(device)):
        launches = [torch.empty(_BLOCKS, dtype=torch.float32, device=place) for _ in range(_LAUNCHES)]
        for numbers in launches:
            launcher.launch_without_inputs(VARIANT, _BLOCKS, numbers)
    return min(float(numbers.min()) for numbers in launches)
