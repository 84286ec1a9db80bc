"""The kernels' one argument, struct Params of cuda/params.cuh, byte for byte."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

# Names in the order of the C struct; its types as struct spells them: Q an address, q a long long, i an int, f a float.
_ADDRESSES = (
    "q", "k", "v", "out", "lse", "lse_true", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table",
    "alibi_slopes", "rng_state", "absmax", "part_out", "part_ml", "counters", "k_new", "v_new", "rotary_cos",
    "rotary_sin", "q_rotated", "dout", "dq", "dk", "dv", "delta",
)  # fmt: skip
_STRIDES = ("q_s", "k_s", "v_s", "out_s", "dout_s", "dq_s", "dk_s", "dv_s", "k_new_s", "v_new_s", "q_rotated_s")
_LONGS = ("lse_batch", "lse_head")
_INTS = (
    "slopes_batch", "table_stride", "batch", "nheads", "nheads_k", "group", "seqlen_q", "seqlen_k", "total_q",
    "total_k", "seqlen_new", "head_dim", "head_dim_v", "window_left", "window_right", "page_size",
    "pages_per_sequence", "num_pages", "tiles", "splits", "rotary_dim",
    "rotary_interleaved", "rotary_rows", "rotary_row_stride", "rotate_rows_apart", "lse_has_position",
    "dropout_limit",
)  # fmt: skip
_FLOATS = ("dropout_scale", "softmax_scale", "softcap")
_LAST = ("zero", "filler")

FIELDS: tuple[tuple[str, str], ...] = (
    *((name, "Q") for name in _ADDRESSES),
    *((name, "qii") for name in _STRIDES),
    *((name, "q") for name in _LONGS),
    *((name, "i") for name in _INTS),
    *((name, "f") for name in _FLOATS),
    *((name, "i") for name in _LAST),
)
_STRUCT = struct.Struct("<" + "".join(kind for _, kind in FIELDS))
SIZE = _STRUCT.size

Value = int | float | tuple[int, int, int]


def offsets() -> dict[str, int]:
    """Bytes from the struct's start, of each field."""
    found, at = {}, 0
    for name, kind in FIELDS:
        found[name] = at
        at += struct.calcsize("<" + kind)
    return found


def pack(fields: dict[str, Value]) -> bytes:
    """The struct with ``fields`` and 0 elsewhere. Strides are (batch, row, head) in elements."""
    unknown = fields.keys() - dict(FIELDS).keys()
    if unknown:
        raise KeyError(f"struct Params has no {', '.join(sorted(unknown))}")
    flat: list[int | float] = []
    for name, kind in FIELDS:
        value = fields.get(name, (0,) * len(kind))
        flat += value if isinstance(value, tuple) else (value,)
    return _STRUCT.pack(*flat)


class Writer(NamedTuple):
    """Writes structs that differ in some numbers only: ``pack(buffer, 0, *in_order((*numbers, *same)))``.

    same: the bytes before, between and behind the numbers' fields, where they are not all 0
    """

    pack: Callable[..., None]
    in_order: Callable[[tuple[int | bytes, ...]], tuple[int | bytes, ...]]
    same: tuple[bytes, ...]


def writer(fields: dict[str, Value], given: Sequence[str]) -> Writer:
    """Of structs that hold ``fields``, and numbers for the names of ``given``, in that order."""
    whole, starts, kinds = pack(fields), offsets(), dict(FIELDS)
    same: list[bytes] = []
    form, order, end = "<", [], 0
    for name in (*sorted(given, key=starts.__getitem__), None):
        start = SIZE if name is None else starts[name]
        between = whole[end:start]
        if any(between):
            order += [len(given) + len(same)]
            same += [between]
        form += f"{len(between)}{'s' if any(between) else 'x'}"
        if name is not None:
            form += kinds[name]
            order += [given.index(name)]
            end = start + struct.calcsize("<" + kinds[name])
    return Writer(struct.Struct(form).pack_into, operator.itemgetter(*order), tuple(same))
