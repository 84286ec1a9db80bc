"""bf16 where the tensor cores take fp16: what finds its powers of two, and what turns it into fp16 once.

What passes by in a tile is turned into fp16 there, as often as there are tiles. Where these are many, a copy is read.
"""

from __future__ import annotations

import math

import torch

from flash_attn_compat.backends.fused import grids, launcher, params, variants
from flash_attn_compat.backends.fused.launcher import Launch, Output
from flash_attn_compat.backends.fused.variants import Kind, Variant
from flash_attn_compat.engine.call import AttentionCall


def maxima(
    call: AttentionCall, kind: Kind, fields: dict[str, params.Value], of_rows: bool = False
) -> tuple[Output, Launch]:
    """The launch that finds by which powers of two bf16 is scaled where the tensor cores take fp16.

    Its output are the largest finite magnitudes of k, v and q, as the bits of fp32 numbers. The forward kernel finds
    q's itself; of_rows: whether this does.
    """
    found = Output("absmax", (3, call.batch, call.nheads_k), torch.int32, starts_as_zero=True)
    return found, _reading(call, variants.absmax(kind), fields, 2 + of_rows)


def copies_of_keys(call: AttentionCall, kind: Kind) -> list[Output]:
    """What ``maxima`` writes besides, for all that it then knows, and ``to_half`` mends."""
    marks = 2, call.nheads_k, variants.marks(kind, call.k.shape[:-2].numel(), call.batch)
    copies = Output("copies", (call.k.numel() + call.v.numel(),), torch.float16)
    return [copies, Output("marks", marks, torch.int32)]


def to_half(call: AttentionCall, kind: Kind, fields: dict[str, params.Value], of_rows: bool) -> Launch:
    """The launch that copies two tensors of bf16 as scaled fp16: q and dout (``of_rows``), or k and v."""
    return _reading(call, variants.to_half(kind), {**fields, "converts_rows": int(of_rows)}, 2)


def _reading(call: AttentionCall, variant: Variant, fields: dict[str, params.Value], tensors: int) -> Launch:
    heads, longest = call.batch * call.nheads_k, max(launcher.longest_rows(call), launcher.longest_keys(call))
    splits = grids.absmax_splits(longest, heads, launcher.processors(call.q.get_device()))
    return Launch(variant, tensors * heads * splits, {**fields, "splits": splits})


def reads_copies(call: AttentionCall, launch: Launch, of_rows: bool) -> Launch:
    """``launch`` with the copies of q and dout, or of k and v, in their place."""
    shape, shape_v = (call.q.shape, call.out_shape) if of_rows else (call.k.shape, call.v.shape)
    first, second = ("q", "dout") if of_rows else ("k", "v")
    places = {f"{first}_s": launcher.contiguous_strides(shape), f"{second}_s": launcher.contiguous_strides(shape_v)}
    instead = {first: ("copies", 0), second: ("copies", 2 * math.prod(shape))}
    return launch._replace(fields={**launch.fields, **places}, instead=instead)


def with_copies(call: AttentionCall, kind: Kind, backward: bool) -> Kind:
    """``kind``, which reads copies of what passes by its tiles if these are many. Caches and pages are not copied: they
    may be far larger than what is new, and are read anew in each step.
    """
    is_converted = kind.type == variants.BF16_AS_FP16 and kind.vec == 8 and not kind.paged
    if not (is_converted and (call.is_dense or call.cu_seqlens_k is not None) and all(x.numel() for x in call[:3])):
        return kind
    own, starts = (call.k, call.cu_seqlens_k) if backward else (call.q, call.cu_seqlens_q)
    variant = variants.dkdv(kind) if backward else variants.forward(kind)
    # Of packed sequences the host knows the mean.
    rows = own.shape[1] if starts is None else own.shape[0] / max(call.batch, 1)
    group = 1 if backward else call.nheads // call.nheads_k
    return kind._replace(copied=variants.pays_to_copy(kind, variant, rows, group))
