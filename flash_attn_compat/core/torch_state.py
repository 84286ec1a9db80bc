"""PyTorch's state around a call (autocast, modes, tracing, transforms): how to read it, and how to compute without it.

It also holds two states for torch_sdpa/ and torch_flex/: DECIDED, a flag per thread, and a tag in the keys of PyTorch's
stored graphs.

PyTorch's default dtype and device need no care: this package names dtype and device for every tensor that it makes.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

# Returns the name that torch.nn.attention.activate_flash_attention_impl was given; None for PyTorch's own kernels.
flash_implementation: Callable[[], str | None] = getattr(
    torch.nn.attention, "current_flash_attention_impl", lambda: None
)

# Looked up once, since every call uses them: the number of active dispatch modes; whether torch.jit.trace records;
# whether a torch.func transform is active.
count_modes, is_jit_traced = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
transforms_are_on = torch._C._are_functorch_transforms_active
is_any_autocast_on = torch._C._is_any_autocast_enabled  # for CPU, CUDA or some other devices
_is_wrapped, _is_batched = torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.is_batchedtensor
_unwrapped, _mode_of = torch._C._functorch.get_unwrapped, torch._C._get_dispatch_mode
_MODES = torch._C._TorchDispatchModeKey


def numbers_of(lengths: Tensor) -> list[int]:
    """Return the values of a tensor of integers; waits for its GPU."""
    if transforms_are_on():  # before PyTorch 2.5 tolist() fails under torch.func transforms
        return [int(number.item()) for number in lengths.cpu()]
    found: list[int] = lengths.tolist()
    return found


def with_autograd() -> contextlib.AbstractContextManager[None]:
    """Return a context in which autograd records inside a custom operator, where compiled graphs turn it off."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    # Without ADInplaceOrView, autograd would not see a write into a slice as a write to the whole tensor.
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        hidden = hidden.remove(getattr(torch._C.DispatchKey, key))
    seen = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(seen, hidden)


def is_traced() -> bool:
    """Whether operators go into a graph: of torch.compile, torch.export, make_fx or torch.jit.trace."""
    return is_compiling() or is_jit_traced() or _mode_of(_MODES.PROXY) is not None


def is_hidden(tensor: Tensor) -> bool:
    """Whether a tensor's numbers cannot be read: it is fake, traced, or batched by vmap."""
    if is_traced() or _mode_of(_MODES.FAKE) is not None:
        return True
    while _is_wrapped(tensor):
        if _is_batched(tensor):
            return True
        tensor = _unwrapped(tensor)
    return tensor.is_meta or type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def autocasts(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for a tensor's device: it would round fp32 products to half precision."""
    return _autocasts_on(tensor.device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast is off for this device type."""
    return torch.autocast(device.type, enabled=False) if _autocasts_on(device.type) else contextlib.nullcontext()


@contextlib.contextmanager
def set_aside(device: torch.device) -> Iterator[None]:
    """Return a context without autocast, gradients and inference mode, so that the caller's affect no self-test."""
    with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
        yield


def _autocasts_on(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _note_each(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _note_all() -> Callable[[Sequence[Tensor]], None]:
    """Return PyTorch's increment_version if it takes lists with inference tensors, else a loop over tensors."""
    try:
        with torch.inference_mode():
            torch._C._increment_version((torch.empty(0, dtype=torch.float32, device="cpu"),))
    except (AttributeError, RuntimeError, TypeError):
        return _note_each
    return torch._C._increment_version


# Tells autograd, as PyTorch's own operators do, that the caller's tensors were written in place.
note_written = _note_all()


class _Decided(threading.local):
    yet = False


# DECIDED.yet: whether this thread is inside a call whose backend is chosen. PyTorch's attention operators, even if
# torch_sdpa/ has replaced them, then run PyTorch's own kernels.
DECIDED = _Decided()


def as_decided(compute: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return compute(*arguments, **named); meanwhile PyTorch's attention operators run PyTorch's own kernels."""
    before, DECIDED.yet = DECIDED.yet, True
    try:
        return compute(*arguments, **named)
    finally:
        DECIDED.yet = before


def mark_caches(name: str, state: str | None) -> None:
    """Put the state of the switch ``name`` into the keys of PyTorch's on-disk caches of graphs, for this thread.

    state: None removes it. No effect before PyTorch 2.7, which stored no such graphs on disk.
    """
    config: Any = getattr(torch.compiler, "config", None)
    tag = getattr(config, "cache_key_tag", None)
    if not isinstance(tag, str):
        return
    mark = "" if state is None else f"|flash_attn_compat.{name}={state}"
    new_tag = re.sub(rf"\|flash_attn_compat\.{name}=[^|]*", "", tag) + mark
    if tag != new_tag:
        config.cache_key_tag = new_tag
