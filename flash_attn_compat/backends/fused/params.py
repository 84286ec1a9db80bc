"""The kernels' one argument, struct Params of cuda/params.cuh, byte for byte.

It begins with the head, which each call packs: addresses, and the length of keys. All calls of a plan share the rest.
It ends with the tail, which calls with descales pack: their addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Collection

# Names in the order of the C struct. Types are struct's codes: Q an address, q a long long, i an int, f a float.
ADDRESSES = (
    "q", "k", "v", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table", "bias",
    "rng_state", "k_new", "v_new", "rotary_cos", "rotary_sin", "q_rotated", "dout", "out", "lse", "dlse", "dq", "dk",
    "dv", "lse_true", "absmax", "bias_map", "bias_of_rows", "absmax_dout", "delta", "copies", "marks",
    "counters", "parts",
)  # fmt: skip
TAIL_ADDRESSES = "k_descale", "v_descale"
_STRIDES = (
    "q_s", "k_s", "v_s", "out_s", "dout_s", "dq_s", "dk_s", "dv_s", "k_new_s", "v_new_s", "q_rotated_s", "bias_s",
)  # fmt: skip
_LONGS = ("lse_batch", "lse_head")
_INTS = (
    "slopes_batch", "table_stride", "batch", "nheads", "nheads_k", "group", "seqlen_q", "total_q", "total_k",
    "seqlen_new", "head_dim", "head_dim_v", "window_left", "window_right", "page_size", "pages_per_sequence",
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
_REST_STRUCT = struct.Struct("<" + "".join(kind for _, kind in REST_FIELDS))

Value = int | float | tuple[int, int, int]


def head_struct(names: Collection[str]) -> struct.Struct:
    """Return the struct that packs a head from the addresses ``names`` and seqlen_k. All other addresses are null.

    Raises ValueError unless the names are in the order of ADDRESSES.
    """
    if [name for name in ADDRESSES if name in names] != list(names):
        raise ValueError(f"addresses must be in the order of struct Params, got {', '.join(names)}")
    return struct.Struct("<" + "".join("Q" if name in names else "8x" for name in ADDRESSES) + "i4x")


def tail_struct(names: Collection[str]) -> struct.Struct:
    """Return the struct that packs a tail: the addresses ``names`` in the order of TAIL_ADDRESSES; others are null."""
    return struct.Struct("<" + "".join("Q" if name in names else "8x" for name in TAIL_ADDRESSES))


def pack_rest(fields: dict[str, Value]) -> bytes:
    """Return the bytes after the head. A field that is not given is 0, the tail's addresses among them.

    fields: by name; strides are (batch, row, head) in elements. Raises KeyError for an unknown name.
    """
    unknown = fields.keys() - dict(REST_FIELDS).keys()
    if unknown:
        raise KeyError(f"struct Params has no {', '.join(sorted(unknown))}")
    flat: list[int | float] = []
    for name, kind in REST_FIELDS:
        value = fields.get(name, (0,) * len(kind))
        flat += value if isinstance(value, tuple) else (value,)
    return _REST_STRUCT.pack(*flat)
