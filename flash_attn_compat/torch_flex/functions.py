"""A call's score_mod and mask_mod as C++ text, made once for each pair of graphs that PyTorch traced of them.

``dump`` puts the C++ text with its flags and checks into one string. A compiled graph passes the string to our operator
in each call, since inductor keeps graphs on disk, and a later process runs them without tracing the functions.
"""

from __future__ import annotations

import functools
import json
import operator
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.fused.flex import Mods
from flash_attn_compat.core.flex import capture, printer
from flash_attn_compat.core.flex.operators import Declined
from flash_attn_compat.core.flex.printed import Bound, Number, Printed
from flash_attn_compat.torch_flex.calls import FlexCall

_MOST = 1024
# Parts of names of functions that read the shape of a tensor.
_OF_SIZES = "size", "shape", "numel", "nelement", "stride", "getattr", "len"


class Functions(NamedTuple):
    """A call's functions: ``mods`` for the kernels; ``printed``, which says what they read of captured arguments."""

    mods: Mods
    printed: Printed


def of_printed(printed: Printed) -> Functions:
    return Functions(Mods(printed.text, printed.has_score, printed.has_mask, printed.gradients), printed)


# ---- A cache of printed functions, found by the FX graphs that dynamo keeps for an eager call


class _Entry(NamedTuple):
    score_mod: weakref.ref[Any]
    mask_mod: weakref.ref[Any]
    found: Functions | str


_entries: dict[tuple[Any, ...], _Entry] = {}
_adding = threading.Lock()


def find(call: FlexCall, backward: bool) -> Functions | str:
    """Return score_mod and mask_mod of an eager call as C++ text, or the reason to decline the call.

    backward: include the gradient of score_mod
    """
    device, tensors = call.query.device, [x for x in call.captured if isinstance(x, Tensor)]
    signature: list[Any] = [
        (x.dtype, x.dim(), x.device == device, backward and x.requires_grad) if isinstance(x, Tensor) else type(x)
        for x in call.captured
    ]
    if tensors and any(map(_reads_sizes, (call.score_mod, call.mask_mod))):
        signature += [(x.shape, x.stride()) for x in tensors]  # the C++ text has them as numbers
    key = id(call.score_mod), id(call.mask_mod), backward, device, tuple(signature)
    entry = _entries.get(key)
    if entry is not None and entry.score_mod() is call.score_mod and entry.mask_mod() is call.mask_mod:
        return entry.found
    found = _print(call, backward)
    with _adding:
        while len(_entries) >= _MOST:
            del _entries[next(iter(_entries))]
        _entries[key] = _Entry(weakref.ref(call.score_mod), weakref.ref(call.mask_mod), found)
    return found


def _print(call: FlexCall, backward: bool) -> Functions | str:
    device, own, others = call.query.device, call.score_mod_other_buffers, call.mask_mod_other_buffers
    if any(map(_holds_tensor, (call.score_mod, call.mask_mod))):
        return "a function holds a tensor of its own, which may change from call to call: capture it instead"
    try:
        score = capture.capture_score(call.score_mod, own, device)
        mask = capture.capture_mask(call.mask_mod, others, device, len(own))
        joint = capture.capture_joint(call.score_mod, own, device) if backward else None
        return of_printed(printer.print_functions(score, mask, joint))
    except Declined as reason:
        return str(reason)


def _reads_sizes(function: Any) -> bool:
    """Whether a function may read the shape of a captured tensor, as exported graphs with dynamic shapes do."""
    graphs = [module.graph for module in function.modules() if is_graph(module)] if is_graph(function) else []
    calls = [node for graph in graphs for node in graph.nodes if node.op.startswith("call_")]
    return any(node.op == "call_module" or any(word in str(node.target) for word in _OF_SIZES) for node in calls)


def _holds_tensor(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph holds a tensor as an attribute, instead of getting it as an argument."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    return any(isinstance(operator.attrgetter(name)(graph), Tensor) for name in names)


# ---- The captured arguments of a call


def captured_tensors(functions: Functions, captured: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the captured tensors in the order in which the C++ text reads them."""
    places = functions.printed.tensors
    return tuple([captured[place] for place in places]) if places else ()


def captured_numbers(functions: Functions, captured: Sequence[Any]) -> tuple[int, ...]:
    """Return the captured numbers in the order in which the printed C++ reads them.

    An integer stays an integer. A 0-dim float tensor of the CPU becomes the int32 with the bits of its fp32 value.
    """
    numbers = functions.printed.numbers
    return tuple([_as_integer(captured[number.position], number.is_float) for number in numbers]) if numbers else ()


def _as_integer(x: Any, is_float: bool) -> int:
    """Return ``x`` as an int; of a float, the int32 with the bits of its fp32 value."""
    if is_float:
        (bits,) = struct.unpack("<i", struct.pack("<f", float(x)))
        return int(bits)
    return int(x)


def find_short_tensor(functions: Functions, tensors: Sequence[Tensor], call: Sequence[Tensor]) -> str | None:
    """Return the reason to decline if a captured tensor is too short for some index b, h, q or kv of a call, or None.

    tensors: as ``captured_tensors`` returns them; call: q and k first
    """
    ends: dict[str, int] = {}
    if functions.printed.bounds:
        (batch, heads, rows, _), keys = call[0].shape, call[1].shape[2]
        ends = {"b": batch, "h": heads, "q": rows, "kv": keys}
    for place, axis, name in functions.printed.bounds:
        if tensors[place].shape[axis] < ends[name]:
            return (
                f"a captured tensor of shape {tuple(tensors[place].shape)} is indexed by {name} in axis {axis}, and "
                f"{name} goes up to {ends[name] - 1}"
            )
    for place, axis in functions.printed.indexed:
        if not tensors[place].shape[axis]:
            return f"a captured tensor of shape {tuple(tensors[place].shape)} is indexed and empty"
    return None


def captured_gradients(functions: Functions, gradients: Sequence[Any], count: int) -> tuple[Any, ...]:
    """Return a gradient or None for each of the ``count`` captured arguments. gradients: in the C++ text's order"""
    found: list[Any] = [None] * count
    for place, gradient in zip(functions.printed.gradients, gradients):
        found[functions.printed.tensors[place]] = gradient
    return tuple(found)


# ---- The functions as a string


def dump(functions: Functions) -> str:
    """Return the functions as a string for ``load``."""
    return json.dumps(functions.printed._asdict(), sort_keys=True)


@functools.lru_cache(_MOST)
def load(text: str) -> Functions:
    """Return the functions from a string of ``dump``."""
    fields = json.loads(text)
    printed = Printed(
        fields["text"], tuple(fields["tensors"]), tuple(Number(*each) for each in fields["numbers"]),
        tuple(Bound(*each) for each in fields["bounds"]), tuple(tuple(each) for each in fields["indexed"]),
        fields["has_score"], fields["has_mask"], tuple(fields["gradients"]),
    )  # fmt: skip
    return of_printed(printed)


def positions(functions: Functions) -> tuple[list[int], list[int], list[int]]:
    """Return where the text's tensors, numbers in CPU tensors, and integers are among the captured arguments."""
    numbers = functions.printed.numbers
    return (
        list(functions.printed.tensors),
        [number.position for number in numbers if number.is_on_host],
        [number.position for number in numbers if not number.is_on_host],
    )


def number_order(functions: Functions, hosts: Sequence[Tensor], integers: Sequence[int]) -> tuple[int, ...]:
    """Return all numbers in the C++ text's order. hosts, integers: CPU tensors and integers, found by ``positions``"""
    on_host, others = iter(hosts), iter(integers)
    return tuple(
        _as_integer(next(on_host) if number.is_on_host else next(others), number.is_float)
        for number in functions.printed.numbers
    )


def is_graph(function: object) -> bool:
    """Whether a score_mod or mask_mod is a graph that PyTorch traced, rather than a Python function."""
    return isinstance(function, torch.fx.GraphModule)
