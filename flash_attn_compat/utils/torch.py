"""torch.amp's decorators for autograd Functions, bound to this machine's device type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def custom_fwd(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """`torch.amp.custom_fwd` for "cuda" where there is CUDA, else for "cpu"; with or without arguments."""
    decorated: Callable[..., Any] = torch.amp.custom_fwd(*args, device_type=_device_type(), **kwargs)
    return decorated


def custom_bwd(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """`torch.amp.custom_bwd` for "cuda" where there is CUDA, else for "cpu"; with or without arguments."""
    decorated: Callable[..., Any] = torch.amp.custom_bwd(*args, device_type=_device_type(), **kwargs)
    return decorated


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
