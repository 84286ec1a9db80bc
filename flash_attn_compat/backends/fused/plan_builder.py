"""A call's launches, put together one by one: passes over what a kernel reads, and the kernel itself.

bf16 where the tensor cores take fp16 is scaled by powers of two, which a pass finds. What passes by in a tile is turned
into fp16 there, as often as there are tiles. Where these are many, another pass makes a copy, which is read instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from flash_attn_compat.backends.fused import grids, launcher, params, variants
from flash_attn_compat.backends.fused.grids import Grid
from flash_attn_compat.backends.fused.launcher import Launch, Output, Plan
from flash_attn_compat.backends.fused.variants import Kind, Variant
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import AttentionCall

# Of the append kernel: of a block, and elements that one of its threads copies at once.
_THREADS, _ELEMENTS_PER_LOAD = 128, 8
# Plans take their outputs in this order.
_HEAD_POSITIONS = {name: place for place, (name, _) in enumerate(params.HEAD_FIELDS)}


class PlanBuilder:
    """fields: of every launch that is added from now on; instead: as Launch has it, of those with tiles

    has_mask: whether the launches are given what a pass over the dense mask found
    """

    def __init__(
        self, call: AttentionCall, kind: Kind, fields: dict[str, params.Value], has_mask: bool = False
    ) -> None:
        self.call, self.kind, self.fields = call, kind, fields
        self.instead: dict[str, tuple[str, int]] = {}
        self.outputs, self.launches = ([], []) if has_mask else launcher.plan_mask_pass(call, kind, fields)
        self.workspace = 0

    def plan(self, new: Append | None = None, others: Mapping[str, Any] | None = None) -> Plan:
        outputs = sorted(self.outputs, key=lambda output: _HEAD_POSITIONS[output.name])
        return Plan(self.call, outputs, self.launches, new, others, self.workspace)

    def leave(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, starts_as_zero: bool = False) -> None:
        """Memory for what launches write, as Output has it."""
        self.outputs.append(Output(name, shape, dtype, starts_as_zero))

    def add(self, variant: Variant, blocks: int, **fields: params.Value) -> None:
        """fields: beside those of all"""
        self.launches.append(Launch(variant, blocks, {**self.fields, **fields}))

    def append(self, new: Append) -> None:
        """A kernel of its own writes ``new`` keys, and leaves q for later launches rotated where that is asked for.

        The call has the lengths before the append, if any; ``fields`` those of the new keys.
        """
        call, rotates, (batch, seqlen_new) = self.call, new.rotary_cos is not None, new.k.shape[:2]
        rows = 2 * batch * seqlen_new * call.nheads_k + rotates * batch * call.nheads * call.q.shape[1]
        pieces = rows * -(-max(call.q.shape[-1], call.v.shape[-1]) // _ELEMENTS_PER_LOAD)
        blocks = max(1, min(-(-pieces // _THREADS), 32 * launcher.count_multiprocessors(call.q.get_device())))
        strides = launcher.contiguous_strides(call.q.shape)
        self.add(variants.append(choose_append_kind(call, new)), blocks, q_rotated_s=strides)
        if rotates:
            self.leave("q_rotated", call.q.shape, call.q.dtype)
            self.fields["q_s"], self.instead["q"] = strides, ("q_rotated", 0)

    def add_maxima_pass(self, of_rows: bool) -> None:
        """The largest finite magnitudes of k, v and q, as the bits of fp32 numbers: what bf16 is scaled by.

        of_rows: whether this finds q's, which the forward kernel does itself. If not, and if that reads copies of keys
        and values, this makes them by all that it knows on its way.
        """
        call, kind = self.call, self.kind._replace(copied=self.kind.copied and not of_rows)
        self.leave("absmax", (3, call.batch, call.nheads_k), torch.int32, starts_as_zero=True)
        if kind.copied:
            marks = variants.marks(kind, call.k.shape[:-2].numel(), call.batch)
            self.leave("copies", (call.k.numel() + call.v.numel(),), torch.float16)
            self.leave("marks", (2, call.nheads_k, marks), torch.int32)
        self._pass_over(variants.absmax(kind), 2 + of_rows)

    def _pass_over(self, variant: Variant, tensors: int, **fields: params.Value) -> None:
        """A pass over so many ``tensors`` of a call's heads; parts of a sequence have blocks of their own."""
        call = self.call
        heads, longest = call.batch * call.nheads_k, max(launcher.max_rows(call), launcher.max_keys(call))
        processors = launcher.count_multiprocessors(call.q.get_device())
        splits = max(1, min(-(-longest // variants.ABSMAX_ROWS), -(-8 * processors // heads), 32))
        self.add(variant, tensors * heads * splits, **fields, splits=splits)

    def add_tiled_launch(self, variant: Variant, grid: Grid, heads: int, splits: int | None = 1) -> None:
        """A kernel whose blocks have tiles of their own; before it, what makes or mends the copies that pass by them.

        grid: of each of the ``heads``; splits: blocks that share a tile, None for as many as pay
        """
        call, of_keys, instead = self.call, variant.entry == "dkdv", {**self.instead}
        tiles = grid.tiles * heads * call.batch
        if grid.seats:
            variant, splits = variants.in_seats(variant), 1
        elif splits is None:
            splits = (launcher.choose_head_splits if of_keys else launcher.choose_splits)(call, variant, tiles)
        if splits > 1:
            self.workspace = launcher.PARTS_AT + tiles * splits * grids.split_bytes(variant)
        fields = {**self.fields, "tiles": grid.tiles, "splits": splits, "seats": grid.seats}
        if variant.entry != "delta":  # which has nothing pass by
            fields["resident"] = launcher.find_gpu(call).resident_blocks(variant)
            if self.kind.copied:
                self._pass_over(variants.to_half(self.kind), 2, converts_rows=int(of_keys))
                rows, keys = {"q": call.q.shape, "dout": call.out_shape}, {"k": call.k.shape, "v": call.v.shape}
                behind = 0
                for name, shape in (rows if of_keys else keys).items():
                    fields[f"{name}_s"] = launcher.contiguous_strides(shape)
                    instead[name] = "copies", behind
                    behind += 2 * math.prod(shape)
        self.launches.append(Launch(variant, splits * grid.tiles * heads * grid.slabs, fields, instead))


def choose_append_kind(call: AttentionCall, new: Append) -> Kind:
    read = call.q if new.rotary_cos is not None else None, call.k, call.v, *new[:4]
    return launcher.choose_kind(call, launcher.vector_size(read, in_place=True))


def enable_copies(call: AttentionCall, kind: Kind, backward: bool) -> Kind:
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
