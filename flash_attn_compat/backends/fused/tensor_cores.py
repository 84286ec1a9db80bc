"""Whether a GPU has tensor cores. Of capability 7.5, GeForce GTX 16, T600 and T1000 have none, and only time tells.

A bare loop of their instructions is timed once for each GPU model, in cycles of the GPU, so that no clock rate and no
other process counts. The first figure that is kept is everybody's.
"""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from flash_attn_compat.backends.fused import cache, launcher, loader, variants, verdicts
from flash_attn_compat.backends.fused.variants import Variant
from flash_attn_compat.engine import capture

_DOUBTFUL = (7, 5)
# Cycles of a product: 8 or 16 with tensor cores, 32 and more without.
_MOST = 24.0
_BLOCKS = 8
VARIANT = Variant("tensor_cores", "tensor_cores.cu", (("TYPE", variants.FP16),), 1, 256, 0)


def exist(device: int) -> bool:
    """True too where it cannot be found out, or not now."""
    if loader.own_capability(device) != _DOUBTFUL:
        return True
    return capture.is_capturing(device) or _exist(loader.device_name(device), device)


def warn_where_missing(device: int, gpu: str | None) -> None:
    """Once, where a GPU without them was not tuned: who is the fastest there does not follow from others."""
    if gpu is not None and not exist(device) and verdicts.of(gpu) is None:
        _warn(gpu)


@functools.cache
def _warn(gpu: str) -> None:
    warnings.warn(
        f"{gpu} has no tensor cores, which our kernels are written for. Run `flash-attn-compat tune` once: it finds "
        "out which backend is the fastest here, and calls go to that one from then on",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _exist(name: str, device: int) -> bool:
    file = cache.name_of("tensor-cores", name)
    try:
        kept = cache.read(file)
        if kept is None:
            with ThreadPoolExecutor(1) as pool:  # under none of the caller's modes
                kept = cache.keep_first(file, f"{pool.submit(cycles, device).result():.1f}".encode())
        return float(kept) <= _MOST
    except Exception:  # noqa: BLE001  no user's call fails for this
        return True


def cycles(device: int) -> float:
    """Of one product of the tensor cores, in a quarter of a multiprocessor; waits for the GPU."""
    place = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    numbers = torch.empty(_BLOCKS, dtype=torch.float32, device=place)
    launcher.run_alone(VARIANT, _BLOCKS, numbers)
    return float(numbers.min())
