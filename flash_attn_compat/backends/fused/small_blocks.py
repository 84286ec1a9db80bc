"""FlexAttention with a BlockMask whose blocks are smaller than our kernels' tiles. Same functions as in flex.py.

In each call, PyTorch's operators make lists of larger blocks, of 128 queries and 128 keys, and a map of the caller's
blocks. flex_mask reads the map before the caller's mask_mod: a block in no list is hidden, and in a full block mask_mod
is not called. Nothing waits for the GPU.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import flex
from flash_attn_compat.backends.fused.flex import BlockLists, Blocks, FlexInputs, FlexUpstream, Mods
from flash_attn_compat.backends.fused.launching import params

SIZE, UNIT = 128, 16  # SIZE: rows and keys of our blocks; UNIT: a caller's block sizes are multiples of it
_PARTIAL, _FULL, _OUTSIDE = 1, 2, 3  # values in a map of blocks; _OUTSIDE: after the sequence's end
_RENAMED = "#define flex_mask flex_mask_of_partial\n#define flex_sight flex_sight_of_partial\n"
_MASK = """#undef flex_mask
#undef flex_sight
#undef FLEX_SIGHT
DEVICE bool flex_mask(const FlexParams &f, int b, int h, int q, int kv) {{
  const int listed = flex_u8(f, {i}, (i64)b * f.stride[{i}][0] + (i64)h * f.stride[{i}][1] +
                                         (i64)(q / {rows}) * f.stride[{i}][2] + kv / {keys});
  return (listed == {full}) | ((listed == {partial}) & flex_mask_of_partial(f, b, h, q, kv));
}}
"""


def decline_reason(mods: Mods, inputs: FlexInputs, backward: bool) -> str | None:
    """Return the reason why no kernel can compute calls like this one, or None. backward: whether it needs gradients"""
    if flex.has_tiles(mods, inputs, backward) or inputs.blocks is None:
        return flex.decline_reason(mods, inputs, backward)
    rows, keys = inputs.blocks[:2]
    if rows % UNIT or keys % UNIT:
        return f"blocks of {rows} queries and {keys} keys: both must be multiples of {UNIT}"
    if len(inputs.captured) >= params.CAPTURED:
        return f"{params.CAPTURED} captured tensors with blocks of {rows} queries and {keys} keys: tiles are larger"
    return flex.decline_reason(_tiled_mods(mods, inputs), _with_our_sizes(inputs), backward)


def load(mods: Mods, inputs: FlexInputs, backward: bool) -> None:
    """Compile and load the kernels for calls with these inputs, as ``flex.load`` does."""
    if flex.has_tiles(mods, inputs, backward):
        return flex.load(mods, inputs, backward)
    return flex.load(_tiled_mods(mods, inputs), _with_our_sizes(inputs), backward)


def prepare(mods: Mods, inputs: FlexInputs, scale: float) -> flex.FlexRun:
    """Return the function (run) that computes a forward, as ``flex.prepare`` does."""
    if flex.has_tiles(mods, inputs, False):
        return flex.prepare(mods, inputs, scale)
    flex.check_blocks(inputs)
    run = flex.prepare(_tiled_mods(mods, inputs), _tiled(inputs, False), scale)
    return lambda inputs: run(_tiled(inputs, False))


def prepare_backward(mods: Mods, inputs: FlexInputs, scale: float, upstream: FlexUpstream) -> flex.FlexBackwardRun:
    """Return the function (run) for a backward, as ``flex.prepare_backward`` does. Its lists q_* come from kv_*."""
    if flex.has_tiles(mods, inputs, True):
        return flex.prepare_backward(mods, inputs, scale, upstream)
    flex.check_blocks(inputs)
    run = flex.prepare_backward(_tiled_mods(mods, inputs), _tiled(inputs, True), scale, upstream)
    return lambda inputs, upstream: run(_tiled(inputs, True), upstream)


def _tiled_mods(mods: Mods, inputs: FlexInputs) -> Mods:
    """Return ``mods`` with a flex_mask that first reads the map of blocks, which becomes the last captured tensor."""
    assert inputs.blocks is not None
    rows, keys = inputs.blocks[:2]
    mask = _MASK.format(i=len(inputs.captured), rows=rows, keys=keys, full=_FULL, partial=_PARTIAL)
    return mods._replace(text=f"{_RENAMED}{mods.text}{mask}", has_mask=True)


def _with_our_sizes(inputs: FlexInputs) -> FlexInputs:
    """Return inputs with our block sizes but the caller's lists: enough to choose the kernels."""
    assert inputs.blocks is not None
    return inputs._replace(blocks=inputs.blocks._replace(rows=SIZE, keys=SIZE))


def _tiled(inputs: FlexInputs, backward: bool) -> FlexInputs:
    """Return inputs with lists of our larger blocks, and with the map of the caller's blocks as a captured tensor."""
    blocks, (batch, heads, rows, _), keys = inputs.blocks, inputs.q.shape, inputs.k.shape[2]
    assert blocks is not None
    listed = _map_of(blocks, rows, keys)
    units = listed
    for axis, length, size in ((2, rows, blocks.rows), (3, keys, blocks.keys)):
        of_unit = torch.arange(-(-length // UNIT), device=listed.device) * UNIT // size
        units = units.index_select(axis, of_unit)
    behind = [-x % (SIZE // UNIT) for x in units.shape[2:]]
    units = torch.nn.functional.pad(units, (0, behind[1], 0, behind[0]), value=_OUTSIDE)
    tiles = units.unflatten(3, (-1, SIZE // UNIT)).unflatten(2, (-1, SIZE // UNIT))
    some = ((tiles == _PARTIAL) | (tiles == _FULL)).any(5).any(3)
    full = some & (tiles >= _FULL).all(5).all(3)
    found = Blocks(SIZE, SIZE, _lists(some, full), _lists(some.mT, full.mT) if backward else None)
    return inputs._replace(blocks=found, captured=(*inputs.captured, listed.expand(batch, heads, -1, -1)))


def _map_of(blocks: Blocks, rows: int, keys: int) -> Tensor:
    """Return the map of a caller's blocks: 0, _PARTIAL or _FULL, as bytes (batch or 1, heads or 1, rows, keys)."""
    num, indices, full_num, full_indices = blocks.of_rows
    count = -(-rows // blocks.rows), -(-keys // blocks.keys)
    listed = _marked(num, indices, *count)
    if full_num is None or full_indices is None:
        return listed
    return torch.maximum(listed, _FULL * _marked(full_num, full_indices, *count))


def _marked(num: Tensor, indices: Tensor, rows: int, columns: int) -> Tensor:
    """Return a map with 1 for each block in a list, as bytes. Listed blocks outside of the map are ignored."""
    num, indices = num[:, :, :rows], indices[:, :, :rows]
    exists = (torch.arange(indices.shape[3], device=num.device) < num[..., None]) & (indices >= 0) & (indices < columns)
    marks = torch.zeros((*indices.shape[:3], columns + 1), dtype=torch.uint8, device=num.device)
    return marks.scatter_(3, torch.where(exists, indices, columns).long(), 1)[..., :columns]


def _lists(some: Tensor, full: Tensor) -> BlockLists:
    """Return the lists of partial and full blocks. some: whether anything of a block is visible; full: all of it"""
    order = partial(torch.argsort, dim=-1, descending=True, stable=True)
    pairs = ((which.sum(-1, dtype=torch.int32), order(which.byte()).int()) for which in (some & ~full, full))
    return BlockLists(*(x for pair in pairs for x in pair))
