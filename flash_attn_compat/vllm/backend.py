"""vLLM's attention backend on our kernels: the layers it supports, and the metadata of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from flash_attn_compat import settings
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.vllm import versions
from flash_attn_compat.vllm.batch import CompatMetadata, count_decodes, split, with_parts
from flash_attn_compat.vllm.layer import CACHE_DTYPES, ENCODERS, FUSED, PAGE, CompatImpl


class CompatBackend(versions.CacheShape, AttentionBackend):
    """Tells vLLM, by the methods of its interface, which layers our kernels serve."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*CACHE_DTYPES]
    forward_includes_kv_cache_update = True  # for decode steps, one launch writes new keys and attends

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CompatImpl]:
        return CompatImpl

    @staticmethod
    def get_builder_cls() -> type[CompatMetadataBuilder]:
        return CompatMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(PAGE)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        most = FUSED.capabilities.max_head_dim
        return head_size % 8 == 0 and 0 < head_size <= (most or head_size)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        lowest = FUSED.capabilities.min_capability
        return lowest is None or (settings.forced_capability() or tuple(capability)) >= lowest

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # count_decodes needs the true lengths on the CPU

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **named: Any
    ) -> str | None:
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"a {kv_cache_dtype} cache of a {str(dtype).removeprefix('torch.')} model not supported"
        return _kernels_decline_reason()


def _kernels_decline_reason() -> str | None:
    """Return the reason why our kernels cannot run in this process, or None."""
    for reason in FUSED.unavailable_reasons():
        return reason
    try:
        nvrtc.compiler()  # not the driver, since a process that forks later must not use the GPU
    except nvrtc.KernelError as error:
        return f"no NVRTC to compile the kernels: {error}"
    return None


class CompatMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata of a batch, once for all layers of a group. The host never waits for the GPU.

    A CUDA graph of decode steps is replayed for later batches. So kernels read all that differs between batches from
    tensors that vLLM (query_start_loc, seq_lens, block_table) or the builder (``_before``) updates in place. Numbers
    that the host passes are upper bounds for every replay.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(vllm_config.model_config, "rswa_window", None) is not None:
            raise NotImplementedError("reference sliding windows (rswa_window) are not supported: name another backend")
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        # The sequences' lengths before the new keys. All batches share the tensor, since CUDA graphs read it in each
        # replay. Empty with speculative decoding, where nothing reads it: lengths change after the metadata was built.
        count = 0 if vllm_config.speculative_config else vllm_config.scheduler_config.max_num_seqs
        self._before = torch.empty(count, dtype=torch.int32, device=device)
        if device.type == "cuda":  # now, or the first requests would wait for compilation
            layers = vllm_config.compilation_config.static_forward_context
            for impls in _impls_by_kind(layers.get(name) for name in layer_names):
                appends = impls[0].warm_up(vllm_config.model_config.dtype, device)
                for impl in impls:
                    impl.appends_in_launch = appends

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CompatMetadata:
        batch = common_attn_metadata
        if common_prefix_len:
            raise NotImplementedError(f"cascade attention was never asked for, got a prefix of {common_prefix_len}")
        if isinstance(batch.causal, Tensor):
            raise NotImplementedError("causal must be one bool for all sequences, got a tensor with one for each")
        decodes, tokens = count_decodes(batch, self.reorder_batch_threshold or 1)
        metadata = CompatMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            causal=bool(batch.causal),
            num_decodes=decodes,
            num_decode_tokens=tokens,
            parts=(),
        )
        return self._with_before(with_parts(metadata, min(self.reorder_batch_threshold or 1, batch.max_query_len)))

    def _with_before(self, metadata: CompatMetadata) -> CompatMetadata:
        """Return the metadata, with the lengths before this step if every sequence has one new key."""
        part, count, slots = metadata.parts[0], metadata.seq_lens.shape[0], metadata.slot_mapping
        if len(metadata.parts) > 1 or part.starts is not None or count > min(len(self._before), len(slots)):
            return metadata
        before = torch.sub(metadata.seq_lens, 1, out=self._before[:count])
        before.masked_fill_(slots[:count] < 0, -1)  # sequences of padding or of a dummy run write no key
        return replace(metadata, parts=(part._replace(before=before),))

    def update_block_table(self, metadata: CompatMetadata, blk_table: Tensor, slot_mapping: Tensor) -> CompatMetadata:
        parts = [part._replace(table=table) for part, table in zip(metadata.parts, split(blk_table, metadata))]
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping, parts=tuple(parts))


def _impls_by_kind(layers: Iterable[Any]) -> list[list[CompatImpl]]:
    """Return the layers' CompatImpl grouped by ``kind``: each kind needs kernels of its own."""
    found: dict[tuple[Any, ...], list[CompatImpl]] = {}
    for layer in layers:
        if isinstance(impl := getattr(layer, "impl", None), CompatImpl):
            found.setdefault(impl.kind, []).append(impl)
    return [*found.values()]
