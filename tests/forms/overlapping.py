"""Patterns of strides, views that overlap themselves and layouts that do not, and backends that serve CPU tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import use_backend
from flash_attn_compat.core.overlap import overlaps_itself
from tests.answers import others_kernels
from tests.forms.support import GENERAL, close, randn
from tests.kernels import fused_on_cpu

# Strides of sequences, rows, heads and channels; 8 is the number of channels, so that rows may touch.
STEPS = (0, 1, 3, 8)
PATTERNS = [*itertools.product(STEPS, STEPS, STEPS, (1, 0, 2))]
WITH_CHANNELS = [pattern for pattern in PATTERNS if pattern[3] == 1]
DTYPES = torch.float32, torch.float16, torch.float64, torch.bfloat16
HALVES = torch.float16, torch.bfloat16
Answers = list[Tensor]
Serve = Callable[[str], Any]  # from a backend to a block in which it serves


def serving(backend: str, patch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Return a block in which a backend serves CPU tensors, emulated or by a stand-in that lies in ``folder``."""
    if backend == "fused":
        fused_on_cpu.emulate(patch)
    elif backend not in GENERAL:
        others_kernels.install(patch, backend, folder)
    return use_backend(backend)


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return normal numbers, seen through these strides."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return randn(extent, seed=seed, dtype=dtype).as_strided(shape, strides)


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def check_equal(found: Answers, expected: Answers) -> None:
    """Assert that answers differ by roundings at most, and that no answer overlaps itself."""
    for got, right in zip(found, expected, strict=True):
        close(got, right, right[right.isfinite()].abs().max(), epsilons=4)
        assert not overlaps_itself(got)


ORDINARY: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.empty(3, 5, 2, 8),
    "heads first": lambda: torch.empty(3, 2, 5, 8).transpose(1, 2),
    "every axis permuted": lambda: torch.empty(8, 2, 5, 3).permute(3, 2, 1, 0),
    "slices of every axis": lambda: torch.empty(9, 9, 9, 32)[1:7:2, 2:8, ::3, 3:30:3],
    "part of a packed qkv": lambda: torch.empty(3, 5, 3, 2, 8)[:, :, 1],
    "keys beside values, NHD": lambda: torch.empty(7, 2, 16, 2, 8)[:, 0],
    "keys beside values, HND": lambda: torch.empty(7, 2, 16, 16).transpose(1, 2)[..., 8:],
    "keys and values by turns": lambda: torch.empty(7, 16, 2, 8, 2)[..., 1],
    "pages of every second block": lambda: torch.empty(14, 16, 2, 8)[::2],
    "batch last": lambda: torch.empty(5, 2, 8, 3).permute(3, 0, 1, 2),
    "a single row of a broadcast batch": lambda: torch.empty(1, 5, 2, 8).expand(4, 5, 2, 8)[:1],
    "one element an axis, any strides": lambda: torch.empty(8).as_strided((1, 1, 1, 8), (0, 1, 3, 1)),
    "no elements": lambda: torch.empty(0).as_strided((3, 0, 2, 8), (0, 1, 1, 1)),
    "steps that mesh": lambda: torch.empty(99).as_strided((2, 3, 1, 1), (5, 2, 0, 0)),
    "steps that mesh over channels": lambda: torch.empty(99).as_strided((2, 3, 8), (40, 16, 1)),
    "steps that mesh over channels in a cache": lambda: torch.empty(99).as_strided((1, 2, 3, 8), (0, 40, 16, 1)),
    "more memory than there is": lambda: torch.empty(2**20, 2**20, 2**10, 128, device="meta").transpose(0, 2),
}  # fmt: skip

OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "a broadcast batch": lambda x: x[:1].expand_as(x),
    "broadcast rows": lambda x: x[:, :1].expand_as(x),
    "broadcast heads": lambda x: x[:, :, :1].expand_as(x),
    "sliding windows of rows": lambda x: x.as_strided(x.shape, (x.stride(1), *x.stride()[1:])),
    "rows that overlap by a channel": lambda x: x.as_strided(x.shape, (*[s - 1 for s in x.stride()[:3]], 1)),
    "equal strides": lambda x: x.as_strided(x.shape, (200, 1, 16, 1)),
    "strides without order": lambda x: x.as_strided(x.shape, (30, 10, 15, 1)),
}  # fmt: skip
