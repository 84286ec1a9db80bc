"""Find the tanh of a soft cap, for which op_tanh_near is good enough: fast, and within 1e-7 of tanh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

# The largest soft cap that may use op_tanh_near: its absolute error times the cap is less than scores' rounding.
MOST_CAP = 1024.0
# Operators that make an absolute error no larger, sums, and operators that take the derivative from tanh's result.
_KEEPING = frozenset({
    "neg", "abs", "relu", "where", "minimum", "maximum", "clamp", "clamp_min", "clamp_max",
    "masked_fill", "detach", "alias", "clone", "to", "_to_copy", "convert_element_type",
})  # fmt: skip
_SUMS = frozenset({"add", "sub", "rsub"})
_ENDS = frozenset({"output", "tanh_backward"})


def is_soft_cap(tanh: Node) -> bool:
    """Whether a tanh is a soft cap's: of a number divided by up to MOST_CAP, and no operator enlarges its error.

    A logarithm, or a quotient by the result, would make the absolute error large where the result is small.
    """
    factor = _factor(tanh.args[0])
    if factor is None or factor < 1 / MOST_CAP:
        return False
    errors = {tanh: 1.0}  # in parts of tanh's own error
    for node in tanh.graph.nodes:
        if errors.keys().isdisjoint(node.all_input_nodes) or name_of(node) in _ENDS:
            continue
        errors[node] = _error(node, errors)
        if not errors[node] <= MOST_CAP:
            return False
    return True


def _error(node: Node, errors: Mapping[Node, float]) -> float:
    """Return the absolute error of a node's result, from those of its arguments; infinite if unknown."""
    name, factor = name_of(node), _factor(node)
    of = [errors[x] for x in node.all_input_nodes if x in errors]
    if factor is not None:
        return factor * of[0]
    nodes = [x for x in node.args if isinstance(x, Node)]
    if name in _SUMS and not node.kwargs and len(node.args) == 2:  # others have a factor
        return sum(errors.get(x, 0.0) for x in nodes)
    if name == "mul" and len(nodes) == 2:
        return math.prod(errors.get(x, 1.0) for x in nodes)
    return max(of) if name in _KEEPING else math.inf


def _factor(x: Any) -> float | None:
    """Return the absolute value of the number by which a node multiplies its argument; None for other nodes."""
    name = name_of(x) if isinstance(x, Node) else ""
    if name not in ("mul", "div") or x.kwargs:  # a quotient that is rounded jumps
        return None
    number = x.args[1]
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number:
        return None
    return abs(number) if name == "mul" else 1 / abs(number)


def name_of(node: Node) -> str:
    """Return the name of a node's operator, "output" for the graph's outputs, and "" for other nodes."""
    return "output" if node.op == "output" else str(getattr(node.target, "_opname", ""))
