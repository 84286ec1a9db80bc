"""Which calls of flex_attention we serve: the policy that a program requested, and all reasons to decline a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.core.entry import PLAIN
from flash_attn_compat.dispatch import call_cache
from flash_attn_compat.torch_flex import functions, launch
from flash_attn_compat.torch_flex.calls import FlexCall

HALF = frozenset({torch.float16, torch.bfloat16})
# The least compute capability for our kernels, and the least for which PyTorch compiles Triton's kernels.
LEAST_CAPABILITY, OWN_CAPABILITY = (7, 5), (8, 0)
# Values of BACKEND in kernel_options with which PyTorch runs Triton's kernels: those are what ours replace.
_SERVED_BACKENDS = frozenset({"AUTO", "TRITON"})


class Policy(NamedTuple):
    """Which calls a program asked us to serve.

    device: the device type of the calls; always: also on GPUs for which PyTorch compiles Triton's kernels
    """

    device: str = "cuda"
    always: bool = False


def eager_reasons(policy: Policy, call: FlexCall) -> Iterator[str]:
    """Yield every reason to decline an eager call, except reasons of its two functions and of the kernels."""
    q, k, v = call[:3]
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        yield "q, k and v must be plain tensors"
    captured, device = call.captured, q.device
    if captured and any(isinstance(x, Tensor) and type(x) not in PLAIN for x in captured):
        yield "captured tensors must be plain tensors"
    yield from device_reasons(policy, device)
    yield from dtype_reasons(q.dtype, k.dtype, v.dtype)
    if not device == k.device == v.device:
        yield "devices differ"
    yield from option_reasons(call)
    if not functions.is_graph(call.score_mod) or not functions.is_graph(call.mask_mod):
        yield "PyTorch has not traced its functions (_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG)"


_by_device: dict[object, tuple[str, ...]] = {}


def device_reasons(policy: Policy, device: torch.device) -> tuple[str, ...]:
    """Return the reasons to decline that follow from the device and the settings; cached by both."""
    key = policy, device, settings.context(), None if settings.are_unset() else settings.values(), nvrtc.decline_reason
    found = _by_device.get(key)
    if found is None:
        found = tuple(_find_device_reasons(policy, device))
        call_cache.keep(_by_device, key, found, 64)
    return found


def _find_device_reasons(policy: Policy, device: torch.device) -> Iterator[str]:
    if device.type != policy.device:
        yield f"it is on {device.type}, not on {policy.device}"
        return
    if device.type == "cuda":
        capability = settings.capability(device)
        if capability < LEAST_CAPABILITY:
            yield f"our kernels need compute capability 7.5, and this GPU has {capability[0]}.{capability[1]}"
        if capability >= OWN_CAPABILITY and not policy.always:
            yield 'PyTorch compiles Triton\'s kernels for this GPU: flex="always" uses ours instead'
    if settings.value_of(settings.FUSED) == "0":
        yield f"{settings.FUSED}=0 forbids our kernels"
    if settings.forced_backend() not in (None, launch.KERNELS):
        yield f"the program names the backend {settings.forced_backend()}"
    reason = nvrtc.decline_reason()
    if reason is not None:
        yield reason


def dtype_reasons(q: torch.dtype, k: torch.dtype, v: torch.dtype) -> Iterator[str]:
    """Yield the reason to decline the dtypes of q, k and v, if there is one."""
    if not (q is k is v and q in HALF):
        names = ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in (q, k, v)))
        yield f"our kernels compute float16 and bfloat16 alone, not {names}"


def option_reasons(call: FlexCall) -> Iterator[str]:
    """Yield the reasons that follow from kernel_options and the scale."""
    backend = call.kernel_options.get("BACKEND", "AUTO")
    if backend not in _SERVED_BACKENDS:
        yield f"kernel_options ask for the backend {backend}"
    if call.kernel_options.get("OUTPUT_MAX"):
        yield "max_scores are asked for, which our kernels do not keep"
    if not isinstance(call.scale, (int, float)):
        yield f"its scale is a {type(call.scale).__name__}, which may change from call to call"


def gradient_reason(of_captured: bool) -> str | None:
    """Return the reason to leave a backward to PyTorch, or None. of_captured: whether captured tensors need gradients

    If a program asks for deterministic algorithms, PyTorch's eager backward adds up these gradients in a fixed order,
    and our kernels do not.
    """
    if of_captured and torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and our kernels add up gradients of captured tensors by atomics"
    return None
