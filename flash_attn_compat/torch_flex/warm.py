"""Prepared calls of flex_attention: how a call runs that differs from an earlier one in its tensors' values alone.

A key holds everything else that may change between two calls: of each tensor its type, shape, strides, dtype and
device, the options, the settings and the policy. An eager call's functions are in it by the identity of their graphs,
and a prepared call knows its graphs by weak references; a compiled call's functions are in it as C++. No tensor and no
graph is kept alive. Captured numbers have a look-up of their own, since only the prepared functions say which they are.

Reading all that costs Python half of a warm call. So an eager forward is first compared with the latest forwards of its
graphs by Dynamo's guards, which compare tensors in C++ (``repeat``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends.fused.flex import BlockLists, Blocks, FlexInputs, FlexRun
from flash_attn_compat.core.entry import PLAIN
from flash_attn_compat.core.inputs import new_tuple
from flash_attn_compat.dispatch import call_cache
from flash_attn_compat.torch_flex.calls import FlexBackwardCall, FlexCall, has_blocks
from flash_attn_compat.torch_flex.functions import Functions
from flash_attn_compat.torch_flex.policy import Policy

_MOST, _MOST_NUMBERS = 2048, 256
_prepared: dict[Hashable, Prepared] = {}
_context, _are_unset = settings.context, settings.are_unset  # functions in C


class Prepared:
    """What calls of one key share: their functions, and a run for each tuple of captured numbers.

    graphs: score_mod and mask_mod, by weak references; none of a compiled call
    may_repeat: whether ``keep_latest`` may compare calls with this one
    """

    __slots__ = "functions", "graphs", "may_repeat", "runs"

    def __init__(self, functions: Functions, graphs: tuple[weakref.ref[Any], ...] = ()) -> None:
        self.functions, self.graphs, self.may_repeat = functions, graphs, True
        self.runs: dict[Hashable, Callable[..., Any]] = {}


def find(key: Hashable, *graphs: Any) -> Prepared | None:
    """Return the prepared call of a key, or None. graphs: an eager call's score_mod and mask_mod"""
    found = _prepared.get(key)
    if found is None:
        return None
    for graph, known in zip(graphs, found.graphs):
        if known() is not graph:  # another graph at the address of one that is gone
            return None
    return found


def keep(
    key: Hashable, functions: Functions, numbers: tuple[int, ...], run: Callable[..., Any], *graphs: Any
) -> Prepared:
    """Add the run for a key and captured numbers, and return the prepared call. Arguments as of ``find``"""
    found = find(key, *graphs)
    if found is None:
        found = Prepared(functions, tuple(map(weakref.ref, graphs)))
        call_cache.keep(_prepared, key, found, _MOST)
    call_cache.keep(found.runs, numbers, run, _MOST_NUMBERS)
    return found


def forward_key(policy: Policy, call: FlexCall) -> Hashable:
    """Return the key of an eager forward."""
    q, k, v, score_mod, mask, scale, options, own, others = call
    functions = id(score_mod), id(mask[-1]), len(own)
    fixed = policy, functions, mask[-3], mask[-2], scale, options.get("BACKEND"), options.get("OUTPUT_MAX")
    return make_key(fixed, (q, k, v), (*mask[2:6], *own, *others))


def backward_key(policy: Policy, call: FlexBackwardCall, dout: Tensor) -> Hashable:
    """Return the key of an eager backward. dout: the gradient of out, zeros if it has none"""
    own, mask, options = call.score_mod_other_buffers, call.block_mask, call.kernel_options
    wanted = tuple([isinstance(x, Tensor) and x.requires_grad for x in own])
    functions = id(call.fw_graph), id(mask[-1]), wanted
    fixed = policy, functions, mask[-3], mask[-2], call.scale, options.get("BACKEND"), options.get("OUTPUT_MAX")
    aligned = *call[:5], dout, call.grad_logsumexp
    return make_key(fixed, aligned, (*mask[2:10], *own, *call.mask_mod_other_buffers))


def make_key(fixed: Hashable, aligned: Iterable[Tensor | None], others: Iterable[Any]) -> Hashable:
    """Return a key. aligned: tensors whose alignment matters; others: lists of blocks, captured tensors and numbers"""
    return (
        fixed, _context(), None if _are_unset() else settings.values(),
        tuple([
            None if x is None else (x.shape, x.stride(), x.dtype, x.device, type(x), x.is_neg(), x.data_ptr() & 15)
            for x in aligned
        ]),
        tuple([
            (x.shape, x.stride(), x.dtype, x.device, type(x), x.is_neg()) if isinstance(x, Tensor) else type(x)
            for x in others
        ]),
    )  # fmt: skip


# ---- The latest forwards


class _Latest(NamedTuple):
    """An eager forward that may come again.

    fixed: ``_fixed_of`` of the call; has_blocks, has_full: whether it has a BlockMask, and one with full blocks
    captured: positions of the captured tensors in the C++ text's order
    is_like: Dynamo's comparison with the call's tensors: types, shapes, strides, dtypes, devices and dispatch keys
    """

    score_mod: weakref.ref[Any]
    mask_mod: weakref.ref[Any]
    fixed: tuple[Any, ...]
    has_lists: bool
    has_full: bool
    captured: tuple[int, ...]
    is_like: Callable[..., bool]
    run: FlexRun


_MOST_LATEST, _MOST_GRAPHS = 4, 1024
_latest: dict[Hashable, tuple[_Latest, ...]] = {}  # by the ids of score_mod and mask_mod
_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def repeat(policy: Policy, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """Return out and LSE of an eager forward like one of the latest of its functions; None if it is like none."""
    q, k, v, score_mod, mask, scale, options, own, others = arguments
    mask_mod = mask[-1]
    latest = _latest.get((id(score_mod), id(mask_mod)))
    if latest is None or not _are_aligned(q, k, v):
        return None
    fixed, captured, blocks = _fixed_of(policy, mask, scale, options, own, others), (*own, *others), None
    for known_score, known_mask, known, has_lists, has_full, places, is_like, run in latest:
        if known_score() is not score_mod or known_mask() is not mask_mod or known != fixed:
            continue
        if is_like(q, k, v, *(mask[2 : 6 if has_full else 4] if has_lists else ()), *captured):
            if has_lists:
                blocks = new_tuple(Blocks, (mask[-3], mask[-2], new_tuple(BlockLists, mask[2:6]), None))
            tensors = tuple([captured[place] for place in places]) if places else ()
            return run(new_tuple(FlexInputs, (q, k, v, tensors, (), blocks)))
    return None


def _fixed_of(policy: Policy, mask: Any, scale: Any, options: Any, own: Any, others: Any) -> tuple[Any, ...]:
    """Return what is compared of a forward besides its tensors and graphs."""
    return (
        policy, _context(), None if _are_unset() else settings.values(), type(scale), scale, mask[-3], mask[-2],
        mask[4] is None, mask[5] is None, len(own), len(others), options.get("BACKEND"), options.get("OUTPUT_MAX"),
    )  # fmt: skip


def keep_latest(policy: Policy, call: FlexCall, prepared: Prepared) -> None:
    """Let ``repeat`` find forwards like this prepared one, if Dynamo can compare all that may change in them."""
    if not prepared.may_repeat:
        return
    q, k, v, score_mod, mask, scale, options, own, others = call
    has_lists, has_full = has_blocks(mask), mask[4] is not None
    tensors = q, k, v, *(mask[2 : 6 if has_full else 4] if has_lists else ()), *own, *others
    is_like = None if prepared.functions.printed.numbers or not _are_aligned(q, k, v) else _guard_of(tensors)
    if is_like is None:
        prepared.may_repeat = False
        return
    graphs, fixed = (id(score_mod), id(mask[-1])), _fixed_of(policy, mask, scale, options, own, others)
    new = _Latest(
        weakref.ref(score_mod), weakref.ref(mask[-1]), fixed, has_lists, has_full, prepared.functions.printed.tensors,
        is_like, prepared.runs[()],
    )  # fmt: skip
    older = [each for each in _latest.pop(graphs, ()) if each.score_mod() is score_mod]
    call_cache.keep(_latest, graphs, (new, *older[: _MOST_LATEST - 1]), _MOST_GRAPHS)


def _are_aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15


def _guard_of(tensors: tuple[Any, ...]) -> Callable[..., bool] | None:
    """Return a comparison of other tensors with these, which it does not keep; None for tensors that Dynamo refuses."""
    if _Guards is None or not all(isinstance(x, Tensor) and type(x) in PLAIN for x in tensors):
        return None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    is_like: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return is_like if is_like(*tensors) else None  # no tensor is like these if one of these is there twice
