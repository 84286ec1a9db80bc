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

_DOUBTFUL = (7, 5)
# Cycles of a product: 8 or 16 with tensor cores, 32 and more without.
_MOST = 24.0
_BLOCKS, _LAUNCHES = 8, 5
_OVER_CACHE = Feature.SEQUSED_K | Feature.APPEND | Feature.PAGED
VARIANT = Variant("tensor_cores", "tensor_cores.cu", (("TYPE", variants.FP16),), 1, 256, 0)


def exist(device: int) -> bool:
    """True too where it cannot be found out, or not now."""
    if nvrtc.own_capability(device) != _DOUBTFUL:
        return True
    if cuda_capture.is_capturing(device):
        return True
    if settings.fused() is False and cache.read(_file(device)) is None:  # nothing of ours is to be launched
        return True
    found = _exist(nvrtc.device_name(device), device)
    arithmetic.note_tensor_cores(device, found)
    return found


def known(device: int) -> bool | None:
    """As ``exist``, of what is kept already: nothing is launched. None where nothing is."""
    if nvrtc.own_capability(device) != _DOUBTFUL:
        return True
    return None if cache.read(_file(device)) is None else exist(device)


def measure_again(device: int) -> bool:
    """``exist``, measured now where only time tells; the new figure replaces the one that was kept."""
    if nvrtc.own_capability(device) == _DOUBTFUL:
        cache.write(_file(device), f"{_cycles_apart(device):.1f}".encode())
        _exist.cache_clear()
    return exist(device)


def assumed_times(traits: Traits) -> Mapping[str, float] | None:
    """For calls that nobody timed on a GPU without tensor cores: how long each backend takes, in no unit.

    PyTorch's kernels for halves are written for tensor cores as ours are; chunked multiplies in fp32 there. Steps over
    a cache are not guessed at: `fused` reads the cache where it lies.
    """
    if traits.capability != _DOUBTFUL or traits.gpu is None or settings.fused() or traits.features & _OVER_CACHE:
        return None
    indices = range(torch.cuda.device_count()) or (-1,)
    device = next((index for index in indices if nvrtc.device_name(index) == traits.gpu), None)
    if device is None or exist(device):
        return None
    warn_where_missing(device, traits.gpu)
    return {"chunked": 1.0, "fused": 4.0, "torch_efficient": 4.0, "sdpa": 4.0}


def warn_where_missing(device: int, gpu: str | None) -> None:
    """Once, where a GPU without them was not tuned: who is the fastest there does not follow from others."""
    if gpu is not None and not exist(device) and tuned.of(gpu) is None:
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
def _exist(name: str, device: int) -> bool:
    file = _file(device)
    try:
        kept = cache.read(file)
        if kept is None:
            kept = cache.keep_first(file, f"{_cycles_apart(device):.1f}".encode())
        return float(kept) <= _MOST
    except nvrtc.ContextLost:
        raise
    except Exception:  # noqa: BLE001  no user's call fails for this
        return True


def _file(device: int) -> str:
    return cache.name_of("tensor-cores", nvrtc.device_name(device))


def _cycles_apart(device: int) -> float:
    """By a thread of its own, under none of the caller's modes. Raises KernelError where this has ended a process."""
    refused = faults.reason_against(_file(device))
    if refused is not None:
        raise nvrtc.KernelError(refused)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(cycles, device).result()


def cycles(device: int) -> float:
    """Of one product of the tensor cores, in a quarter of a multiprocessor; waits for the GPU."""
    place, driver = torch.device("cuda", device) if device >= 0 else torch.device("cpu"), nvrtc.driver()
    with faults.watched(_file(device), VARIANT.entry, lambda: driver.broken(device)):
        launches = [torch.empty(_BLOCKS, dtype=torch.float32, device=place) for _ in range(_LAUNCHES)]
        for numbers in launches:
            launcher.run_alone(VARIANT, _BLOCKS, numbers)
    return min(float(numbers.min()) for numbers in launches)
