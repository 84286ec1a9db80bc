"""How DTensors are computed: each process has its share of the batch or of the heads; else all is brought together.

PyTorch asks for the rules as soon as an operator meets a DTensor. They are registered then, for importing
torch.distributed.tensor takes seconds. PyTorch has them from 2.5 on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

# Tensors with rows and heads; softmax_lse has its rows behind its heads, and so does what is of its size.
_OF_HEADS = frozenset({"dout", "out", "softmax_lse", "dlse", "q", "k", "v"})


def register_if_needed() -> None:
    """Register the rules if this process has DTensors."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # PyTorch 2.4
        return
    register: Callable[[Any], Callable[[Any], Any]] = register_sharding
    for name, rule in (("attention", _forward), ("attention_backward", _backward)):
        operator = getattr(torch.ops.flash_attn_compat, name).default
        names = tuple(argument.name for argument in operator._schema.arguments)
        register(operator)(functools.partial(_rule, names, rule))


def _forward(given: dict[str, Any], by: str | None) -> list[Any]:
    """Placements of out, softmax_lse, S_dmask and rng_state; what was not asked for has no elements to share out."""
    q = given["q"].ndim
    lse = _placement("softmax_lse", q - 1, by if given["return_lse"] else None)
    return [_placement("out", q, by), lse, _placement("", 1, None), _placement("", 1, None)]


def _backward(given: dict[str, Any], by: str | None) -> list[Any]:
    return [_placement(name, given[name].ndim, by) for name in ("q", "k", "v")]


def _rule(
    names: tuple[str, ...], outputs: Callable[[dict[str, Any], str | None], list[Any]], *arguments: Any
) -> list[tuple[list[Any], list[Any]]]:
    """Pairs of outputs' and arguments' placements that are right, in the order of preference."""
    given = dict(zip(names, arguments))  # PyTorch leaves out the last argument if it has its default
    if given["dropout_p"] > 0.0:
        raise RuntimeError("dropout_p must be 0 for DTensors: each process would draw a mask of its own")
    found = []
    for by in (None, *[by for by in ("batch", "heads") if _divides(given, by)]):
        inputs = [_placement(name, x.ndim, by) if _is_tensor(x) else None for name, x in given.items()]
        found.append((outputs(given, by), inputs))
    return found


def _divides(given: dict[str, Any], by: str) -> bool:
    """Whether a tensor comes in equal shares ``by`` this, into which all tensors can be divided."""
    if by == "batch" and given["cu_seqlens_q"] is not None:
        return False
    parts = max(_parts(x, _dim(name, x.ndim, by)) for name, x in given.items() if name in _OF_HEADS and _is_tensor(x))
    size = given["k"].shape[0 if by == "batch" else -2]
    return bool(parts > 1 and size % parts == 0)


def _parts(x: Any, dim: int | None) -> int:
    """Into how many shares a tensor is cut along ``dim``."""
    found = 1
    for index, placement in enumerate(x.placements):
        found *= x.mesh.size(index) if dim is not None and placement.is_shard(dim) else 1
    return found


def _placement(name: str, ndim: int, by: str | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    dim = None if by is None else _dim(name, ndim, by)
    return Replicate() if dim is None else Shard(dim)


def _dim(name: str, ndim: int, by: str) -> int | None:
    """The axis of sequences or of heads, if the tensor of this name has one."""
    if name in _OF_HEADS:
        return 0 if by == "batch" else ndim - 2
    if name == "alibi_slopes":
        return ndim - 1 if by == "heads" else 0 if ndim == 2 else None
    return None


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "placements")
