"""Whether work is being captured to a CUDA graph, in which nothing may wait for the GPU, and how it is replayed."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import torch

# A tenth of torch.cuda.current_device's time; builds without CUDA have neither.
current_device: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", lambda: None)
# Whether the caller promises an order of replays of the graphs that it captures.
_in_order: contextvars.ContextVar[bool] = contextvars.ContextVar("flash_attn_compat_graphs_in_order", default=False)
are_replayed_in_order = _in_order.get


def is_capturing(device: int) -> bool:
    """Whether what is launched on GPU ``device`` now goes into a graph, whichever is current; -1 is the CPU: never."""
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

    Their launches then share one workspace, and no launch has to clear one.
    """
    token = _in_order.set(True)
    try:
        yield
    finally:
        _in_order.reset(token)
