"""torch.func transforms and forward-mode derivatives of a custom operator: an error.

PyTorch knows neither of operators written in Python: a transform would fail in PyTorch's words, a tangent would be lost
without any. A graph holds the operator for good, so it is here that compiled, traced and exported calls meet both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad

from flash_attn_compat.core.torch_state import is_fake_mode_on, transforms_are_on
from flash_attn_compat.dispatch.observers import have_tangents

# Whether a graph was traced within a dual level. It may enter one by itself, which forward_ad does not hear of.
_graphs_hold_levels = False

# More specific than Autograd, which torch.library.custom_op takes for itself.
_AUTOGRAD = [f"Autograd{device}" for device in ("CPU", "CUDA", "XPU", "MPS", "HPU", "XLA", "Meta", "PrivateUse1")]


def refuse_derivatives(operator: Any, refuse: Callable[..., NoReturn]) -> None:
    """Let ``refuse`` raise where a transform of torch.func or a tangent meets ``operator``."""
    as_registered = make_autograd_impl(operator._opoverload, operator)

    def autograd(keyset: Any, *arguments: Any, **named: Any) -> Any:
        if _is_recorded(arguments) or _have_tangents(arguments):
            return refuse(*arguments, **named)
        return as_registered(keyset, *arguments, **named)

    for key in _AUTOGRAD:
        operator._lib.impl(operator._name, autograd, key, with_keyset=True)
    operator._lib.impl(operator._name, refuse, "FuncTorchBatched")


def _is_recorded(arguments: tuple[object, ...]) -> bool:
    """Whether a transform of torch.func records what is computed of them, as torch.func.grad does."""
    recording = transforms_are_on() and torch.is_grad_enabled()
    return recording and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def _have_tangents(arguments: tuple[object, ...]) -> bool:
    """As have_tangents, at no cost where no dual level can be open: looking takes as long as a small operator."""
    global _graphs_hold_levels  # noqa: PLW0603
    if forward_ad._current_level >= 0:
        _graphs_hold_levels = _graphs_hold_levels or is_fake_mode_on()
    elif not _graphs_hold_levels:
        return False
    return have_tangents(arguments)
