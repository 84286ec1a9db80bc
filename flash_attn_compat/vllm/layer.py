"""The attention of one layer in vLLM: over its KV cache, or in an encoder over the tokens themselves.

vLLM's cache of a layer has the logical shape (pages, heads, page size, 2 * head_dim): each slot holds a key and its
value side by side. The kernels read both as views, through any strides, so NHD and HND need no copy.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from flash_attn_compat import settings
from flash_attn_compat.backends import BACKENDS
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.core.eight_bit import as_bytes
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import CacheInputs, Options, PackedInputs
from flash_attn_compat.core.mask import MOST_TOKENS
from flash_attn_compat.dispatch import choice, sinks
from flash_attn_compat.dispatch.kvcache import attend_into
from flash_attn_compat.dispatch.raw import forward_into
from flash_attn_compat.vllm import versions
from flash_attn_compat.vllm.batch import CompatMetadata, with_parts

FUSED = next(backend for backend in BACKENDS if backend.name == "fused")
PAGE = 16  # page sizes must be multiples of it
# vLLM's names of 8-bit caches, which have one scale for the keys of a layer and one for its values.
EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
CACHE_DTYPES = ("auto", "float16", "bfloat16", *EIGHT_BITS)
_LSE = int(Feature.LSE)
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
# warm_up makes calls of so many rows: a decode step, a few rows, and two prefills. They have so many pages that the
# kernels for long sequences are chosen.
_WARM_UP_ROWS, _WARM_UP_PAGES = (1, 8, 64, 512), 256


class CompatImpl(AttentionImpl):
    """The attention of one layer: vLLM makes an instance for each layer and calls ``forward`` in each step."""

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
        if kv_cache_dtype not in CACHE_DTYPES:
            known = ", ".join(CACHE_DTYPES)
            raise ValueError(f"kv_cache_dtype must be one of {known}, got {kv_cache_dtype}")
        if sinks is not None and (sinks.shape != (num_heads,) or alibi_slopes is not None):
            raise ValueError(f"sinks must be ({num_heads},), without ALiBi; got {tuple(sinks.shape)}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.cache_dtype = EIGHT_BITS.get(kv_cache_dtype)  # None for a cache in the model's dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        )
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.sliding_window = -1 if sliding_window is None else sliding_window - 1
        self.sinks, self._fp32_sinks = sinks, None if sinks is None else sinks.float()
        self.appends_in_launch = False  # warm_up's answer is stored here; False until then

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties of the layer for which kernels are compiled: equal kinds share kernels."""
        features = self.alibi_slopes is not None, self.logits_soft_cap > 0.0, self.sinks is not None
        shape = self.num_heads, self.num_kv_heads, self.head_size
        return *shape, self.sliding_window, self.attn_type, self.cache_dtype, self._writes_keys, *features

    def warm_up(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Compile and self-test the kernels of decode steps and prefills, by calls over a cache of zeros.

        Returns whether our kernels serve decode steps in which one launch writes the new keys and attends.
        """
        if self.attn_type in ENCODERS:
            return False
        shape, one = (
            (1, self.num_kv_heads, PAGE, 2 * self.head_size),
            torch.ones((), dtype=torch.float32, device=device),
        )
        cache = torch.zeros(shape, dtype=dtype if self.cache_dtype is None else torch.uint8, device=device)
        layer = SimpleNamespace(_k_scale=one, _v_scale=one)
        table = torch.zeros(1, _WARM_UP_PAGES, dtype=torch.int32, device=device)
        for rows in _WARM_UP_ROWS:
            starts, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, rows], [rows]))
            q = torch.zeros(rows, self.num_heads, self.head_size, dtype=dtype, device=device)
            batch = CompatMetadata(rows, rows, rows, starts, lengths, table, starts, self._is_causal, 1, rows, ())
            self.forward(layer, q, None, None, cache, with_parts(batch, rows), torch.empty_like(q))
        if not self._writes_keys or self.attn_type != AttentionType.DECODER:
            return False
        served = choice.served[FUSED.name]
        q, k = (
            torch.zeros(1, heads, self.head_size, dtype=dtype, device=device)
            for heads in (self.num_heads, self.num_kv_heads)
        )
        before, descales = torch.zeros(1, dtype=torch.int32, device=device), self._descales(layer)
        with _surroundings(q):
            views = self._cache_views(cache, dtype)
            self._attend_to_pages(torch.empty_like(q), q, *views, before, table, *descales, k, k)
        return choice.served[FUSED.name] > served

    @property
    def _writes_keys(self) -> bool:
        """Whether the layer has a cache, and no other layer writes it."""
        return self.attn_type not in ENCODERS and self.kv_sharing_target_layer_name is None

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

        key, value: (tokens, heads_k, head_dim); first written to their slots of the cache, except in encoders
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("a quantised output is not supported")
        if attn_metadata is None:  # a dummy run, in which vLLM measures memory
            return output.fill_(0)
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        q, out = (x if x.dim() == 3 else x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        with _surroundings(q):
            if self.attn_type in ENCODERS:
                self._attend_among(q, key, value, out, attn_metadata)
                return output
            k, v = self._cache_views(kv_cache, q.dtype)
            descales = self._descales(layer)
            if key is not None and value is not None and self._writes_keys:
                first = attn_metadata.parts[0]
                if first.before is not None and self.appends_in_launch:
                    self._attend_to_pages(out, q, k, v, first.before, first.table, *descales, key, value)
                    return output
                self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            for rows, starts, longest, table, lengths, _ in attn_metadata.parts:
                part_q, part_out = (q, out) if rows is None else (q[rows], out[rows])
                if starts is None:
                    self._attend_to_pages(part_out, part_q, k, v, lengths, table, *descales)
                    continue
                # MOST_TOKENS is no real bound. The page table bounds the keys; this argument could only bound windows.
                x = PackedInputs(part_q, k, v, self.alibi_slopes, starts, starts, lengths, None, table, *descales)
                self._attend(part_out, x, attn_metadata.causal, longest, MOST_TOKENS)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values to their slots of the cache, by vLLM's kernel."""
        if self.attn_type not in ENCODERS:
            k, v = map(as_bytes, self._cache_views(kv_cache, key.dtype))
            versions.write_keys(key, value, k, v, slot_mapping, self.kv_cache_dtype, layer)

    def _attend_among(self, q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, batch: CompatMetadata) -> None:
        """Write an encoder's attention to ``out``: each token sees all tokens of its sequence."""
        if k is None or v is None:
            raise ValueError("an encoder's layer must get keys and values")
        starts, longest = batch.query_start_loc, batch.max_query_len
        self._attend(out, PackedInputs(q, k, v, self.alibi_slopes, starts, starts), False, longest, longest)

    def _attend(self, out: Tensor, x: PackedInputs, causal: bool, longest_q: int, longest_k: int) -> None:
        """Write the attention of ``x`` to ``out``. Without a causal mask, the layer's window reaches to both sides."""
        left, s_aux = self.sliding_window, self._fp32_sinks
        right = 0 if causal and left >= 0 else left
        use = _LSE if s_aux is not None else 0
        options = Options(0.0, self.scale, causal, left, right, self.logits_soft_cap, False, use, longest_q, longest_k)
        lse = forward_into(out, x, options)
        if s_aux is not None and lse is not None:
            sinks.absorb_in_place(out, lse, s_aux)

    def _attend_to_pages(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, k_scale: Tensor | None,
        v_scale: Tensor | None, key: Tensor | None = None, value: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the attention of sequences with one row each, their last token, to ``out``.

        key, value: new, to be appended at ``lengths`` of the cache first; None if the cache has them already
        """
        left, s_aux, count = self.sliding_window, self._fp32_sinks, lengths.shape[0]
        if q.shape[0] != count:
            q, out = q[:count], out[:count]
        q, out = q.unsqueeze(1), out.unsqueeze(1)
        k_new, v_new = (None if x is None else x[:count].unsqueeze(1) for x in (key, value))
        x = CacheInputs(
            q, k, v, self.alibi_slopes, seqused_k=lengths, block_table=table, k_descale=k_scale, v_descale=v_scale,
            k_new=k_new, v_new=v_new,
        )  # fmt: skip
        use = _LSE if s_aux is not None else 0
        right = 0 if left >= 0 else -1
        lse = attend_into(out, x, Options(0.0, self.scale, True, left, right, self.logits_soft_cap, use=use))
        if s_aux is not None and lse is not None:
            sinks.absorb_in_place(out, lse, s_aux)

    def _descales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """Return the scales of keys and values in an 8-bit cache as (1, 1) fp32 tensors, which CUDA graphs may read."""
        if self.cache_dtype is None or layer is None:
            return None, None
        k_scale, v_scale = layer._k_scale, layer._v_scale
        if k_scale.numel() != 1 or v_scale.numel() != 1:
            raise NotImplementedError(f"an 8-bit cache must have one scale, got {k_scale.numel()} for the keys")
        return k_scale.view(1, 1), v_scale.view(1, 1)

    def _cache_views(self, cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a cache, each (pages, page size, heads, head_dim). Raises ValueError."""
        shape, width = cache.shape, self.head_size
        if self.cache_dtype is not None:  # vLLM allocates 8-bit caches as uint8
            if cache.dtype is torch.uint8:
                cache = cache.view(self.cache_dtype)
            dtype = self.cache_dtype
        fits = len(shape) == 4 and shape[1] == self.num_kv_heads and shape[3] == 2 * width and shape[2] % PAGE == 0
        if not fits or cache.dtype != dtype or cache.stride(3) != 1:
            raise ValueError(
                f"kv_cache must have shape (pages, {self.num_kv_heads}, page size, {2 * width}) with a page size that "
                f"is a multiple of {PAGE}, dtype {dtype} and adjacent channels; got {tuple(shape)}, {cache.dtype}, "
                f"strides {cache.stride()}"
            )
        by_slot = cache.transpose(1, 2)
        return by_slot.narrow(3, 0, width), by_slot.narrow(3, width, width)  # five times as fast as split


_NONE = contextlib.nullcontext()


def _surroundings(q: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return the context of a call: which backends may serve, and how graphs are replayed.

    On GPUs from 8.0 on only our kernels may serve: the backends that come before them there would wait for the GPU to
    read lengths. During a capture the context says that graphs are replayed one after another, as vLLM does.
    """
    if not q.is_cuda:
        return _NONE
    is_captured = cuda_capture.is_capturing(q.get_device())
    is_newer = settings.capability(q.device) >= (8, 0) and settings.forced_backend() is None
    if not (is_newer or is_captured):
        return _NONE
    found = contextlib.ExitStack()
    if is_newer:
        found.enter_context(settings.using_backend("fused"))
    if is_captured:
        found.enter_context(cuda_capture.replayed_in_order())
    return found
