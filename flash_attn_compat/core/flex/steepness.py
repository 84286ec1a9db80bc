"""Bound the derivative of a score_mod: flex_steepest, a C++ function of b and h that no slope of that head exceeds.

Where bf16 is computed in fp16, kernels scale dS by this bound. Numbers that depend on b, h and captured arguments alone
are computed. Of every other number only the largest magnitude that it may have is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from flash_attn_compat.core.flex.caps import name_of
from flash_attn_compat.core.flex.capture import Captured
from flash_attn_compat.core.flex.operators import CONSTANT, FULL, SAME, literal

_VARYING = frozenset({"score", "q", "kv"})
# Operators whose results are at most 1, and the derivatives of two of these, in parts of the derivative after them.
_AT_MOST_ONE = frozenset({"tanh", "sigmoid", "sin", "cos", "erf", "sign", "sgn"})
_DERIVATIVES = {"tanh_backward": "1.f", "sigmoid_backward": "0.25f"}
_LARGER = frozenset({"minimum", "maximum", "fmin", "fmax"})


class Bound(NamedTuple):
    """Lines of C++, and the magnitude that they compute."""

    lines: str
    most: str


def find_known(captured: Captured, output: Any) -> list[Node]:
    """Return the numbers that ``find_bound`` needs in C++: those that depend on b, h and captured arguments alone."""
    known, needed = _known(captured), _inputs_of(output)
    return [x for x in needed if x in known and _is_number(x) and (x is output or any(u not in known for u in x.users))]


def find_bound(captured: Captured, output: Any, in_float: Callable[[Node], str]) -> Bound | None:
    """Return the largest magnitude of a graph's output; None if it has no known bound.

    in_float: returns a node of ``find_known`` as a C++ float
    """
    known, found, lines = {*find_known(captured, output)}, dict[Node, str | None](), list[str]()

    def most(x: Any) -> str | None:
        if isinstance(x, Node):
            return found.get(x)
        return literal(abs(float(x)), "float") if isinstance(x, (bool, int, float)) else None

    for node in _inputs_of(output):
        text = f"fabsf({in_float(node)})" if node in known else _most(node, most)
        condition = node.args[0] if name_of(node) == "where" else None
        if isinstance(condition, Node) and condition in known and node not in known:
            text = _joined(map(most, node.args[1:]), " : ")
            text = text and f"{in_float(condition)} != 0.f ? {text}"
        if text is not None:
            lines.append(f"  const float most{len(lines)} = {text};\n")
            text = f"most{len(lines) - 1}"
        found[node] = text
    result = most(output)
    return None if result is None else Bound("".join(lines), result)


def _most(node: Node, most: Callable[[Any], str | None]) -> str | None:
    """Return the largest magnitude of a call's result in C++, from those of its arguments; None if unknown."""
    example, name, args = node.meta.get("val"), name_of(node), node.args
    if node.op != "call_function" or not isinstance(example, Tensor) or example.dim():
        return None
    if name in CONSTANT:
        return literal(float(CONSTANT[name]), "float")
    if example.dtype == torch.bool or name in _AT_MOST_ONE:
        return "1.f"
    if not example.dtype.is_floating_point:
        return None
    if name in FULL:
        return most(args[FULL[name]])
    if name in SAME or name in ("neg", "abs", "relu"):
        return most(args[0])
    if name in _DERIVATIVES:
        return _product(most(args[0]), _DERIVATIVES[name]) if name_of_result(args[1]) == name[:-9] else None
    if name == "threshold_backward":
        return most(args[0])
    if name in ("where", "masked_fill"):
        return _larger(most(x) for x in (args[1:] if name == "where" else args[::2]))
    if node.kwargs or len(args) != 2:
        return None
    if name in ("add", "sub", "rsub"):
        return _joined(map(most, args), " + ")
    if name == "div":
        return _joined(map(most, args), " / ") if isinstance(args[1], (int, float)) and args[1] else None
    if name == "mul":
        return _product(*map(most, args))
    return _larger(map(most, args)) if name in _LARGER else None


def name_of_result(x: Any) -> str:
    """Return the name of the operator that computed a number, before copies of it."""
    while isinstance(x, Node) and name_of(x) in SAME:
        x = x.args[0]
    return name_of(x) if isinstance(x, Node) else ""


def _joined(texts: Iterable[str | None], sign: str) -> str | None:
    found = [*texts]
    return None if None in found else sign.join(text for text in found if text)


def _product(*texts: str | None) -> str | None:
    return _joined(texts, " * ")


def _larger(texts: Iterable[str | None]) -> str | None:
    both = _joined(texts, ", ")
    return None if both is None else f"fmaxf({both})"


def _known(captured: Captured) -> set[Node]:
    """Return the nodes that do not depend on the score, q or kv."""
    found: set[Node] = set()
    arguments = iter((*captured.names, *captured.arguments))
    for node in captured.graph.graph.nodes:
        varies = next(arguments) in _VARYING if node.op == "placeholder" else False
        if not varies and all(x in found for x in node.all_input_nodes):
            found.add(node)
    return found


def _inputs_of(output: Any) -> list[Node]:
    """Return the nodes that ``output`` depends on and itself, in the graph's order."""
    found: set[Node] = set()
    left = [output] if isinstance(output, Node) else []
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return [node for node in output.graph.nodes if node in found] if found else []


def _is_number(node: Node) -> bool:
    example = node.meta.get("val")
    return not isinstance(example, Tensor) or not example.dim()
