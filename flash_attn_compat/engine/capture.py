"""Whether work is being captured to a CUDA graph, in which nothing may wait for the GPU."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether ``device``'s current stream is being captured, whichever device is current."""
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
