"""Find which numbers a joint graph adds to the gradients of captured tensors, and at which indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from flash_attn_compat.core.flex.capture import SCORE_ARGUMENTS, Captured, TensorArgument
from flash_attn_compat.core.flex.operators import CONSTANT, FULL, Declined


class Addition(NamedTuple):
    """A number that each score adds to one element of a captured tensor's gradient.

    indices: the element's index along each axis, graph nodes or integers; value: the number, a graph node
    """

    argument: TensorArgument
    indices: tuple[Any, ...]
    value: Any


def find_additions(joint: Captured) -> list[Addition]:
    """Return everything that a joint graph adds to gradients of captured tensors. Raises Declined for other results.

    joint: as ``capture_joint`` returns it, or PyTorch's own
    """
    (output,) = (node for node in joint.graph.graph.nodes if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else ()
    found = []
    for argument, result in zip(joint.arguments, results[len(SCORE_ARGUMENTS) :]):
        if result is None:
            continue
        assert isinstance(argument, TensorArgument)  # integers have no gradient
        if argument.on_host:
            raise Declined("the gradient of a tensor in the CPU's memory")
        for indices, value in _parts(result):
            if len(indices) != argument.dims:
                raise Declined("the gradient of a captured tensor that is not indexed down to one number")
            found.append(Addition(argument, indices, value))
    return found


def _parts(result: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Split a gradient into terms: yield the indices and the value of each number that is added to it."""
    example = result.meta.get("val") if isinstance(result, Node) else None
    if not isinstance(example, Tensor):
        raise Declined("the gradient of a captured tensor that is no tensor")
    if not example.dim():
        yield (), result
        return
    name, args = getattr(result.target, "_opname", str(result.target)), result.args
    if name == "zeros_and_scatter":
        _, indices, values = args
        yield from _indexed(indices, values)
    elif name in ("index_put", "_unsafe_index_put") and len(args) > 3 and args[3] is True:
        yield from _parts(args[0])
        yield from _indexed(args[1], args[2])
    elif name == "add" and not result.kwargs and len(args) == 2:
        yield from _parts(args[0])
        yield from _parts(args[1])
    elif name in _UNCHANGED:
        yield from _parts(args[0])
    elif not (CONSTANT.get(name) == 0 or (name in FULL and args[FULL[name]] == 0)):
        raise Declined(f"the gradient of a captured tensor by the operator {name}")


# Operators that change no number and no shape.
_UNCHANGED = frozenset({"detach", "clone", "alias", "_to_copy", "to", "convert_element_type", "contiguous"})


def _indexed(indices: Any, values: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if any(index is None for index in indices):
        raise Declined("the gradient of a captured tensor of which an inner axis is indexed")
    for inner, value in _parts(values):
        yield (*indices, *inner), value
