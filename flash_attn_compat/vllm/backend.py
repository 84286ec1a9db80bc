"""vLLM's attention backend on our kernels: the layers it supports, the metadata of a batch, one layer's attention.

vLLM's cache of a layer has the logical shape (pages, heads, page size, 2 * head_dim): each slot holds a key and its
value side by side. The kernels read both as views, through any strides, so NHD and HND need no copy.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from flash_attn_compat import settings
from flash_attn_compat.backends import BACKENDS
from flash_attn_compat.backends.fused import graphs, nvrtc
from flash_attn_compat.core import cuda_capture, sinks
from flash_attn_compat.core.call import Scalars
from flash_attn_compat.core.eight_bit import as_bytes
from flash_attn_compat.core.mask import MOST_TOKENS
from flash_attn_compat.dispatch.kvcache import attend_into
from flash_attn_compat.dispatch.raw import forward_into
from flash_attn_compat.vllm import versions

_FUSED = next(backend for backend in BACKENDS if backend.name == "fused")
_PAGE = 16  # the page size is a multiple
# vLLM's names of 8-bit caches, which have one scale for the keys of a layer and one for its values.
_EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
# From so many rows on, the longest query length of a batch is rounded up: fewer different calls are prepared.
_ROUNDED = 128
# A decode step, a few rows, and prefills of more; over more pages than kernels for short sequences serve.
_WARM_UP_ROWS, _WARM_UP_PAGES = (1, 8, 64, 512), 256


# ---- what is supported -----------------------------------------------------------------------------------------------


class CompatBackend(versions.CacheShape, AttentionBackend):
    """The layers that our kernels serve, in the words of vLLM's interface."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_EIGHT_BITS]
    forward_includes_kv_cache_update = False

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
        return [MultipleOf(_PAGE)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        most = _FUSED.capabilities.max_head_dim
        return head_size % 8 == 0 and 0 < head_size <= (most or head_size)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        lowest = _FUSED.capabilities.min_capability
        return lowest is None or (settings.forced_capability() or tuple(capability)) >= lowest

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # the decode steps of a batch are told from its prefills by the CPU's lengths

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **named: Any
    ) -> str | None:
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"a {kv_cache_dtype} cache of a {str(dtype).removeprefix('torch.')} model not supported"
        return _kernels_decline_reason()


def _kernels_decline_reason() -> str | None:
    """Return the reason why no kernels of ours run in this process; None where they do."""
    for reason in _FUSED.unavailable_reasons():
        return reason
    try:
        nvrtc.compiler()  # and not the driver: a process that forks later must not touch the GPU
    except nvrtc.KernelError as error:
        return f"no NVRTC to compile the kernels: {error}"
    return None


# ---- a batch ---------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Neighbouring sequences of a batch, computed by one call.

    rows: of the batch's tokens, None for all
    starts: where each sequence starts in them, and the last one's end; None where each sequence has one row
    longest: the most rows of a sequence; table, lengths: the pages and the keys of each sequence
    """

    rows: slice | None
    starts: Tensor | None
    longest: int
    table: Tensor
    lengths: Tensor


@dataclass
class CompatMetadata:
    """A batch: what vLLM's CommonAttentionMetadata says, and the calls that compute it.

    The first ``num_decodes`` sequences have few rows (a token, and drafts of it), the others any number.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool
    num_decodes: int
    num_decode_tokens: int
    parts: tuple[Part, ...]


class CompatMetadataBuilder(AttentionMetadataBuilder):
    """Builds the metadata of a batch, once for all layers of a group. Nothing waits for the GPU.

    In a captured graph of decode steps everything is read from vLLM's own tensors: rows by query_start_loc, lengths by
    seq_lens, pages by block_table. The host's numbers are bounds that hold for each replay.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(vllm_config.model_config, "rswa_window", None) is not None:
            raise NotImplementedError("reference sliding windows (rswa_window) are not supported: name another backend")
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if device.type == "cuda":  # or the first requests would wait for compilation
            layers = vllm_config.compilation_config.static_forward_context
            for impl in _different_impls(layers.get(name) for name in layer_names):
                impl.warm_up(vllm_config.model_config.dtype, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CompatMetadata:
        batch = common_attn_metadata
        if common_prefix_len:
            raise NotImplementedError(f"cascade attention was never asked for, got a prefix of {common_prefix_len}")
        if isinstance(batch.causal, Tensor):
            raise NotImplementedError("causal must be one bool for all sequences, got a tensor with one for each")
        decodes, tokens = _count_decodes(batch, self.reorder_batch_threshold or 1)
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
        return _with_parts(metadata, min(self.reorder_batch_threshold or 1, batch.max_query_len))

    def update_block_table(self, metadata: CompatMetadata, blk_table: Tensor, slot_mapping: Tensor) -> CompatMetadata:
        parts = [part._replace(table=table) for part, table in zip(metadata.parts, _split(blk_table, metadata))]
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping, parts=tuple(parts))


def _different_impls(layers: Iterable[Any]) -> list[CompatImpl]:
    """Return one attention of each kind that the layers have: kinds need different kernels."""
    impls = [impl for layer in layers if isinstance(impl := getattr(layer, "impl", None), CompatImpl)]
    return [*{impl.kind: impl for impl in impls}.values()]


def _count_decodes(batch: Any, threshold: int) -> tuple[int, int]:
    """Return the sequences in front that have at most ``threshold`` rows each, and their rows."""
    if batch.max_query_len <= threshold:
        return batch.num_reqs, batch.num_actual_tokens
    starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
    for sequence, (start, end) in enumerate(itertools.pairwise(starts)):
        if end - start > threshold:
            return sequence, start
    return batch.num_reqs, batch.num_actual_tokens


def _with_parts(batch: CompatMetadata, few: int) -> CompatMetadata:
    """Return the metadata with its calls: the decode steps, of at most ``few`` rows, apart from the prefills."""
    first, tokens = batch.num_decodes, batch.num_decode_tokens
    longest = batch.max_query_len
    if longest > _ROUNDED:
        longest = -(-longest // _ROUNDED) * _ROUNDED
    starts, tables, lengths = batch.query_start_loc, _split(batch.block_table, batch), _split(batch.seq_lens, batch)
    # Row i is sequence i's. A graph is padded with as many sequences as rows; they have no keys.
    has_one_row_each = few == 1 and tokens == first > 0
    if len(tables) == 1:  # padding behind the rows lies outside of all sequences
        return replace(batch, parts=(Part(None, None if has_one_row_each else starts, longest, *tables, *lengths),))
    decodes = Part(slice(0, tokens), None if has_one_row_each else starts[: first + 1], few, tables[0], lengths[0])
    prefills = Part(slice(tokens, None), starts[first:] - tokens, longest, tables[1], lengths[1])
    return replace(batch, parts=(decodes, prefills))


def _split(of_sequences: Tensor, batch: CompatMetadata) -> tuple[Tensor, ...]:
    """Return the share of each part of a tensor with a row for each sequence."""
    first = batch.num_decodes
    is_whole = first in (0, batch.seq_lens.shape[0])
    return (of_sequences,) if is_whole else (of_sequences[:first], of_sequences[first:])


# ---- a layer ---------------------------------------------------------------------------------------------------------


class CompatImpl(AttentionImpl):
    """The attention of one layer."""

    supports_dcp = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        unknown = sorted(name for name, value in others.items() if value not in (None, False, -1))
        if unknown:
            raise NotImplementedError(f"flash_attn_compat's backend does not support {', '.join(unknown)}")
        if kv_cache_dtype not in CompatBackend.supported_kv_cache_dtypes:
            known = ", ".join(CompatBackend.supported_kv_cache_dtypes)
            raise ValueError(f"kv_cache_dtype must be one of {known}, got {kv_cache_dtype}")
        if sinks is not None and (sinks.shape != (num_heads,) or alibi_slopes is not None):
            raise ValueError(f"sinks must be ({num_heads},), without ALiBi; got {tuple(sinks.shape)}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.cache_dtype = _EIGHT_BITS.get(kv_cache_dtype)  # None for a cache in the model's dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        )
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.sliding_window = -1 if sliding_window is None else sliding_window - 1
        self.sinks, self._fp32_sinks = sinks, None if sinks is None else sinks.float()

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that kernels are compiled for."""
        features = self.alibi_slopes is not None, self.logits_soft_cap > 0.0, self.sinks is not None
        shape = self.num_heads, self.num_kv_heads, self.head_size
        return *shape, self.sliding_window, self.attn_type, self.cache_dtype, *features

    def warm_up(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compile and self-test the kernels of decode steps and prefills, by calls over a cache of zeros."""
        if self.attn_type in _ENCODERS:
            return
        shape, one = (
            (1, self.num_kv_heads, _PAGE, 2 * self.head_size),
            torch.ones((), dtype=torch.float32, device=device),
        )
        cache = torch.zeros(shape, dtype=dtype if self.cache_dtype is None else torch.uint8, device=device)
        layer = SimpleNamespace(_k_scale=one, _v_scale=one)
        table = torch.zeros(1, _WARM_UP_PAGES, dtype=torch.int32, device=device)
        for rows in _WARM_UP_ROWS:
            starts, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, rows], [rows]))
            q = torch.zeros(rows, self.num_heads, self.head_size, dtype=dtype, device=device)
            batch = CompatMetadata(rows, rows, rows, starts, lengths, table, starts, self._is_causal, 1, rows, ())
            self.forward(layer, q, None, None, cache, _with_parts(batch, rows), torch.empty_like(q))

    @property
    def _is_causal(self) -> bool:
        return bool(self.attn_type == AttentionType.DECODER)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None:
            self._fp32_sinks = self.sinks.detach().float()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: CompatMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write attention of query (tokens, heads, head_dim) to output, of the same shape, and return it.

        key, value: of an encoder, (tokens, heads_k, head_dim); of a decoder they are in the cache already
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("a quantised output is not supported")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        q, out = (x if x.dim() == 3 else x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        with _surroundings(q):
            if self.attn_type in _ENCODERS:
                self._attend_among(q, key, value, out, attn_metadata)
                return output
            k, v = self._cache_views(kv_cache, q.dtype)
            descales = self._descales(layer)
            for rows, starts, longest, table, lengths in attn_metadata.parts:
                part_q, part_out = (q, out) if rows is None else (q[rows], out[rows])
                if starts is None:
                    self._attend_to_pages(part_out, part_q, k, v, lengths, table, *descales)
                    continue
                # The longest number of keys bounds nothing but windows: the table bounds the keys.
                tensors = part_q, k, v, self.alibi_slopes, starts, starts, lengths, None, table, *descales
                self._attend(part_out, tensors, attn_metadata.causal, longest, MOST_TOKENS)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values to their slots of the cache; vLLM calls this before ``forward``."""
        if self.attn_type not in _ENCODERS:
            k, v = map(as_bytes, self._cache_views(kv_cache, key.dtype))
            versions.write_keys(key, value, k, v, slot_mapping, self.kv_cache_dtype, layer)

    def _attend_among(self, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, batch: CompatMetadata) -> None:
        """An encoder's attention, among the tokens of each sequence."""
        if k is None or v is None:
            raise ValueError("an encoder's layer must get keys and values")
        starts, longest = batch.query_start_loc, batch.max_query_len
        self._attend(out, (q, k, v, self.alibi_slopes, starts, starts), False, longest, longest)

    def _attend(
        self, out: Tensor, tensors: tuple[Tensor | None, ...], causal: bool, longest_q: int, longest_k: int
    ) -> None:
        """Write one call's result to ``out``. Windows of rows that see later keys reach to both sides."""
        left, s_aux = self.sliding_window, self._fp32_sinks
        right = 0 if causal and left >= 0 else left
        scalars = Scalars(0.0, self.scale, causal, left, right, self.logits_soft_cap, False, longest_q, longest_k)
        lse = forward_into(out, tensors, scalars, return_lse=s_aux is not None)
        if s_aux is not None and lse is not None:
            sinks.absorb_in_place(out, lse, s_aux)

    def _attend_to_pages(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, *descales: Tensor | None
    ) -> None:
        """Write the attention of each sequence's only row, the last one, to ``out``."""
        left, s_aux, count = self.sliding_window, self._fp32_sinks, lengths.shape[0]
        if q.shape[0] != count:
            q, out = q[:count], out[:count]
        q, out = q.unsqueeze(1), out.unsqueeze(1)
        scalars = Scalars(0.0, self.scale, True, left, 0 if left >= 0 else -1, self.logits_soft_cap)
        lse = attend_into(out, q, k, v, self.alibi_slopes, lengths, table, scalars, s_aux is not None, *descales)
        if s_aux is not None and lse is not None:
            sinks.absorb_in_place(out, lse, s_aux)

    def _descales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the layer's scales of an 8-bit cache, (1, 1) fp32 each: kernels read them, so that graphs may too."""
        if self.cache_dtype is None or layer is None:
            return None, None
        k_scale, v_scale = layer._k_scale, layer._v_scale
        if k_scale.numel() != 1 or v_scale.numel() != 1:
            raise NotImplementedError(f"an 8-bit cache must have one scale, got {k_scale.numel()} for the keys")
        return k_scale.view(1, 1), v_scale.view(1, 1)

    def _cache_views(self, cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a cache, each (pages, page size, heads, head_dim). Raises ValueError."""
        shape, width = cache.shape, self.head_size
        if self.cache_dtype is not None:  # vLLM allocates bytes
            if cache.dtype is torch.uint8:
                cache = cache.view(self.cache_dtype)
            dtype = self.cache_dtype
        fits = len(shape) == 4 and shape[1] == self.num_kv_heads and shape[3] == 2 * width and shape[2] % _PAGE == 0
        if not fits or cache.dtype != dtype or cache.stride(3) != 1:
            raise ValueError(
                f"kv_cache must have shape (pages, {self.num_kv_heads}, page size, {2 * width}) with a page size that "
                f"is a multiple of {_PAGE}, dtype {dtype} and adjacent channels; got {tuple(shape)}, {cache.dtype}, "
                f"strides {cache.stride()}"
            )
        by_slot = cache.transpose(1, 2)
        return by_slot.narrow(3, 0, width), by_slot.narrow(3, width, width)  # in a fifth of split's time


_NONE = contextlib.nullcontext()


def _surroundings(q: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return the context of a call: which backends may serve, and how graphs are replayed.

    On GPUs from 8.0 on only our kernels serve: backends that go before them there wait for the GPU to read lengths.
    vLLM replays the graphs that it captures one after another.
    """
    if not q.is_cuda:
        return _NONE
    is_newer = settings.capability(q.device) >= (8, 0) and settings.forced_backend() is None
    is_captured = cuda_capture.is_capturing(q.get_device())
    if not (is_newer or is_captured):
        return _NONE
    found = contextlib.ExitStack()
    if is_newer:
        found.enter_context(settings.using_backend("fused"))
    if is_captured:
        found.enter_context(graphs.replayed_in_order())
    return found
