"""Find the tanh of a soft cap, for which op_tanh_near is good enough: fast, and within 1e-7 of tanh."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

# The largest soft cap that may use op_tanh_near: its absolute error times the cap is less than scores' rounding.
MOST_CAP = 1024.0
# Operators that make an absolute error no larger, and others that take the derivative from tanh's result.
_KEEPING = frozenset({
    "add", "sub", "rsub", "neg", "abs", "relu", "where", "minimum", "maximum", "clamp", "clamp_min", "clamp_max",
    "masked_fill", "detach", "alias", "clone", "to", "_to_copy", "convert_element_type",
})  # fmt: skip
_ENDS = frozenset({"output", "tanh_backward"})


def is_soft_cap(tanh: Node) -> bool:
    """Whether a tanh is a soft cap's: of a number divided by up to MOST_CAP, and no operator enlarges its error.

    A logarithm, or a quotient by the result, would make the absolute error large where the result is small.
    """
    factor = _factor(tanh.args[0])
    if factor is None or factor < 1 / MOST_CAP:
        return False
    seen, left = {tanh}, [tanh]
    while left:
        users = [user for user in left.pop().users if user not in seen]
        if not all(map(_keeps_error, users)):
            return False
        seen.update(users)
        left += [user for user in users if name_of(user) not in _ENDS]
    return True


def _keeps_error(user: Node) -> bool:
    name, factor = name_of(user), _factor(user)
    if factor is not None:
        return factor <= MOST_CAP
    return name in _KEEPING or name in _ENDS or (name == "mul" and isinstance(user.args[1], Node))


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
