"""CUDA graphs: whether work is being captured, during which nothing may wait for the GPU, and the order of replays."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import torch

# Takes a tenth of the time of torch.cuda.current_device. Builds of PyTorch without CUDA lack it.
current_device: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", lambda: None)
# Whether the caller has promised, by replayed_in_order, to replay captured graphs one after another.
_in_order: contextvars.ContextVar[bool] = contextvars.ContextVar("flash_attn_compat_graphs_in_order", default=False)
are_replayed_in_order = _in_order.get


def is_capturing(device: int) -> bool:
    """Whether a launch on GPU ``device`` would go into a CUDA graph now, even if another GPU is current.

    device: -1 for the CPU, which never captures
    """
    if device >= 0 and device == current_device():
        captures: bool = torch._C._cuda_isCurrentStreamCapturing()
        return captures
    if device < 0 or not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def replayed_in_order() -> Iterator[None]:
    """Promise that graphs captured in this block on one stream are replayed one after another, never side by side.

    Launches in these graphs then share one workspace, and no launch has to clear it.
    """
    token = _in_order.set(True)
    try:
        yield
    finally:
        _in_order.reset(token)
