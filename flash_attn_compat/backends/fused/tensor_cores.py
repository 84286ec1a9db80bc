"""Whether a GPU has tensor cores. Of capability 7.5, GeForce GTX 16, T600 and T1000 have none, and only time tells.

A bare loop of their instructions is timed for each GPU model, in cycles of the GPU, so that no clock rate counts. The
fastest of several launches decides, for other processes may use the GPU meanwhile. The first figure that is kept is
everybody's, until `tune` measures again.
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

_AMBIGUOUS_CAPABILITY = (7, 5)
# Cycles of a product: 8 or 16 with tensor cores, 32 and more without.
_MAX_CYCLES = 24.0
_BLOCKS, _LAUNCHES = 8, 5
_OVER_CACHE = Feature.SEQUSED_K | Feature.APPEND | Feature.PAGED
VARIANT = Variant("tensor_cores", "tensor_cores.cu", (("TYPE", variants.FP16),), 1, 256, 0)


def has_tensor_cores(device: int) -> bool:
    """True too where it cannot be found out, or not now."""
    if nvrtc.real_capability(device) != _AMBIGUOUS_CAPABILITY:
        return True
    if cuda_capture.is_capturing(device):
        return True
    if settings.fused() is False and cache.read(_file_name(device)) is None:  # nothing of ours is to be launched
        return True
    found = _measure_once(nvrtc.device_name(device), device)
    arithmetic.note_tensor_cores(device, found)
    return found


def stored_result(device: int) -> bool | None:
    """As ``exist``, of what is kept already: nothing is launched. None where nothing is."""
    if nvrtc.real_capability(device) != _AMBIGUOUS_CAPABILITY:
        return True
    return None if cache.read(_file_name(device)) is None else has_tensor_cores(device)


def remeasure(device: int) -> bool:
    """``exist``, measured now where only time tells; the new figure replaces the one that was kept."""
    if nvrtc.real_capability(device) == _AMBIGUOUS_CAPABILITY:
        cache.write(_file_name(device), f"{_measure_in_thread(device):.1f}".encode())
        _measure_once.cache_clear()
    return has_tensor_cores(device)


def estimate_times(traits: Traits) -> Mapping[str, float] | None:
    """For calls that nobody timed on a GPU without tensor cores: how long each backend takes, in no unit.

    PyTorch's kernels for halves are written for tensor cores as ours are; chunked multiplies in fp32 there. Steps over
    a cache are not guessed at: `fused` reads the cache where it lies.
    """
    if (
        traits.capability != _AMBIGUOUS_CAPABILITY
        or traits.gpu is None
        or settings.fused()
        or traits.features & _OVER_CACHE
    ):
        return None
    indices = range(torch.cuda.device_count()) or (-1,)
    device = next((index for index in indices if nvrtc.device_name(index) == traits.gpu), None)
    if device is None or has_tensor_cores(device):
        return None
    warn_if_missing(device, traits.gpu)
    return {"chunked": 1.0, "fused": 4.0, "torch_efficient": 4.0, "sdpa": 4.0}


def warn_if_missing(device: int, gpu: str | None) -> None:
    """Once, where a GPU without them was not tuned: who is the fastest there does not follow from others."""
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
        kept = cache.read(file)
        if kept is None:
            kept = cache.write_if_absent(file, f"{_measure_in_thread(device):.1f}".encode())
        return float(kept) <= _MAX_CYCLES
    except nvrtc.ContextLost:
        raise
    except Exception:  # noqa: BLE001  no user's call fails for this
        return True


def _file_name(device: int) -> str:
    return cache.make_name("tensor-cores", nvrtc.device_name(device))


def _measure_in_thread(device: int) -> float:
    """By a thread of its own, under none of the caller's modes. Raises KernelError where this has ended a process."""
    refused = faults.decline_reason(_file_name(device))
    if refused is not None:
        raise nvrtc.KernelError(refused)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure_cycles, device).result()


def measure_cycles(device: int) -> float:
    """Of one product of the tensor cores, in a quarter of a multiprocessor; waits for the GPU."""
    place, driver = torch.device("cuda", device) if device >= 0 else torch.device("cpu"), nvrtc.driver()
    with faults.watch_trial(_file_name(device), VARIANT.entry, lambda: driver.sticky_error(device)):
        launches = [torch.empty(_BLOCKS, dtype=torch.float32, device=place) for _ in range(_LAUNCHES)]
        for numbers in launches:
            launcher.launch_without_inputs(VARIANT, _BLOCKS, numbers)
    return min(float(numbers.min()) for numbers in launches)
