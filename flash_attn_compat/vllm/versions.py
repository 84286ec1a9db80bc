"""The differences between releases of vLLM, and the check that this vLLM has the interface that backend.py extends."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

# The first and the last release of vLLM that the tests cover.
FIRST, LAST = (0, 26), (0, 33)
# Models for which vLLM keeps TRITON_ATTN. Their layers need ALiBi over square roots, or chunks that look back. vLLM
# mentions neither when it asks a backend whether it serves a layer, so our plugin goes by the model's name.
NEED_TRITON = frozenset({"Step1ForCausalLM", "Rnj1ForCausalLM"})

_IMPL = ("self", "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype")
_FORWARD = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale")
_BUILDER = ("self", "kv_cache_spec", "layer_names", "vllm_config", "device")
_BUILD = ("self", "common_prefix_len", "common_attn_metadata", "fast_build")
_WRITE = ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale")
_BATCH = frozenset({
    "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
    "max_seq_len", "block_table_tensor", "slot_mapping", "causal",
})  # fmt: skip


def decline_reason(version: str, accepts_any: bool = False) -> str | None:
    """Return the reason not to extend this vLLM, or None.

    version: of vLLM; accepts_any: also accept releases that the tests do not cover, if their interface fits
    """
    found = _parse(version)
    if not accepts_any and (found is None or not FIRST <= found <= LAST):
        return f"vLLM {version} is unknown, known are {_join(FIRST)} to {_join(LAST)}"
    try:
        difference = _interface_difference()
    except (ImportError, AttributeError, TypeError) as error:
        difference = f"{type(error).__name__}: {error}"
    return None if difference is None else f"vLLM {version} has another interface: {difference}"


def _parse(version: str) -> tuple[int, int] | None:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _join(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _interface_difference() -> str | None:
    """Return the first difference from the interface that backend.py was written for, or None."""
    from vllm.v1.attention import backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    expected: tuple[tuple[str, Callable[..., Any], tuple[str, ...]], ...] = (
        ("AttentionImpl", backend.AttentionImpl.__init__, _IMPL),
        ("AttentionImpl.forward", backend.AttentionImpl.forward, _FORWARD),
        ("AttentionMetadataBuilder", backend.AttentionMetadataBuilder.__init__, _BUILDER),
        ("AttentionMetadataBuilder.build", backend.AttentionMetadataBuilder.build, _BUILD),
        ("reshape_and_cache_flash", _writer(), _WRITE),
        ("register_backend", register_backend, ("backend", "class_path")),
    )
    for name, function, names in expected:
        found = tuple(inspect.signature(function).parameters)
        if found[: len(names)] != names:
            return f"{name} takes {', '.join(found)}"
    missing = _BATCH - {field.name for field in dataclasses.fields(backend.CommonAttentionMetadata)}
    if missing:
        return f"CommonAttentionMetadata lacks {', '.join(sorted(missing))}"
    _ = AttentionBackendEnum.CUSTOM, backend.AttentionCGSupport.UNIFORM_BATCH, backend.AttentionBackend.supports_sink
    return None


def _writer() -> Callable[..., None]:
    from vllm._custom_ops import reshape_and_cache_flash

    write: Callable[..., None] = reshape_and_cache_flash
    return write


def write_keys(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, dtype: str, layer: Any
) -> None:
    """Write keys and values to their slots by vLLM's own kernel, which its wheel holds for Turing too.

    key, value: (at least tokens, heads, head_dim); k_cache, v_cache: (pages, page size, heads, head_dim)
    slots: (tokens,), where each token goes: page * page size + slot in the page
    """
    _writer()(key, value, k_cache, v_cache, slots, dtype, layer._k_scale, layer._v_scale)


class CacheShape:
    """The shape of the KV cache and the order of its axes in memory: up to vLLM 0.28, a backend must define both.

    Later releases use the same shape, and any order unless a backend asks for one.
    """

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        if block_size % 16:
            raise ValueError(f"the page size must be a multiple of 16, got {block_size}")
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        layout = get_kv_cache_layout()
        if layout not in ("NHD", "HND"):
            raise ValueError(f"unknown layout {layout} of the KV cache: NHD and HND are known")
        if include_num_layers_dimension:  # an axis of layers in front; pages stay outermost
            return (1, 0, 3, 2, 4) if layout == "NHD" else (1, 2, 0, 3, 4)
        return (0, 2, 1, 3) if layout == "NHD" else (0, 1, 2, 3)
