"""The table of operators that score_mods and mask_mods may use, and C++ literals.

Every operator is one call of a function in cuda/scores/flex_operators.cuh. Nothing else of a graph reaches the
compiler: text consists of the table's function names, of literals made here, and of names that the printer numbers.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import torch
from torch.fx import Node

# The C++ type that stands for each dtype. 16-bit floats are computed in fp32, as in PyTorch's compiled graphs.
C_TYPES = {
    torch.bool: "bool", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "int",
    torch.int64: "i64", torch.float16: "float", torch.bfloat16: "float", torch.float32: "float",
}  # fmt: skip
# Functions that load an element of a captured tensor.
LOADS = {
    torch.bool: "flex_bool", torch.uint8: "flex_u8", torch.int8: "flex_i8", torch.int16: "flex_i16",
    torch.int32: "flex_i32", torch.int64: "flex_i64", torch.float16: "flex_half", torch.bfloat16: "flex_bfloat16",
    torch.float32: "flex_float",
}  # fmt: skip
INTEGERS = {"u8": 8, "i8": 7, "i16": 15, "int": 31, "i64": 63}  # bits of a number without its sign


class Declined(Exception):
    """The reason why our kernels cannot compute a caller's functions."""


class Rule(NamedTuple):
    """How an operator is printed in C++: as a call of ``function``.

    operands: a letter for each operand's type: R the result's type, C the type in which PyTorch compares the first
        two operands, F float, B bool
    """

    function: str
    operands: str


def _same(names: str, operands: str) -> dict[str, Rule]:
    return {name: Rule(f"op_{name}", operands) for name in names.split()}


OPERATORS: dict[str, Rule] = {
    **_same("add sub mul floor_divide remainder fmod minimum maximum fmin fmax pow", "RR"),
    **_same("eq ne lt le gt ge", "CC"),
    **_same("logical_and logical_or logical_xor", "BB"),
    **_same("neg abs sign relu floor ceil trunc round", "R"),
    **_same("exp exp2 expm1 log log2 log10 log1p tanh sigmoid sqrt rsqrt reciprocal", "F"),
    **_same("sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc", "F"),
    **_same("isnan isinf isneginf isposinf signbit", "F"),
    **_same("atan2 hypot copysign tanh_backward sigmoid_backward", "FF"),
    **_same("threshold_backward", "FFF"),
    **_same("where", "BRR"),
    "true_divide": Rule("op_true_divide", "FF"),
    "divide_trunc": Rule("op_divide", "RR"),
    "square": Rule("op_mul", "RR"),
    "sgn": Rule("op_sign", "R"),
    "clamp_min": Rule("op_maximum", "RR"),
    "clamp_max": Rule("op_minimum", "RR"),
    "logical_not": Rule("op_not", "B"),
    "bitwise_not": Rule("op_not", "R"),
    "bitwise_and": Rule("op_and", "RR"),
    "bitwise_or": Rule("op_or", "RR"),
    "bitwise_xor": Rule("op_xor", "RR"),
    "__and__": Rule("op_and", "RR"),
    "__or__": Rule("op_or", "RR"),
    "__xor__": Rule("op_xor", "RR"),
    "bitwise_left_shift": Rule("op_left_shift", "RR"),
    "bitwise_right_shift": Rule("op_right_shift", "RR"),
    "__lshift__": Rule("op_left_shift", "RR"),
    "__rshift__": Rule("op_right_shift", "RR"),
    "tanh_near": Rule("op_tanh_near", "F"),
}
PREDICATES = frozenset({"isnan", "isinf", "isneginf", "isposinf", "signbit"})
# Operators that return their argument's number, converted to the result's dtype at most.
SAME = frozenset({
    "detach", "clone", "alias", "lift_fresh_copy", "lift_fresh", "view", "reshape", "expand", "squeeze", "unsqueeze",
    "_to_copy", "to", "convert_element_type", "contiguous", "positive", "_unsafe_view", "view_of", "permute",
})  # fmt: skip
# Operators that fill a tensor with one number. FULL: its position among the arguments; CONSTANT: the number itself.
FULL = {"full": 1, "scalar_tensor": 0, "full_like": 1, "new_full": 2, "fill": 1}
CONSTANT = {
    "ones_like": 1, "zeros_like": 0, "new_ones": 1, "new_zeros": 0, "ones": 1, "zeros": 0, "_efficientzerotensor": 0,
}  # fmt: skip
# Keyword arguments that the printer ignores: it takes the result's dtype from the node's example value.
IGNORED_KEYWORDS = frozenset({
    "dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "copy", "implicit",
})  # fmt: skip
# Python's operators on captured integers, and those of torch.sym_*. Their results are i64.
INTEGER_OPERATORS = {
    "add": "op_add", "sub": "op_sub", "mul": "op_mul", "floordiv": "op_floor_divide", "mod": "op_remainder",
    "neg": "op_neg", "sym_max": "op_maximum", "sym_min": "op_minimum", "pow": "op_pow",
}  # fmt: skip


def literal(x: float | int | bool, c_type: str) -> str:
    """Return a Python number as a C++ literal of ``c_type``. Raises Declined if the type cannot hold it."""
    if c_type == "float":
        return _float_literal(float(x))
    if isinstance(x, float) and not x.is_integer():
        if not math.isfinite(x):
            raise Declined(f"the number {x} as an integer")
        x = math.trunc(x)
    number = int(x)
    if c_type == "bool":
        return "true" if number else "false"
    low, high = 0 if c_type == "u8" else -(2 ** INTEGERS[c_type]), 2 ** INTEGERS[c_type]
    if not low <= number < high:
        raise Declined(f"the number {number} as a {c_type}")
    text = f"{number}LL" if number > -(2**63) else "(-9223372036854775807LL - 1)"
    return f"({c_type}){text}"


def _float_literal(x: float) -> str:
    if math.isnan(x):
        return "__int_as_float(0x7fffffff)"
    try:
        (x,) = struct.unpack("f", struct.pack("f", x))  # as PyTorch rounds it
    except OverflowError:
        x = math.copysign(math.inf, x)
    if math.isinf(x):
        return "POS_INF" if x > 0 else "NEG_INF"
    text = f"{x:.9g}"
    return f"{text if any(c in text for c in '.e') else text + '.'}f"


def converted(text: str, own: str, wanted: str) -> str:
    """Return C++ that converts a value of the type ``own`` to ``wanted``."""
    if own == wanted:
        return text
    if own == "float" and wanted == "u8":  # negative floats wrap in PyTorch, and a GPU's own conversion makes them 0
        return f"(u8)(i64)({text})"
    return f"({text} != 0)" if wanted == "bool" else f"({wanted})({text})"


def division_factor(number: object, exact: bool) -> float | None:
    """Return 1 / number if multiplying by it does as well as dividing by ``number``; None otherwise.

    exact: whether every bit counts; else the quotient may be off by an ulp
    """
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    if not 2.0**-100 < abs(number) < 2.0**100:
        return None
    return 1.0 / number if not exact or math.frexp(number)[0] in (0.5, -0.5) else None


def rounded_beside(x: Any, other: Any) -> Any:
    """Return a number as PyTorch compares it with ``other``: an element of a 16-bit tensor rounds it to its dtype."""
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not isinstance(other, Node):
        return x
    if getattr(other.target, "_opname", "") not in ("index", "select"):  # a score is fp32 here
        return x
    dtype = other.meta["val"].dtype
    try:
        if dtype == torch.float16:
            return struct.unpack("<e", struct.pack("<e", x))[0]
        if dtype != torch.bfloat16 or not math.isfinite(x):
            return x
        (bits,) = struct.unpack("<I", struct.pack("<f", x))
        return struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0]
    except OverflowError:
        return math.copysign(math.inf, x)
