"""Who observes or differentiates a call: compilers, traces, dispatch modes, tensor classes, transforms and autograd.

Every call asks these functions before it converts or checks anything. The answers choose between a custom operator and
an eager call, and set Options.use of an eager call. The operators raise under transforms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from flash_attn_compat.core.entry import PLAIN
from flash_attn_compat.core.features import SLOPES_GRADIENT, Feature
from flash_attn_compat.core.torch_state import count_modes, is_jit_traced, is_traced, transforms_are_on
from flash_attn_compat.dispatch.pytorch import flops, sharding

BACKWARD, TRANSFORMS = int(Feature.BACKWARD), int(Feature.TRANSFORMS)
_WITH_SLOPES = BACKWARD | Feature.SHARED_DROPOUT_MASK | SLOPES_GRADIENT


def plain_use(inputs: tuple[Any, ...]) -> int | None:
    """Return Options.use of a call that nothing but autograd observes, as nearly all calls are; None for others.

    For the others, ``must_be_one_operator`` and ``recorded_use`` decide, in twice the time.
    """
    if is_dynamo_compiling() or count_modes() or is_jit_traced() or transforms_are_on():
        return None
    if forward_ad._current_level >= 0:
        return None
    use = 0
    for tensor in inputs:
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            return None
        if tensor.requires_grad:
            use = BACKWARD
    return use if use and torch.is_grad_enabled() else 0


def must_be_one_operator(tensors: tuple[Any, ...], has_derivatives: bool = True) -> bool:
    """Whether a call must be one operator: under torch.compile, torch.jit.trace or a dispatch mode, or on a subclass.

    Dispatch modes are fake tensors, selective checkpointing, counters and the like. A tensor subclass may have no
    memory that a kernel could read. Under torch.func transforms the call consists of plain operators instead.
    has_derivatives: whether plain operators can compute this call; if not, transforms raise
    """
    if is_dynamo_compiling():
        return True
    if not has_derivatives and (transforms_are_on() or forward_ad._current_level >= 0) and are_transformed(tensors):
        refuse_private()
    if count_modes() or is_jit_traced():
        return _are_seen(tensors)
    for tensor in tensors:
        if type(tensor) is not Tensor and type(tensor) not in PLAIN:
            return _are_seen(tensors)
    return False


def _are_seen(tensors: tuple[object, ...]) -> bool:
    """Whether a mode, a trace or a tensor's class intercepts operators. If none does, all tensors have memory."""
    if (transforms_are_on() or forward_ad._current_level >= 0) and are_transformed(tensors):
        return False
    if not are_strided(tensors):
        return False
    flops.register_if_needed()
    sharding.register_if_needed()
    return count_modes() > 0 or is_jit_traced() or any(map(_has_dispatch, tensors))


def are_strided(values: tuple[object, ...]) -> bool:
    """Whether no tensor is nested or sparse. The eager call raises a clear error for these, an operator would not."""
    return is_dynamo_compiling() or not any(
        [isinstance(x, Tensor) and (x.is_nested or x.layout != torch.strided) for x in values]
    )


def _has_dispatch(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def recorded_use(inputs: tuple[Tensor, ...], slopes: Tensor | None = None) -> int:
    """Return Options.use of a call that autograd, torch.func or forward-mode AD differentiates; 0 for others."""
    if (transforms_are_on() or forward_ad._current_level >= 0) and are_transformed((*inputs, slopes)):
        sharding.check_untransformed((*inputs, slopes))
        if is_traced():
            refuse_in_graphs()
        return TRANSFORMS
    if torch.is_grad_enabled():
        if slopes is not None and are_trained(slopes):
            # Another backend may compute the slopes' gradient, and must be able to draw the same dropout mask.
            return _WITH_SLOPES
        try:
            for tensor in inputs:
                if tensor.requires_grad:
                    return BACKWARD
        except AttributeError:  # an input is no tensor: a later check raises
            pass
    return 0


def are_trained(slopes: object) -> bool:
    """Whether autograd records and the ALiBi slopes require a gradient."""
    return isinstance(slopes, Tensor) and slopes.requires_grad and torch.is_grad_enabled()


def are_transformed(inputs: tuple[object, ...]) -> bool:
    """Whether a transform of torch.func or forward-mode AD differentiates the call, which no kernel can serve."""
    return transforms_are_on() or have_tangents(inputs)


def have_tangents(values: tuple[object, ...]) -> bool:
    """Whether a tensor has a forward-mode tangent, at level 0, the only one.

    forward_ad's current level would not tell: compiled graphs enter level 0 without setting it.
    """
    with torch._C._DisableTorchDispatch():  # so that no mode or trace records the look-up as an operator
        return any(
            isinstance(x, Tensor) and x.is_floating_point() and forward_ad.unpack_dual(x, level=0).tangent is not None
            for x in values
        )


# Dispatch keys that go before Autograd, which torch.library.custom_op uses itself.
_AUTOGRAD = [f"Autograd{device}" for device in ("CPU", "CUDA", "XPU", "MPS", "HPU", "XLA", "Meta", "PrivateUse1")]


def refuse_transforms(operator: Any, refuse: Callable[..., NoReturn]) -> None:
    """Make a custom operator call ``refuse``, which raises, under a torch.func transform or for a tangent.

    Otherwise PyTorch raises an unclear error under a transform, and drops a tangent without any error.
    """
    as_registered = make_autograd_impl(operator._opoverload, operator)

    def autograd(keyset: Any, *arguments: Any, **named: Any) -> Any:
        if forward_ad._current_level >= 0 and have_tangents(arguments):
            refuse()
        return as_registered(keyset, *arguments, **named)

    for key in _AUTOGRAD:
        operator._lib.impl(operator._name, autograd, key, with_keyset=True)
    operator._lib.impl(operator._name, refuse, "FuncTorchDynamicLayerFrontMode")


def refuse_in_graphs(*arguments: Any, **named: Any) -> NoReturn:
    """Raise RuntimeError for a transform of a public function's operator."""
    raise RuntimeError(
        "attention in a compiled, traced or exported graph, or under a dispatch mode, cannot be combined with "
        "torch.func transforms (vmap, grad, jvp, ...) or forward-mode derivatives: transform the function without "
        "compiling or tracing it. Autograd, with second derivatives, goes through graphs, too"
    )


def refuse_private(*arguments: Any, **named: Any) -> NoReturn:
    """Raise RuntimeError for a transform of a function that autograd does not record."""
    raise RuntimeError(
        "flash_attn_with_kvcache and the functions whose names begin with an underscore cannot be combined with "
        "forward-mode derivatives or torch.func transforms, since no autograd formula was registered for them: "
        "call flash_attn_func or another public function"
    )
