"""The function under "flash_attention_2" in transformers' registry: ours on request, else its own with a warning.

transformers 5.23 unpads the rows of a cross attention by the mask of the keys, so padded batches of encoder-decoders
are wrong with any flash-attn. Imports no torch before transformers has.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flash_attn_compat.dropin.hub_kernels import is_hub_name
from flash_attn_compat.dropin.undo import set_item, when_imported

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "flash_attention_2"
MODELING_UTILS = "transformers.modeling_utils"
_REMEDY = (
    "Use flash_attn_compat.patch(transformers=True), or attn_implementation='fa2_compat' after "
    "flash_attn_compat.register_with_transformers()"
)


def serve(undo: ExitStack) -> None:
    """Compute attn_implementation="flash_attention_2" by register_with_transformers' function until `undo` closes.

    transformers is imported already or later. Before 4.53 it has no such registry, and a warning says so.
    """
    when_imported({MODELING_UTILS: _serve}, undo)


def warn_of_padded_cross_attention(module: ModuleType, undo: ExitStack) -> None:
    """Let transformers' own function, in the registry of `module`, warn once where it unpads rows by the keys' mask."""
    registry = _registry(module)
    if NAME in registry:
        set_item(registry, NAME, _with_warning(registry[NAME]), undo)


def _registry(module: ModuleType) -> dict[str, Any]:
    registry: dict[str, Any] = getattr(getattr(module, "AttentionInterface", None), "_global_mapping", {})
    return registry


def _serve(module: ModuleType, undo: ExitStack) -> None:
    registry = _registry(module)
    if NAME not in registry:
        version = getattr(sys.modules.get("transformers"), "__version__", "")
        warnings.warn(
            f"transformers {version} lacks the registry of attention functions of 4.53 and later: {NAME} stays its own",
            stacklevel=2,
        )
        return
    served = _with_paged_caches_left(registry[NAME])
    for name in [name for name in registry if name == NAME or is_hub_name(name)]:
        set_item(registry, name, served, undo)


def _with_paged_caches_left(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return our attention function, but with ``original`` for the paged caches of continuous batching.

    original: the attention function of transformers, which knows such caches
    """
    from flash_attn_compat.dropin.attention_function import attention

    @functools.wraps(attention)
    def flash_attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if type(kwargs.get("cache")).__name__ == "PagedAttentionCache":
            return original(module, query, key, value, attention_mask, **kwargs)
        return attention(module, query, key, value, attention_mask, **kwargs)

    return flash_attention_forward


def _with_warning(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def flash_attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if attention_mask is not None and not torch.compiler.is_compiling():
            is_causal = kwargs.get("is_causal")
            if is_causal is None:
                is_causal = getattr(module, "is_causal", True)
            if not is_causal and _unpads_rows_by_the_keys(module, query.shape[2], key.shape[2]):
                warn_once(type(module).__name__)
        try:
            return original(module, query, key, value, attention_mask, **kwargs)
        except StopIteration as error:
            raise RuntimeError(
                f"transformers' {NAME} cannot compute {type(module).__name__} in fp32: it learns the dtype from an "
                f"nn.Linear within, and there is none. {_REMEDY}, or load the model in fp16 or bf16"
            ) from error

    return flash_attention_forward


def _unpads_rows_by_the_keys(module: nn.Module, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether transformers, given a mask of the keys, would drop query rows of this bidirectional layer by it."""
    if seqlen_q == 1:
        return False
    is_cross_attention = "cross" in type(module).__name__.lower() or getattr(module, "is_decoder", False)
    return is_cross_attention or seqlen_q != seqlen_k


@functools.cache
def warn_once(layer: str) -> None:
    """Warn of wrong results of a layer, once for each class of layers in a process."""
    warnings.warn(
        f"{layer} is wrong under transformers' {NAME} for padded batches, with any flash-attn: transformers drops the "
        f"decoder's rows where the encoder's mask has padding. {_REMEDY}",
        stacklevel=3,
    )
