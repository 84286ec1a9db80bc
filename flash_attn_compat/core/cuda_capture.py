"""Whether work is being captured to a CUDA graph, in which nothing may wait for the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

# A tenth of torch.cuda.current_device's time; builds without CUDA have neither.
current_device: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", lambda: None)


def is_capturing(device: int) -> bool:
    """Whether what is launched on GPU ``device`` now goes into a graph, whichever is current; -1 is the CPU: never."""
    if device >= 0 and device == current_device():
        captures: bool = torch._C._cuda_isCurrentStreamCapturing()
        return captures
    if device < 0 or not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
