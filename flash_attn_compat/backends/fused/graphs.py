"""Workspaces of launches that a CUDA graph captures, where the caller promises an order of replays."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from torch import Tensor

_in_order: contextvars.ContextVar[bool] = contextvars.ContextVar("flash_attn_compat_graphs_in_order", default=False)
_kept: list[Tensor] = []  # a graph holds addresses, not tensors


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


def share(workspace: Tensor | None, size: int) -> Tensor | None:
    """Return the stream's workspace for a captured launch, kept alive from now on; None where it needs its own."""
    if not _in_order.get() or workspace is None or workspace.numel() < size:
        return None
    if not any(workspace is kept for kept in _kept):
        _kept.append(workspace)
    return workspace
