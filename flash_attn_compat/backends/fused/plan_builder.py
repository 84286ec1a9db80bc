"""Builds a call's launch plan: passes over a kernel's inputs, then the kernel itself.

Where tensor cores take fp16 only, bf16 is scaled by powers of two, which a pass finds. Each tile converts the operands
that it streams to fp16 again. Where many tiles stream the same operand, a pass converts it once to a copy for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from flash_attn_compat.backends.fused import grids, launcher, masks, params, variants, workspaces
from flash_attn_compat.backends.fused.grids import Grid
from flash_attn_compat.backends.fused.launcher import Launch, Output, Plan
from flash_attn_compat.backends.fused.variants import Kind, Variant
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import AttentionCall

# The elements that a thread of the append kernel copies at once.
_ELEMENTS_PER_LOAD = 8
# Plans take their outputs in the order of the head.
_HEAD_POSITIONS = {name: place for place, (name, _) in enumerate(params.HEAD_FIELDS)}


def plan_mask(call: AttentionCall, kind: Kind, fields: dict[str, params.Value]) -> tuple[list[Output], list[Launch]]:
    """Return the outputs and launches of the pass over a dense mask; none without such a mask."""
    if call.bias is None:
        return [], []
    blocks, map_shape, rows_shape = masks.mask_pass_shapes(call.bias)
    outputs = [
        Output("bias_map", map_shape, torch.int32),
        Output("bias_of_rows", rows_shape, torch.int32, starts_as_zero=kind.bias != variants.BOOLEANS),
    ]
    return outputs, [Launch(variants.mask(kind._replace(bias_words=masks.words_per_block(call.bias))), blocks, fields)]


class PlanBuilder:
    """Collects outputs and launches. ``fields`` go to every later launch, ``redirects`` to every later tiled launch.

    has_mask: whether the call's inputs include the results of the pass over its dense mask
    """

    def __init__(
        self, call: AttentionCall, kind: Kind, fields: dict[str, params.Value], has_mask: bool = False
    ) -> None:
        self.call, self.kind, self.fields = call, kind, fields
        self.redirects: dict[str, tuple[str, int]] = {}
        self.outputs, self.launches = ([], []) if has_mask else plan_mask(call, kind, fields)
        self.workspace = 0

    def build(self, new: Append | None = None, others: Mapping[str, Any] | None = None) -> Plan:
        outputs = sorted(self.outputs, key=lambda output: _HEAD_POSITIONS[output.name])
        return Plan(self.call, outputs, self.launches, new, others, self.workspace)

    def add_output(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, starts_as_zero: bool = False,
        strides: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Add an output, as Output describes it."""
        self.outputs.append(Output(name, shape, dtype, starts_as_zero, strides))

    def add_launch(self, variant: Variant, blocks: int, **fields: params.Value) -> None:
        """Add a launch. fields: in addition to those of every launch"""
        self.launches.append(Launch(variant, blocks, {**self.fields, **fields}))

    def add_append(self, new: Append) -> None:
        """Add a launch that writes ``new`` keys, and rotates q for later launches if the append rotates.

        The call has the lengths before the append; ``fields`` must include those of the append.
        """
        call, rotates, (batch, seqlen_new) = self.call, new.rotary_cos is not None, new.k.shape[:2]
        rows = 2 * batch * seqlen_new * call.nheads_k + rotates * batch * call.nheads * call.q.shape[1]
        pieces = rows * -(-max(call.q.shape[-1], call.v.shape[-1]) // _ELEMENTS_PER_LOAD)
        variant, strides = variants.append(choose_append_kind(call, new)), launcher.contiguous_strides(call.q.shape)
        blocks = max(1, min(-(-pieces // variant.threads), 32 * launcher.count_multiprocessors(call.q.get_device())))
        self.add_launch(variant, blocks, q_rotated_s=strides)
        if rotates:
            self.add_output("q_rotated", call.q.shape, call.q.dtype)
            self.fields["q_s"], self.redirects["q"] = strides, ("q_rotated", 0)

    def add_maxima_pass(self, of_rows: bool) -> None:
        """Add a pass for the largest finite magnitudes of k, v and q, as bits of fp32 numbers: they set bf16's scales.

        of_rows: include q's maxima, which the forward kernel finds itself. Without them, and if the forward reads
        copies of keys and values, the pass also writes these copies, scaled by the maxima known so far.
        """
        call, kind = self.call, self.kind._replace(copied=self.kind.copied and not of_rows)
        self.add_output("absmax", (3, call.batch, call.nheads_k), torch.int32, starts_as_zero=True)
        if kind.copied:
            marks = variants.marks(kind, call.k.shape[:-2].numel(), call.batch)
            self.add_output("copies", (call.k.numel() + call.v.numel(),), torch.float16)
            self.add_output("marks", (2, call.nheads_k, marks), torch.int32)
        self._add_pass(variants.absmax(kind), 2 + of_rows)

    def _add_pass(self, variant: Variant, tensors: int, **fields: params.Value) -> None:
        """Add a pass over ``tensors`` tensors of the call's key heads. Blocks share a sequence."""
        call = self.call
        heads, longest = call.batch * call.nheads_k, max(launcher.max_rows(call), launcher.max_keys(call))
        processors = launcher.count_multiprocessors(call.q.get_device())
        splits = max(1, min(-(-longest // variants.ABSMAX_ROWS), -(-8 * processors // heads), 32))
        self.add_launch(variant, tensors * heads * splits, **fields, splits=splits)

    def add_tiled_launch(self, variant: Variant, grid: Grid, heads: int, splits: int | None = 1) -> None:
        """Add a kernel with a block for each tile; before it the pass that writes or corrects copies of its operands.

        grid: of each of the ``heads``; splits: blocks that share a tile, None for the best number
        """
        call, of_keys, redirects = self.call, variant.entry == "dkdv", {**self.redirects}
        tiles = grid.tiles * heads * call.batch
        if grid.varlen_tiles:
            variant, splits = variants.with_shared_grid(variant), 1
        elif splits is None:
            splits = (launcher.choose_head_splits if of_keys else launcher.choose_splits)(call, variant, tiles)
        if splits > 1:
            self.workspace = workspaces.PARTS_OFFSET + tiles * splits * grids.split_bytes(variant)
        fields = {**self.fields, "tiles": grid.tiles, "splits": splits, "varlen_tiles": grid.varlen_tiles}
        if variant.entry != "delta":  # delta streams no operands
            fields["resident"] = launcher.find_gpu(call).resident_blocks(variant)
            if self.kind.copied:
                self._add_pass(variants.to_half(self.kind), 2, converts_rows=int(of_keys))
                rows, keys = {"q": call.q.shape, "dout": call.out_shape}, {"k": call.k.shape, "v": call.v.shape}
                offset = 0
                for name, shape in (rows if of_keys else keys).items():
                    fields[f"{name}_s"] = launcher.contiguous_strides(shape)
                    redirects[name] = "copies", offset
                    offset += 2 * math.prod(shape)
        self.launches.append(Launch(variant, splits * grid.tiles * heads * grid.groups, fields, redirects))


def choose_append_kind(call: AttentionCall, new: Append) -> Kind:
    inputs = call.q if new.rotary_cos is not None else None, call.k, call.v, *new[:4]
    return launcher.choose_kind(call, launcher.vector_size(inputs, in_place=True))


def enable_copies(call: AttentionCall, kind: Kind, backward: bool) -> Kind:
    """Return ``kind``, with copies of the streamed operands if there are many tiles. Caches and pages are never copied:
    they may be much larger than the new keys, and each step would copy them again.
    """
    is_converted = kind.type == variants.BF16_AS_FP16 and kind.vec == 8 and not (kind.paged or kind.cache)
    if not (is_converted and (call.is_dense or call.cu_seqlens_k is not None) and all(x.numel() for x in call[:3])):
        return kind
    stationary, starts = (call.k, call.cu_seqlens_k) if backward else (call.q, call.cu_seqlens_q)
    variant = variants.dkdv(kind) if backward else variants.forward(kind)
    # Of packed sequences the host knows only the mean length.
    rows = stationary.shape[1] if starts is None else stationary.shape[0] / max(call.batch, 1)
    group = 1 if backward else call.nheads // call.nheads_k
    return kind._replace(copied=variants.pays_to_copy(kind, variant, rows, group))
