"""Workspaces, one for each CUDA stream: memory for partial results of blocks that share a tile, and counters."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.core import cuda_capture

# A workspace starts with counters, one for each tile with splits. Partial results of splits begin at PARTS_OFFSET.
COUNTERS = 1024
PARTS_OFFSET = 4 * COUNTERS
# By device, stream and thread. The thread matters only for the per-thread default stream, handle 2 in every thread.
_workspaces: dict[tuple[int, int, int], Tensor] = {}
# Before PyTorch 2.8 other threads, too, allocate from a memory pool that the caller has opened.
_POOLS_ARE_PER_THREAD = hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")
_kept: list[Tensor] = []  # workspaces of captured graphs, which hold addresses and keep no tensors alive


def acquire(size: int, device: int, place: torch.device) -> Tensor:
    """Return a workspace of at least ``size`` bytes for a launch with splits; its counters are 0 between launches.

    Launches on one stream run in order and share a workspace. A captured launch gets its own, because a graph may be
    replayed on any stream, unless the caller has promised an order (cuda_capture.replayed_in_order).
    """
    stream = nvrtc.stream(device)
    key = device, stream, threading.get_ident() if stream == 2 else 0
    workspace = _workspaces.get(key)
    if cuda_capture.is_capturing(device):
        shared = _keep_for_replays(workspace, size)
        return _allocate_cleared(size, place) if shared is None else shared
    if workspace is None or workspace.numel() < size:
        workspace = _allocate_in_thread(size, device, place)
        if device < 0 or _POOLS_ARE_PER_THREAD or not _is_in_pool(workspace):
            _workspaces[key] = workspace
    return workspace


def _keep_for_replays(workspace: Tensor | None, size: int) -> Tensor | None:
    """Return a stream's workspace for a captured launch, kept alive for replays; None if the launch needs its own."""
    if not cuda_capture.are_replayed_in_order() or workspace is None or workspace.numel() < size:
        return None
    if not any(workspace is kept for kept in _kept):
        _kept.append(workspace)
    return workspace


def _allocate_in_thread(size: int, device: int, place: torch.device) -> Tensor:
    """Allocate in a new thread, outside of the caller's modes and memory pools, since the workspace outlives these."""
    stream = torch.cuda.current_stream(place) if device >= 0 else None

    def make() -> Tensor:
        with torch.cuda.stream(stream):
            return _allocate_cleared(size, place)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


def _allocate_cleared(size: int, place: torch.device) -> Tensor:
    workspace = torch.empty(size, dtype=torch.uint8, device=place)
    workspace[:PARTS_OFFSET].zero_()
    return workspace


def _is_in_pool(memory: Tensor) -> bool:
    """Whether the tensor lies in a memory pool that the caller or a compiler has opened."""
    start = memory.data_ptr()
    return any(
        one["address"] <= start < one["address"] + one["total_size"] and tuple(one["segment_pool_id"]) != (0, 0)
        for one in torch.cuda.memory_snapshot()
    )


def discard() -> None:
    """Discard all workspaces: a defective kernel may have left nonzero counters."""
    _workspaces.clear()
