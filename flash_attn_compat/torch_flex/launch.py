"""The only file of torch_flex that runs kernels. It caches how calls of equal shapes and functions run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from flash_attn_compat.backends.base import KernelsFailed
from flash_attn_compat.backends.fused import flex, small_blocks
from flash_attn_compat.backends.fused.flex import FlexInputs, FlexUpstream
from flash_attn_compat.dispatch import call_cache
from flash_attn_compat.torch_flex.functions import Functions

KERNELS, PYTORCH = "fused", "pytorch"
_MOST = 2048
_runs: dict[Any, Any] = {}


def find_forward(functions: Functions, inputs: FlexInputs, scale: float) -> flex.FlexRun | str:
    """Return the function that computes a forward, or the reason to decline it. ValueError: block lists do not fit."""
    found: flex.FlexRun | str
    found = _find(functions, inputs, scale, None, lambda: small_blocks.prepare(functions.mods, inputs, scale))
    return found


def find_backward(
    functions: Functions, inputs: FlexInputs, scale: float, upstream: FlexUpstream
) -> flex.FlexBackwardRun | str:
    """Return the function that computes a backward, or the reason to decline it. Raises as ``find_forward``."""
    prepare = lambda: small_blocks.prepare_backward(functions.mods, inputs, scale, upstream)  # noqa: E731
    found: flex.FlexBackwardRun | str = _find(functions, inputs, scale, upstream, prepare)
    return found


def find_reason(functions: Functions, inputs: FlexInputs, backward: bool) -> str | None:
    """Return the kernels' reason to decline calls like this one, or None. Compiles the kernels; inputs may be fake."""
    reason = small_blocks.decline_reason(functions.mods, inputs, backward)
    return reason or _try(lambda: small_blocks.load(functions.mods, inputs, backward))


def _find(
    functions: Functions, inputs: FlexInputs, scale: float, upstream: FlexUpstream | None, prepare: Callable[[], Any]
) -> Any:
    blocks = inputs.blocks
    lists: tuple[Any, ...] = () if blocks is None else (*blocks.of_rows, *(blocks.of_keys or ()))
    key = (
        functions.mods, scale, inputs.numbers, blocks and blocks[:2],
        call_cache.tensor_signatures((*inputs[:3], *(upstream or ()))),
        # Without alignment: kernels read single elements of these.
        tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.is_neg()) for x in (*inputs.captured, *lists)]),
        call_cache.context_key(inputs.q),
    )  # fmt: skip
    found = _runs.get(key)
    if found is None:
        found = small_blocks.decline_reason(functions.mods, inputs, upstream is not None) or _try(prepare)
        call_cache.keep(_runs, key, found, _MOST)
    return found


def _try(prepare: Callable[[], Any]) -> Any:
    """Return prepare()'s result. If our kernels fail, warn the user and return the reason instead."""
    try:
        return prepare()
    except KernelsFailed as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"our kernels for flex_attention failed, and PyTorch's serve: {line}", RuntimeWarning, stacklevel=6
        )
        return f"the kernels failed: {line}"
