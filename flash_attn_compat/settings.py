"""Environment variables that steer the package, read at the call they steer. docs/environment.md lists them."""

from __future__ import annotations

import functools
import os

import torch


def forced_backend() -> str | None:
    """FLASH_ATTN_COMPAT_BACKEND: the only backend allowed to serve."""
    return os.environ.get("FLASH_ATTN_COMPAT_BACKEND") or None


def compilation_enabled() -> bool:
    """FLASH_ATTN_COMPAT_COMPILE=1: allow torch.compile inside backends."""
    return os.environ.get("FLASH_ATTN_COMPAT_COMPILE", "0") not in ("", "0")


def official_disabled() -> bool:
    """FLASH_ATTN_COMPAT_DISABLE_OFFICIAL=1: leave an installed flash-attn aside."""
    return os.environ.get("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL", "0") not in ("", "0")


def bf16_precision() -> str:
    """FLASH_ATTN_COMPAT_BF16: how GPUs without bf16 units compute bf16 calls, "fp16" or "fp32"."""
    return os.environ.get("FLASH_ATTN_COMPAT_BF16") or "fp16"


def capability(device: torch.device) -> tuple[int, int]:
    """The CUDA compute capability dispatch goes by: FLASH_ATTN_COMPAT_CAPABILITY (such as 7.5) or the GPU's own."""
    forced = os.environ.get("FLASH_ATTN_COMPAT_CAPABILITY")
    return _parse_capability(forced) if forced else _device_capability(device)


@functools.lru_cache(maxsize=None)
def _device_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.lru_cache(maxsize=None)
def _parse_capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and (minor or "0").isdigit()):
        raise ValueError(f"FLASH_ATTN_COMPAT_CAPABILITY must look like 7.5, got {text!r}")
    return int(major), int(minor or 0)


def dispatch_switches() -> tuple[bool, bool, str]:
    """The variables that change which backend can serve, besides the forced one."""
    return compilation_enabled(), official_disabled(), bf16_precision()
