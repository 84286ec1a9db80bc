"""A process that ends right after a backward on a GPU waits until autograd's thread has let go of it.

PyTorch wakes the caller of a backward before the device's thread has dropped its task, and with it Python's objects.
Where Python is ending by then, it ends that thread within C++, and the process aborts: "terminate called without an
active exception". So it is with every autograd.Function, up to Python 3.13.
"""

from __future__ import annotations

import atexit
import contextlib

import torch
from torch import Tensor

_CPU = -1  # its backward runs in the caller's thread
_seen = {_CPU}


def wait_for_autograd(tensor: Tensor) -> None:
    """At this process's end, for the thread that runs backwards on the tensor's device."""
    index = tensor.get_device()
    if index not in _seen:
        _seen.add(index)
        atexit.register(_pass_through_its_thread, tensor.device)


def _pass_through_its_thread(device: torch.device) -> None:
    """The thread takes one task after the other: with this one it has dropped all earlier ones.

    torch.autograd.backward would give the task an object of Python's; the engine alone gives it none. No kernel runs.
    """
    with contextlib.suppress(Exception):  # a GPU that has failed, a fork without such threads
        nothing, gradient = (torch.empty(0, dtype=torch.float32, device=device) for _ in range(2))
        nothing.requires_grad_()
        torch.autograd.Variable._execution_engine.run_backward(
            (nothing,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
