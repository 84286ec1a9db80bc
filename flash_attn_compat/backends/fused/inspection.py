"""What doctor says about the fused kernels on this machine."""

from __future__ import annotations

import torch

from flash_attn_compat.backends.fused import cache, loader, probe


def describe(device: torch.device, renew: bool = False) -> list[str]:
    """A line on what compiles and keeps the kernels, or why there are none, and then those of the probe.

    renew: time them again, where verdicts are wanted at all
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return ["none: they are for NVIDIA GPUs"]
    lacking = loader.why_not()
    if lacking is not None:
        return [f"none: {lacking}"]
    index = torch.cuda.current_device() if device.index is None else device.index
    nvrtc, driver = (".".join(map(str, version)) for version in (loader.compiler().version, loader.driver().version))
    made = f"for {loader.target(index).architecture} by NVRTC {nvrtc}, driver for CUDA {driver}"
    return [f"{made}, kept in {cache.folder()}", *probe.told(index, renew)]
