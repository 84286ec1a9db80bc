"""Dense masks, as cuda/mask.cuh has them: what a launch is given of one, and what a pass over it finds first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import params, variants

# What a forward may keep for its backward behind the LSE, in this order. Of a mask of booleans the kernels read nothing
# but what the pass found, so its memory may be written to in between.
SAVED = "absmax", "bias_map", "bias_of_rows"


def saved_names(saved: Sequence[Tensor]) -> tuple[str, ...]:
    """The names of ``saved[1:]``: the maxima, what was found in a mask, both or nothing."""
    return SAVED[1:] if len(saved) == 3 else SAVED[: len(saved) - 1] if saved else ()


def unpack_saved_mask(bias: Tensor, saved: Sequence[Tensor]) -> Tensor | None:
    """The mask that a forward saw, of bias's shape and strides of 0, if it kept that."""
    if "bias_of_rows" not in saved_names(saved):
        return None
    own, keys = [size if stride else 1 for size, stride in zip(bias.shape[:3], bias.stride())], bias.shape[-1]
    each = 1 << torch.arange(8, dtype=torch.uint8, device=bias.device)
    seen = (saved[-1].view(torch.uint8)[..., None] & each).bool().flatten(-2)[..., :keys]
    return seen.reshape(*own, keys).expand(bias.shape)


def bias_macro(bias: Tensor | None) -> int:
    """The macro BIAS of a call's mask."""
    if bias is None:
        return 0
    kinds = {torch.bool: variants.BOOLEANS, torch.float32: variants.FLOAT_BIAS}
    return kinds.get(bias.dtype, variants.HALF_BIAS)


def can_load_pairs(bias: Tensor | None) -> bool:
    """Whether two neighbouring keys of it can be loaded together, wherever the first one is even."""
    if bias is None or bias.dtype == torch.bool or bias.data_ptr() % (2 * bias.element_size()):
        return False
    apart = [stride for size, stride in zip(bias.shape[:-1], bias.stride()) if size > 1]
    return not any(number % 2 for number in (bias.shape[-1], *apart))


def words_per_block(bias: Tensor) -> int:
    """Of 32 keys, that a block of the pass looks at: all, or as many as it can.

    And one more where the last tile reaches behind the last key: a tile without hidden keys is computed as it is.
    """
    keys = bias.shape[-1]
    keys += keys % variants.WIDEST_TILE > 0
    return next((words for words in variants.BIAS_WORDS if 32 * words >= keys), variants.BIAS_WORDS[-1])


def mask_fields(bias: Tensor) -> dict[str, params.Value]:
    """Fields of struct Params. What sequences, heads or rows share is looked through, and kept, once."""
    batch, head, row, key = (stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride()))
    _, heads, rows, keys = bias.shape
    return {
        "bias_s": (batch, row, head),
        "bias_key": key,
        "bias_batch": 0 if not batch else heads if head else 1,
        "bias_head": int(head > 0),
        "bias_rows": rows if row else 1,
        "bias_bands": -(-(rows if row else 1) // variants.BAND),
        "bias_chunks": -(-keys // variants.REACH),
        "lse_has_position": int(bias.dtype != torch.bool),
    }


def mask_pass_shapes(bias: Tensor) -> tuple[int, tuple[int, int], tuple[int, ...]]:
    """Of the pass: its blocks, and the shapes of what it finds, the map and what is known of rows."""
    batch, heads, rows, _ = (size if stride else 1 for size, stride in zip(bias.shape, bias.stride()))
    slabs, keys = batch * heads, bias.shape[-1]
    bands, parts, chunks = slabs * -(-rows // variants.BAND), -(-keys // variants.PART_KEYS), -(-keys // variants.REACH)
    of_rows = (slabs, rows, chunks * variants.REACH // 32) if bias.dtype == torch.bool else (slabs, rows)
    return bands * parts, (bands * chunks, 2), of_rows
