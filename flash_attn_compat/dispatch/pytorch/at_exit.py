"""Make a process that ends right after a backward on a GPU wait for autograd's thread, or it may abort.

PyTorch returns from a backward before the device's autograd thread has freed its task and the task's Python objects.
If Python is shutting down by then, it ends that thread inside C++, and the process aborts: "terminate called without an
active exception". Every autograd.Function can cause this, up to Python 3.13.
"""

from __future__ import annotations

import atexit
import contextlib

import torch
from torch import Tensor

_CPU = -1  # no need to wait: a CPU backward runs in the caller's thread
_seen = {_CPU}


def wait_for_autograd(tensor: Tensor) -> None:
    """Make this process wait, when it ends, for the autograd thread of the tensor's device."""
    index = tensor.get_device()
    if index not in _seen:
        _seen.add(index)
        atexit.register(_pass_through_its_thread, tensor.device)


def _pass_through_its_thread(device: torch.device) -> None:
    """Run an empty backward in the device's autograd thread, which has freed all earlier tasks once this one is done.

    It calls the engine directly: torch.autograd.backward would give this task a Python object, too. No kernel runs.
    """
    with contextlib.suppress(Exception):  # the GPU may have failed; a forked process has no such threads
        nothing, gradient = (torch.empty(0, dtype=torch.float32, device=device) for _ in range(2))
        nothing.requires_grad_()
        torch.autograd.Variable._execution_engine.run_backward(
            (nothing,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
