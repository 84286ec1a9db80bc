"""Dense masks for our kernels: their fields of struct Params, and the results of the kernel that reads a mask once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn_compat.backends.fused.choosing.kinds import (
    BAND,
    BIAS_WORDS,
    BOOLEANS,
    FLOAT_BIAS,
    HALF_BIAS,
    PART_KEYS,
    REACH,
    WIDEST_TILE,
)
from flash_attn_compat.backends.fused.launching import params

# Tensors that a forward may save for its backward, after the LSE, in this order. bias_map and bias_of_rows replace a
# boolean mask, so the caller may write to the mask before the backward.
SAVED = "absmax", "bias_map", "bias_of_rows"


def saved_by_name(saved: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return by name what a forward saved after the LSE: the maxima, the results of the mask kernel, both or none."""
    _, *found = saved or (None,)
    names = SAVED[1:] if len(found) == 2 else SAVED
    return dict(zip(names, found))


def unpack_saved_mask(bias: Tensor, saved: Sequence[Tensor]) -> Tensor | None:
    """Return the boolean mask that a forward saved, expanded to the shape of ``bias``; None if it saved none."""
    bands = saved_by_name(saved).get("bias_of_rows")
    if bands is None:
        return None
    sizes, keys = [size if stride else 1 for size, stride in zip(bias.shape[:3], bias.stride())], bias.shape[-1]
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=bias.device)
    visible = (bands.view(torch.uint8)[..., None] & bits).bool().flatten(-2)[..., :keys]
    return visible.reshape(*sizes, keys).expand(bias.shape)


def bias_macro(bias: Tensor | None) -> int:
    """Return the macro BIAS for a call's dense mask: BOOLEANS, HALF_BIAS or FLOAT_BIAS; 0 for no mask."""
    if bias is None:
        return 0
    kinds = {torch.bool: BOOLEANS, torch.float32: FLOAT_BIAS}
    return kinds.get(bias.dtype, HALF_BIAS)


def can_load_pairs(bias: Tensor | None) -> bool:
    """Whether a kernel can load the biases of an even key and of the next key at once."""
    if bias is None or bias.dtype == torch.bool or bias.data_ptr() % (2 * bias.element_size()):
        return False
    apart = [stride for size, stride in zip(bias.shape[:-1], bias.stride()) if size > 1]
    return not any(number % 2 for number in (bias.shape[-1], *apart))


def words_per_block(bias: Tensor) -> int:
    """Return how many words of 32 keys a block of the mask kernel reads: those of a whole row, or the most it can.

    If the last tile reaches beyond the last key, one key more counts: that tile must be marked as partly hidden.
    """
    keys = bias.shape[-1]
    keys += keys % WIDEST_TILE > 0
    return next((words for words in BIAS_WORDS if 32 * words >= keys), BIAS_WORDS[-1])


def mask_fields(bias: Tensor) -> dict[str, params.Value]:
    """Return a mask's fields of struct Params. A mask that sequences, heads or rows share (stride 0) is read once."""
    batch, head, row, key = (stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride()))
    _, heads, rows, keys = bias.shape
    return {
        "bias_s": (batch, row, head),
        "bias_key": key,
        "bias_batch": 0 if not batch else heads if head else 1,
        "bias_head": int(head > 0),
        "bias_rows": rows if row else 1,
        "bias_bands": -(-(rows if row else 1) // BAND),
        "bias_chunks": -(-keys // REACH),
        "lse_has_position": int(bias.dtype != torch.bool),
    }


def mask_pass_shapes(bias: Tensor) -> tuple[int, tuple[int, int], tuple[int, ...]]:
    """Return the mask kernel's number of blocks, and the shapes of its results bias_map and bias_of_rows."""
    batch, heads, rows, _ = (size if stride else 1 for size, stride in zip(bias.shape, bias.stride()))
    slabs, keys = batch * heads, bias.shape[-1]
    bands, parts, chunks = slabs * -(-rows // BAND), -(-keys // PART_KEYS), -(-keys // REACH)
    of_rows = (slabs, rows, chunks * REACH // 32) if bias.dtype == torch.bool else (slabs, rows)
    return bands * parts, (bands * chunks, 2), of_rows
