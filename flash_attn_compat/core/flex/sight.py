"""Print flex_sight, a C++ function that tells which scores of a rectangle a mask_mod shows: some, all or none.

A warp skips a tile in which mask_mod hides everything, and does not call mask_mod in a tile in which it hides nothing.
The function uses interval arithmetic over the rows and keys of the rectangle. An integer becomes its least and greatest
value. A condition becomes two: whether it may hold for some score, and whether it holds for all. A condition on unknown
numbers, such as those of captured tensors, may hold for some and need not hold for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from flash_attn_compat.core.flex.capture import Argument, Captured
from flash_attn_compat.core.flex.operators import FULL, SAME
from flash_attn_compat.core.flex.ranges import MOST_INDEX, Ranges

# Bit 0 of flex_sight's result: whether some score may be visible; bit 1: whether all are. Kernels call it only if
# FLEX_SIGHT is defined.
_TEXT = """#define FLEX_SIGHT
DEVICE int flex_sight(const FlexParams &f, int b, int h, int q, int q_last, int kv, int kv_last) {{
{}  return (int)({}) | (int)({}) << 1;
}}
"""
_MOST_INTEGER = 2**30  # the sum of two integers below this does not wrap
_INTEGERS = torch.int32, torch.int64


class Between(NamedTuple):
    """An integer's least and greatest value, in C++."""

    least: str
    most: str


class Holds(NamedTuple):
    """Whether a condition may hold for some score, and whether it holds for all, in C++."""

    some: str
    all: str


Value = Between | Holds | None
_UNKNOWN = Holds("true", "false")


def print_sight(mask: Captured, output: Any) -> str:
    """Return the C++ text of flex_sight, "" if it would know nothing of any rectangle. output: mask_mod's result"""
    lines: list[str] = []
    values: dict[Node, Value] = {}
    ranges = Ranges()
    arguments = iter((*mask.names, *mask.arguments))
    for node in mask.graph.graph.nodes:
        if node.op == "placeholder":
            argument = next(arguments)
            values[node] = _argument(argument)
            if argument in ("q", "kv"):
                ranges.found[node] = (0, MOST_INDEX - 1)
        elif node.op == "call_function":
            found = _operator(node, values, ranges)
            values[node] = _named(found, lines) if found is not None else None
    found = values.get(output)
    if not isinstance(found, Holds) or found == _UNKNOWN:
        return ""
    return _TEXT.format("".join(f"  {line}\n" for line in lines), *found)


def _named(value: Between | Holds, lines: list[str]) -> Between | Holds:
    """Assign a value's two expressions to C++ variables, in ``lines``; return a value with the variables' names."""
    names = []
    for text in value:
        if text.replace("_", "").isalnum() or text.isdigit():
            names.append(text)
            continue
        names.append(f"s{len(lines)}")
        lines.append(f"const {'bool' if isinstance(value, Holds) else 'int'} {names[-1]} = {text};")
    return type(value)(*names)


def _argument(argument: str | Argument) -> Value:
    """Return what is known of an argument: nothing of a captured integer, which PyTorch may wrap before it compares."""
    if argument == "q" or argument == "kv":
        return Between(argument, f"{argument}_last")
    return Between(argument, argument) if argument == "b" or argument == "h" else None


def _operator(node: Node, values: Mapping[Node, Value], ranges: Ranges) -> Value:
    """Return what is known of an operator's result; None for a number if nothing is known of it."""
    example, name = node.meta.get("val"), str(getattr(node.target, "_opname", ""))
    if not isinstance(example, Tensor) or example.dim():
        return None
    is_condition = example.dtype == torch.bool
    if name in FULL and isinstance(number := node.args[FULL[name]], (bool, int)):
        if not is_condition and example.dtype not in _INTEGERS:  # fp32 may round the number
            return None
        return _literal(bool(number) if is_condition else number)
    of = [values.get(x) if isinstance(x, Node) else _literal(x) for x in node.args]
    if name in SAME and of:
        kept = of[0] if isinstance(of[0], Holds if is_condition else Between) else None
        return kept if is_condition or example.dtype in _INTEGERS else None
    if is_condition:
        return _UNKNOWN if node.kwargs else _condition(name, of)  # a sum of booleans may have a factor
    if example.dtype not in _INTEGERS or node.kwargs or not all(isinstance(x, Between) for x in of):
        return None
    numbers = [x for x in of if isinstance(x, Between)]
    return _integer(name, node, numbers, ranges)


def _literal(x: Any) -> Value:
    if isinstance(x, bool):
        return Holds(*[str(x).lower()] * 2)
    if isinstance(x, int) and abs(x) < _MOST_INTEGER:
        return Between(*[f"({x})" if x < 0 else f"{x}"] * 2)
    return None


def _condition(name: str, of: list[Value]) -> Holds:
    match name, of:
        case "lt" | "le" | "gt" | "ge" | "eq" | "ne", [Between() as a, Between() as b]:
            return _comparison(name, a, b)
        case "bitwise_not" | "logical_not", [Holds() as a]:
            return Holds(f"!{a.all}", f"!{a.some}")
        case "bitwise_and" | "logical_and" | "__and__" | "mul", [a, b]:
            x, y = _known(a), _known(b)
            return Holds(f"{x.some} & {y.some}", f"{x.all} & {y.all}")
        case "bitwise_or" | "logical_or" | "__or__" | "add", [a, b]:
            x, y = _known(a), _known(b)
            return Holds(f"{x.some} | {y.some}", f"{x.all} | {y.all}")
    return _UNKNOWN


def _known(x: Value) -> Holds:
    return x if isinstance(x, Holds) else _UNKNOWN


def _comparison(name: str, a: Between, b: Between) -> Holds:
    if name in ("gt", "ge"):
        return _comparison("lt" if name == "gt" else "le", b, a)
    if name in ("lt", "le"):
        sign = "<" if name == "lt" else "<="
        return Holds(f"{a.least} {sign} {b.most}", f"{a.most} {sign} {b.least}")
    meet = f"({a.least} <= {b.most}) & ({b.least} <= {a.most})"
    alike = f"({a.least} == {a.most}) & ({b.least} == {b.most}) & ({a.least} == {b.least})"
    return Holds(meet, alike) if name == "eq" else Holds(f"!({alike})", f"!({meet})")


def _integer(name: str, node: Node, of: list[Between], ranges: Ranges) -> Between | None:
    factor = node.args[1] if len(node.args) == 2 else None
    if name == "floor_divide" and isinstance(factor, int) and factor > 0:
        low, high = ranges.of(node.args[0])
        if -_MOST_INTEGER < low <= high < _MOST_INTEGER:
            ranges.found[node] = (low // factor, high // factor)
            return Between(*(f"op_floor_divide({x}, {factor})" for x in of[0]))
    low, high = ranges.of(node)
    if not -_MOST_INTEGER < low <= high < _MOST_INTEGER:
        return None
    match name, of:
        case "add", [a, b]:
            return Between(f"{a.least} + {b.least}", f"{a.most} + {b.most}")
        case "sub", [a, b]:
            return Between(f"{a.least} - {b.most}", f"{a.most} - {b.least}")
        case "mul", [a, b] if isinstance(factor, int):
            x, y = (f"{each} * {b.least}" for each in a)
            return Between(x, y) if factor >= 0 else Between(y, x)
        case "neg", [a]:
            return Between(f"-{a.most}", f"-{a.least}")
        case "abs", [a]:
            return Between(f"max(max({a.least}, -{a.most}), 0)", f"max({a.most}, -{a.least})")
        case "minimum" | "maximum", [a, b]:
            function = name[:3]
            return Between(f"{function}({a.least}, {b.least})", f"{function}({a.most}, {b.most})")
    return None
