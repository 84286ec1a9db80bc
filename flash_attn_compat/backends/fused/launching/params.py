"""The kernels' one argument, struct Params of cuda/base/params.cuh, byte for byte.

It begins with the head: addresses, and the length of keys. Each call packs the head anew; all calls of a plan share the
rest. At the end is the tail, the addresses of descales, which calls with descales also pack. With the macro FLEX, the
addresses of FlexParams belong to the tail, too; its other fields follow.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection

from flash_attn_compat.core.mask import Mask

# Names in the order of the C struct. Types are codes of Python's struct: Q an address, q a long long, i int, f float.
ADDRESSES = (
    "q", "k", "v", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table", "bias",
    "rng_state", "k_new", "v_new", "rotary_cos", "rotary_sin", "q_rotated", "dout", "out", "lse", "dlse", "dq", "dk",
    "dv", "lse_true", "absmax", "bias_map", "bias_of_rows", "absmax_dout", "delta", "copies", "marks",
    "counters", "parts",
)  # fmt: skip
TAIL_ADDRESSES = "k_descale", "v_descale"
# For FlexAttention. FLEX_LISTS: a BlockMask's lists of partial and full blocks of keys, then of queries. The sizes are
# those of FlexParams.
FLEX_LISTS = "kv", "full_kv", "q", "full_q"
CAPTURED, GRADIENTS, NUMBERS, MAX_DIMS = 16, 8, 8, 4
FLEX_ADDRESSES = (
    *(f"{name}_num" for name in FLEX_LISTS),
    *(f"{name}_indices" for name in FLEX_LISTS),
    *(f"captured_{i}" for i in range(CAPTURED)),
    *(f"gradient_{i}" for i in range(GRADIENTS)),
)
_STRIDES = (
    "q_s", "k_s", "v_s", "out_s", "dout_s", "dq_s", "dk_s", "dv_s", "k_new_s", "v_new_s", "q_rotated_s", "bias_s",
)  # fmt: skip
_LONGS = ("lse_batch", "lse_head")
_INTS = (
    "slopes_batch", "table_stride", "batch", "nheads", "nheads_k", "group", "seqlen_q", "total_q", "total_k",
    "seqlen_new", "head_dim", "head_dim_v", *Mask().kernel_fields, "page_size", "pages_per_sequence",
    "num_pages", "tiles", "splits", "resident", "varlen_tiles", "rotary_dim", "rotary_interleaved", "rotary_rows",
    "rotary_row_stride", "rotate_rows_apart", "lse_has_position", "bias_key", "bias_batch", "bias_head",
    "bias_rows", "bias_bands", "bias_chunks", "dropout_limit",
)  # fmt: skip
_FLOATS = ("dropout_scale", "softmax_scale", "softcap")

HEAD_FIELDS: tuple[tuple[str, str], ...] = (*((name, "Q") for name in ADDRESSES), ("seqlen_k", "i"), ("zero", "i"))
REST_FIELDS: tuple[tuple[str, str], ...] = (
    *((name, "qii") for name in _STRIDES),
    *((name, "q") for name in _LONGS),
    *((name, "i") for name in _INTS),
    *((name, "f") for name in _FLOATS),
    ("converts_rows", "i"),
    *((name, "f") for name in ("k_factor", "v_factor")),
    *((name, "qii") for name in ("k_descale_s", "v_descale_s")),
    *((name, "Q") for name in TAIL_ADDRESSES),
)
FLEX_FIELDS: tuple[tuple[str, str], ...] = (
    *((name, "Q") for name in FLEX_ADDRESSES),
    *((f"{name}_list", "iiiiiiiii") for name in FLEX_LISTS),
    *((f"size_{i}", "i" * MAX_DIMS) for i in range(CAPTURED)),
    *((f"stride_{i}", "i" * MAX_DIMS) for i in range(CAPTURED)),
    ("numbers", "q" * NUMBERS),
)

Value = int | float | tuple[int, ...]


def head_struct(names: Collection[str]) -> struct.Struct:
    """Return the struct that packs a head from the addresses ``names`` and seqlen_k. All other addresses are null.

    Raises ValueError unless the names are in the order of ADDRESSES.
    """
    if [name for name in ADDRESSES if name in names] != list(names):
        raise ValueError(f"addresses must be in the order of struct Params, got {', '.join(names)}")
    return struct.Struct("<" + "".join("Q" if name in names else "8x" for name in ADDRESSES) + "i4x")


def tail_struct(names: Collection[str]) -> struct.Struct:
    """Return the struct that packs a tail from the addresses ``names`` (in TAIL_ADDRESSES' order); others are null.

    If a name is one of FLEX_ADDRESSES, which follow, the tail includes all of these.
    """
    all_names = (*TAIL_ADDRESSES, *FLEX_ADDRESSES) if set(names) & set(FLEX_ADDRESSES) else TAIL_ADDRESSES
    return struct.Struct("<" + "".join("Q" if name in names else "8x" for name in all_names))


def pack_rest(fields: dict[str, Value], has_flex: bool = False) -> bytes:
    """Return the bytes after the head. Fields that are not given, such as the tail's addresses, are 0.

    fields: values by name; strides are (batch, row, head) in elements. Raises KeyError for an unknown name.
    """
    kinds = (*REST_FIELDS, *FLEX_FIELDS) if has_flex else REST_FIELDS
    unknown = fields.keys() - dict(kinds).keys()
    if unknown:
        raise KeyError(f"struct Params has no {', '.join(sorted(unknown))}")
    flat: list[int | float] = []
    for name, kind in kinds:
        value = fields.get(name, (0,) * len(kind))
        flat += value if isinstance(value, tuple) else (value,)
    return _rest_struct(has_flex).pack(*flat)


def split_at_tail(packed: bytes, tail: struct.Struct | None) -> tuple[bytes, bytes]:
    """Cut the bytes of ``pack_rest`` into those before and after the tail; (all, b"") if no tail is packed."""
    if tail is None:
        return packed, b""
    start = _rest_struct(False).size - 8 * len(TAIL_ADDRESSES)
    return packed[:start], packed[start + tail.size :]


@functools.cache
def _rest_struct(has_flex: bool) -> struct.Struct:
    kinds = (*REST_FIELDS, *FLEX_FIELDS) if has_flex else REST_FIELDS
    return struct.Struct("@" + "".join(kind for _, kind in kinds))  # aligned as in C
