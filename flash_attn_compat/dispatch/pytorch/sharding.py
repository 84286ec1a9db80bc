"""Rules by which PyTorch splits our operators over DTensors: by batch or by heads; otherwise it gathers the tensors.

The rules are registered only once a process has DTensors, because importing torch.distributed.tensor takes seconds.
PyTorch takes such rules from 2.5 on. REFUSED lists the calls without a rule.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attn_compat.core.entry import PLAIN

# Features that raise an error in a call with DTensors, with the error's text. docs/distributed.md has the same list.
REFUSED = {
    "dropout": "dropout_p must be 0 for DTensors: each process would draw a mask of its own",
    "caches": "flash_attn_with_kvcache takes no DTensors: give it each process's own heads, x.to_local()",
    "plain tensors beside DTensors": (
        "all tensors of a call must be DTensors, or none: nothing says which share of a plain tensor a process holds. "
        "Use torch.distributed.tensor.distribute_tensor"
    ),
    "second derivatives": "create_graph=True differentiates a backward again, which has no rule for DTensors",
    "torch.func transforms": "torch.func transforms and forward-mode derivatives have no rules for DTensors",
    "PyTorch 2.4": "DTensors need PyTorch 2.5 or newer, which can register rules for them",
}

# Tensors with rows and heads. Their second to last axis is the heads.
_OF_HEADS = frozenset({"dout", "out", "softmax_lse", "dlse", "q", "k", "v"})
_DESCALES = frozenset({"k_descale", "v_descale"})  # (batch or 1, nheads_k or 1)


def register_if_needed() -> None:
    """Register the rules, if this process has imported DTensors."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


def refuse(what: str, detail: str = "") -> NoReturn:
    """Raise the error of a call with DTensors. what: a key of REFUSED; detail: the arguments at fault."""
    raise NotImplementedError(f"{REFUSED[what]}{detail}. DTensors do not go with: {', '.join(REFUSED)}")


def is_distributed(x: object) -> bool:
    """Whether ``x`` is a DTensor."""
    return type(x) not in PLAIN and hasattr(x, "placements")  # hasattr last: Dynamo of PyTorch 2.4 cannot trace it


def check_alike(tensors: Iterable[tuple[str, object]]) -> bool:
    """Return whether all tensors, given as (name, tensor), are DTensors. NotImplementedError if only some are."""
    distributed: list[str] = []
    plain: list[str] = []
    for name, x in tensors:
        if isinstance(x, Tensor):
            (distributed if is_distributed(x) else plain).append(name)
    if distributed and plain:
        refuse("plain tensors beside DTensors", f". DTensors: {', '.join(distributed)}; plain: {', '.join(plain)}")
    return bool(distributed)


def check_call(tensors: Iterable[tuple[str, object]], dropout_p: float) -> None:
    """Raise NotImplementedError if a call's tensors are DTensors and no rule covers the call.

    The rule itself cannot check that: PyTorch caches a rule's answers, under keys without arguments such as dropout_p.
    """
    if check_alike(tensors):
        if dropout_p > 0.0:
            refuse("dropout")
        if not torch.compiler.is_compiling() and not _register():
            refuse("PyTorch 2.4")


def check_untransformed(tensors: Iterable[object]) -> None:
    """Raise NotImplementedError if a transform of torch.func wraps a DTensor."""
    for x in tensors:
        while isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        if is_distributed(x):
            refuse("torch.func transforms")


@functools.cache
def _register() -> bool:
    """Register the rules; return False if this PyTorch has no such registration."""
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # PyTorch 2.4
        return False
    register: Callable[[Any], Callable[[Any], Any]] = register_sharding
    rules = {"attention": _forward, "attention_backward": _backward, "alibi_slopes_backward": _slopes_backward}
    for name, rule in rules.items():
        operator = getattr(torch.ops.flash_attn_compat, name).default
        names = tuple(argument.name for argument in operator._schema.arguments)
        register(operator)(functools.partial(_rule, names, rule))
    return True


def _forward(given: dict[str, Any], by: str | None) -> list[Any]:
    """Return the placements of out, softmax_lse, S_dmask and rng_state. Outputs not asked for are empty: replicated."""
    q = given["q"].ndim
    lse = _placement("softmax_lse", q - 1, by if given["return_lse"] else None)
    return [_placement("out", q, by), lse, _placement("", 1, None), _placement("", 1, None)]


def _backward(given: dict[str, Any], by: str | None) -> list[Any]:
    return [_placement(name, given[name].ndim, by) for name in ("q", "k", "v")]


def _slopes_backward(given: dict[str, Any], by: str | None) -> list[Any]:
    from torch.distributed.tensor import Partial

    ndim = given["alibi_slopes"].ndim
    is_summed = by == "batch" and ndim == 1  # each process adds up its own sequences
    return [Partial() if is_summed else _placement("alibi_slopes", ndim, by)]


def _rule(
    names: tuple[str, ...], outputs: Callable[[dict[str, Any], str | None], list[Any]], *arguments: Any
) -> list[tuple[list[Any], list[Any]]]:
    """Return all correct pairs (placements of the outputs, placements of the arguments): replicated, then sharded."""
    given = dict(zip(names, arguments))  # PyTorch omits the last argument if it has its default value
    if given["dropout_p"] > 0.0:
        refuse("dropout")
    found = []
    for by in (None, *[by for by in ("batch", "heads") if _divides(given, by)]):
        inputs = [_input_placement(name, x, by) if _is_tensor(x) else None for name, x in given.items()]
        found.append((outputs(given, by), inputs))
    return found


def _divides(given: dict[str, Any], by: str) -> bool:
    """Whether a tensor is sharded by ``by`` (batch or heads), and all tensors can be divided into as many shards."""
    if by == "batch" and given["cu_seqlens_q"] is not None:
        return False
    parts = max(_parts(x, _dim(name, x.ndim, by)) for name, x in given.items() if name in _OF_HEADS and _is_tensor(x))
    size = given["k"].shape[0 if by == "batch" else -2]
    return bool(parts > 1 and size % parts == 0)


def _parts(x: Any, dim: int | None) -> int:
    """Return into how many shards a DTensor is cut along ``dim``."""
    found = 1
    for index, placement in enumerate(x.placements):
        found *= x.mesh.size(index) if dim is not None and placement.is_shard(dim) else 1
    return found


def _input_placement(name: str, x: Any, by: str | None) -> Any:
    is_of_all_heads = name in _DESCALES and x.shape[-1] == 1
    return _placement(name, x.ndim, None if is_of_all_heads else by)


def _placement(name: str, ndim: int, by: str | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    dim = None if by is None else _dim(name, ndim, by)
    return Replicate() if dim is None else Shard(dim)


def _dim(name: str, ndim: int, by: str) -> int | None:
    """Return the axis of sequences (by="batch") or of heads of the tensor ``name``; None if it has none."""
    if name in _OF_HEADS:
        return 0 if by == "batch" else ndim - 2
    if name == "alibi_slopes":
        return ndim - 1 if by == "heads" else 0 if ndim == 2 else None
    if name in _DESCALES and by == "heads":
        return ndim - 1
    return None


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "placements")
