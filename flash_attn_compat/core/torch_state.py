"""The caller's state that would change what plain operators compute, above all autocast, and contexts without it.

Default dtype and default device are not here: every tensor that this package makes names its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

# The name of what torch.nn.attention.activate_flash_attention_impl put in the place of PyTorch's own flash kernels.
flash_implementation: Callable[[], str | None] = getattr(
    torch.nn.attention, "current_flash_attention_impl", lambda: None
)

# Looked up once: every call asks. How many modes look on; jit.trace's state or None; whether torch.func transforms.
count_modes, tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
transforms_are_on = torch._C._are_functorch_transforms_active
_is_any_on = torch._C._is_any_autocast_enabled
_is_wrapped, _is_batched = torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.is_batchedtensor
_unwrapped, _mode_of = torch._C._functorch.get_unwrapped, torch._C._get_dispatch_mode
_MODES = torch._C._TorchDispatchModeKey


def numbers_of(lengths: Tensor) -> list[int]:
    """The values of integers, wherever they are."""
    if transforms_are_on():  # in which tolist() fails before PyTorch 2.5
        return [int(number.item()) for number in lengths.cpu()]
    found: list[int] = lengths.tolist()
    return found


def with_autograd() -> contextlib.AbstractContextManager[None]:
    """Let autograd see operators again inside a custom operator, where compiled graphs hide them from it."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        hidden = hidden.remove(getattr(torch._C.DispatchKey, key))
    seen = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(seen, hidden)


def is_fake_mode_on() -> bool:
    return _mode_of(_MODES.FAKE) is not None


def is_hidden(tensor: Tensor) -> bool:
    """Whether nobody can read a tensor's numbers: it is fake, is traced, or has another axis under vmap."""
    if tracing_state() is not None or is_fake_mode_on() or _mode_of(_MODES.PROXY) is not None:
        return True
    while _is_wrapped(tensor):
        if _is_batched(tensor):
            return True
        tensor = _unwrapped(tensor)
    return tensor.is_meta or type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def autocasts(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for operators on a tensor's device: it would round the products of what is wider."""
    if (tensor.is_cuda or tensor.is_cpu) and not _is_any_on():
        return False  # by far the fastest way to know, for device types that it has always asked
    return _autocasts_on(tensor.device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast is off for this kind of device."""
    return torch.autocast(device.type, enabled=False) if _autocasts_on(device.type) else contextlib.nullcontext()


@contextlib.contextmanager
def set_aside(device: torch.device) -> Iterator[None]:
    """No autocast, gradients or inference mode: for what is computed once and decides about later calls."""
    with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
        yield


def _autocasts_on(device_type: str) -> bool:
    return _knows_autocast(device_type) and torch.is_autocast_enabled(device_type)


@functools.cache
def _knows_autocast(device_type: str) -> bool:
    try:
        torch.is_autocast_enabled(device_type)
    except RuntimeError:
        return False
    return True


def _note_each(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _note_all() -> Callable[[Sequence[Tensor]], None]:
    """PyTorch's own where it takes several tensors, those of inference mode among them."""
    try:
        with torch.inference_mode():
            torch._C._increment_version((torch.empty(0, dtype=torch.float32, device="cpu"),))
    except (AttributeError, RuntimeError, TypeError):
        return _note_each
    return torch._C._increment_version


# Tells autograd, as PyTorch's own operators do, that tensors of the caller's were written in place.
note_written = _note_all()
