"""What doctor says about the fused kernels on this machine."""

from __future__ import annotations

import torch

from flash_attn_compat import settings
from flash_attn_compat.backends.fused import cache, loader, probe, variants


def describe(device: torch.device, renew: bool = False) -> list[str]:
    """A line on what compiles and keeps the kernels, or why there are none, and one for each speed that is known.

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
    return [f"{made}, kept in {cache.folder()}", *_speeds(index, renew)]


def _speeds(device: int, renew: bool) -> list[str]:
    if loader.capability(device) in probe.MEASURED:
        return ["the order of backends was measured on this GPU's kind"]
    if settings.forced_capability() is not None:
        return ["not timed while the capability is forced"]
    lines = []
    for head_dim in variants.HEAD_DIMS:
        for direction in probe.DIRECTIONS:
            verdict = probe.verdict(head_dim, direction, device, renew=True) if renew else None
            verdict = verdict or probe.known(head_dim, direction, device)
            if verdict is not None:
                serves = verdict.rival if verdict.is_slower else "fused"
                lines.append(
                    f"{direction} of head_dim {head_dim}: fused {verdict.fused:.3g} ms, {verdict.rival} "
                    f"{verdict.other:.3g} ms: {serves} serves"
                )
    return lines or ["not timed yet: that happens at the first call of each kind, or with doctor --renew"]
