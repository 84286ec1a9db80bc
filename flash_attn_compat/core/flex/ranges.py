"""Lower and upper bounds of the integers in a graph, computed from the bounds of the indices q and kv."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

# Queries and keys have indices below this: the kernels decline longer sequences.
MOST_INDEX = 2**23
# fp32 holds every integer up to this.
EXACT_FLOAT = 2**24
Range = tuple[float, float]
_ANY: Range = (-float("inf"), float("inf"))
_WRAPS = 2**31  # an int32 beyond this wraps: its range is unknown, and that of what is computed from it


class Ranges:
    """Computes the range of each node that is an integer; infinite if nothing is known of it."""

    def __init__(self) -> None:
        self.found: dict[Node, Range] = {}

    def of(self, x: Any) -> Range:
        if not isinstance(x, Node):
            return (x, x) if isinstance(x, int) else _ANY
        if x not in self.found:
            low, high = self._compute(x)
            self.found[x] = (low, high) if -_WRAPS <= low <= high < _WRAPS else _ANY
        return self.found[x]

    def _compute(self, node: Node) -> Range:
        rule = _RULES.get(str(getattr(node.target, "_opname", ""))) if node.op == "call_function" else None
        if rule is None or node.kwargs:
            return _ANY
        count, compute = rule
        return compute([self.of(x) for x in node.args]) if len(node.args) == count else _ANY


def _mul(of: Sequence[Range]) -> Range:
    (a, b), (c, d) = of
    products = [x * y for x in (a, b) for y in (c, d)]
    return _ANY if any(x != x for x in products) else (min(products), max(products))  # inf times 0 is no number


def _abs(of: Sequence[Range]) -> Range:
    ((low, high),) = of
    return (0 if low <= 0 <= high else min(abs(low), abs(high)), max(abs(low), abs(high)))


_RULES: dict[str, tuple[int, Callable[[Sequence[Range]], Range]]] = {
    "add": (2, lambda of: (of[0][0] + of[1][0], of[0][1] + of[1][1])),
    "sub": (2, lambda of: (of[0][0] - of[1][1], of[0][1] - of[1][0])),
    "mul": (2, _mul),
    "neg": (1, lambda of: (-of[0][1], -of[0][0])),
    "abs": (1, _abs),
    "relu": (1, lambda of: (max(0, of[0][0]), max(0, of[0][1]))),
    "minimum": (2, lambda of: (min(of[0][0], of[1][0]), min(of[0][1], of[1][1]))),
    "maximum": (2, lambda of: (max(of[0][0], of[1][0]), max(of[0][1], of[1][1]))),
}
