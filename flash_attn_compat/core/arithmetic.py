"""What is known of a GPU's arithmetic, by whoever found it out, for every backend that chooses a precision."""

from __future__ import annotations

import torch

# Indices of the GPUs that have no tensor cores: backends/fused times a loop of their instructions.
_without_tensor_cores: set[int] = set()


def note_tensor_cores(device: int, exist: bool) -> None:
    """Keep for this process whether GPU ``device`` has tensor cores."""
    (_without_tensor_cores.discard if exist else _without_tensor_cores.add)(device)


def lacks_tensor_cores(device: torch.device) -> bool:
    """Whether ``device`` is known to have none: products in fp32 are several times as fast there as in fp16."""
    return bool(_without_tensor_cores) and device.index in _without_tensor_cores
