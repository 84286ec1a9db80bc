"""Compute from a call what its launches need: its kind, lengths, fields of struct Params, and numbers of splits."""

from __future__ import annotations

import functools

import torch

from flash_attn_compat import settings
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import (
    BF16,
    BF16_AS_FP16,
    FEW_ROWS,
    FP16,
    SHORT,
    Hints,
    KernelFeatures,
    Kind,
    Sizes,
)
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.launching import eight_bit, grids, layouts, masks, params, workspaces
from flash_attn_compat.backends.fused.tuning import tuned
from flash_attn_compat.core import dropout
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import AttentionCall


def choose_kind(call: AttentionCall, vec: int, decodes: bool = False) -> Kind:
    """Return a call's kind. decodes: whether the decode kernel is meant, which takes no sequence beyond max_rows."""
    has_one_row = max_rows(call) == 1 and (decodes or call.cu_seqlens_q is None)
    device, number = call.q.device, nvrtc.target_number(call.q.get_device())
    half = FP16 if call.q.dtype == torch.float16 else BF16
    cache = eight_bit.cache_macro(call.k)
    is_plain = half == FP16 and number < 80 and call.cu_seqlens_q is None
    fills = not is_plain or grids.fills_gpu(
        max_rows(call), max_keys(call), call.batch * call.nheads, count_multiprocessors(call.q.get_device())
    )
    local, size = call.mask.kernel_rule(has_one_row), max(call.q.shape[-1], call.v.shape[-1])
    rows, longest = max_rows(call), max(max_rows(call), max_keys(call))
    few_rows = grids.takes_small_tiles(rows, size, local > 0) if number < 80 else rows <= FEW_ROWS
    is_long = call.bias is not None or call.block_table is not None
    sizes = Sizes(
        head_dim=call.q.shape[-1],
        head_dim_v=call.v.shape[-1],
        window=call.mask.width,
        vec=vec,
    )
    features = KernelFeatures(
        local=local,
        alibi=call.alibi_slopes is not None,
        softcap=call.softcap > 0.0,
        dropout=call.dropout_p > 0.0,
        paged=call.block_table is not None,
        bias=masks.bias_macro(call.bias),
        bias_pairs=masks.can_load_pairs(call.bias),
        cache=cache,
    )
    hints = Hints(
        few_rows=few_rows or not fills,
        short=0 if is_long else next((most for most in (SHORT, FEW_ROWS) if longest <= most), 0),
    )
    kind = Kind(number, BF16_AS_FP16 if half and (number < 80 or cache) else half, sizes, features, hints)
    return kind.replace(tiles=tuned.find_tiles(settings.gpu(device), number, kind.size, call.q.dtype))


def call_fields(call: AttentionCall) -> dict[str, params.Value]:
    """Return the fields of struct Params that any kernel needs, computed from a call's shapes and options."""
    q, k, v = call.q, call.k, call.v
    same = "batch", "nheads", "nheads_k", "softmax_scale", "softcap"
    fields: dict[str, params.Value] = {name: getattr(call, name) for name in same}
    fields |= {
        "q_s": layouts.kernel_strides(q),
        "k_s": layouts.kernel_strides(k),
        "v_s": layouts.kernel_strides(v),
        "group": call.nheads // call.nheads_k,
        "seqlen_q": max_rows(call),
        "total_q": q.shape[0] if call.cu_seqlens_q is not None else 0,
        "total_k": k.shape[0] if call.cu_seqlens_k is not None else 0,
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        **call.mask.kernel_fields,
        "lse_has_position": int(call.lse_carries_alibi_position),
        "lse_batch": 0 if call.cu_seqlens_q is not None else call.nheads * q.shape[1],
        "lse_head": q.shape[0] if call.cu_seqlens_q is not None else q.shape[1],
        **eight_bit.cache_fields(call),
    }
    if call.bias is not None:
        fields |= masks.mask_fields(call.bias)
    table, slopes = call.block_table, call.alibi_slopes
    if slopes is not None:
        fields["slopes_batch"] = layouts.effective_stride(slopes, 0) if slopes.dim() == 2 else 0
    if table is not None:
        fields |= {
            "table_stride": layouts.effective_stride(table, 0),
            "page_size": k.shape[1],
            "pages_per_sequence": table.shape[1],
            "num_pages": k.shape[0],
        }
    if call.dropout_p:
        fields["dropout_limit"] = dropout.word_limit(call.dropout_p)
        fields["dropout_scale"] = 1.0 / (1.0 - call.dropout_p)
    return fields


def append_fields(new: Append) -> dict[str, params.Value]:
    """Return the fields of struct Params that a kernel needs to append new keys and values."""
    cos = new.rotary_cos
    fields: dict[str, params.Value] = {
        "k_new_s": layouts.kernel_strides(new.k),
        "v_new_s": layouts.kernel_strides(new.v),
        "seqlen_new": new.k.shape[1],
    }
    if cos is not None:
        fields |= {
            "rotary_dim": 2 * cos.shape[1],
            "rotary_interleaved": int(new.rotary_interleaved),
            "rotary_rows": cos.shape[0],
            "rotary_row_stride": layouts.effective_stride(cos, 0),
            "rotate_rows_apart": int(new.rows_have_own_position),
        }
    return fields


def max_rows(call: AttentionCall) -> int:
    """Return the most query rows that a sequence may have."""
    if call.cu_seqlens_q is None:
        return call.q.shape[1]
    return max(1, min(call.max_seqlen_q, call.q.shape[0]))


def max_keys(call: AttentionCall) -> int:
    """Return the most keys that a sequence may have: over a cache, the number of its slots."""
    if call.block_table is not None:
        return call.block_table.shape[1] * call.k.shape[1]
    if call.cu_seqlens_k is None:
        return call.k.shape[1]
    return max(1, min(call.max_seqlen_k, call.k.shape[0]))


def choose_splits(call: AttentionCall, variant: Variant, tiles: int) -> int:
    """Return the number of blocks among which the keys of one tile of query rows are divided.

    tiles: the number of tiles of query rows in the whole call
    """
    if tiles > workspaces.COUNTERS:  # so many tiles fill any GPU without splits
        return 1
    keys, width = max_keys(call), call.mask.width
    if width is not None:
        keys = min(keys, width + min(max_rows(call), variant.rows) - 1)
    return grids.count_splits(variant, tiles, keys, count_resident(call, variant))


def choose_head_splits(call: AttentionCall, variant: Variant, blocks: int) -> int:
    """Return the number of blocks that share the query heads of one tile of dkdv. blocks: the number of its tiles"""
    if blocks > workspaces.COUNTERS:
        return 1
    group = call.nheads // call.nheads_k
    return grids.count_head_splits(variant, blocks, group, max_rows(call), count_resident(call, variant))


def count_resident(call: AttentionCall, variant: Variant) -> int:
    """Return how many blocks of a variant the call's GPU runs at once."""
    device = call.q.get_device()
    return grids.resident_blocks(variant, count_multiprocessors(device), nvrtc.target_number(device))


@functools.cache
def count_multiprocessors(device: int) -> int:
    """Return how many streaming multiprocessors the GPU number ``device`` has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def choose_append_kind(call: AttentionCall, new: Append) -> Kind:
    inputs = call.q if new.rotary_cos is not None else None, call.k, call.v, *new[:4]
    return choose_kind(call, layouts.vector_size(inputs, in_place=True))


def enable_copies(call: AttentionCall, kind: Kind, backward: bool) -> Kind:
    """Return ``kind``, with fp16 copies of the streamed bf16 operands if many tiles read them.

    Caches and pages are never copied, because they may be much larger than the new keys, and each step would copy them.
    """
    in_memory_once = kind.features.paged or kind.features.cache
    is_converted = kind.type == BF16_AS_FP16 and kind.sizes.vec == 8 and not in_memory_once
    if not (is_converted and (call.is_dense or call.cu_seqlens_k is not None) and all(x.numel() for x in call[:3])):
        return kind
    stationary, starts = (call.k, call.cu_seqlens_k) if backward else (call.q, call.cu_seqlens_q)
    variant = variants.dkdv(kind) if backward else variants.forward(kind)
    # For packed sequences the host knows only the mean length.
    rows = stationary.shape[1] if starts is None else stationary.shape[0] / max(call.batch, 1)
    group = 1 if backward else call.nheads // call.nheads_k
    return kind.replace(copied=variants.pays_to_copy(kind, variant, rows, group))


def mark_long(call: AttentionCall, kind: Kind) -> Kind:
    """Return ``kind`` with the hint ``long`` if sequences (packed: their mean) have ``least_long`` rows and keys."""
    if not kind.may_be_long:
        return kind
    rows, keys = (
        x.shape[1] if starts is None else x.shape[0] / max(call.batch, 1)
        for x, starts in ((call.q, call.cu_seqlens_q), (call.k, call.cu_seqlens_k))
    )
    return kind.replace(long=min(rows, keys) >= kind.least_long)
