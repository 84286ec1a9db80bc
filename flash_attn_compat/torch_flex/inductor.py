"""flex_attention in graphs of inductor: while flex is on, our lowerings turn it into calls of two operators of ours.

A call passes everything to the operator, score_mod and mask_mod as one string of C++: inductor keeps graphs on disk,
and a later process runs them without lowering. PyTorch's own lowering serves the calls that we decline.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from flash_attn_compat.backends.fused.flex import FlexInputs, FlexUpstream
from flash_attn_compat.core.flex import capture, printer
from flash_attn_compat.core.flex.capture import JOINT_ARGUMENTS, MASK_ARGUMENTS, SCORE_ARGUMENTS, Captured
from flash_attn_compat.core.flex.operators import Declined
from flash_attn_compat.core.inputs import new_tuple
from flash_attn_compat.dispatch import choice
from flash_attn_compat.settings import is_explaining
from flash_attn_compat.torch_flex import functions, launch, policy, warm
from flash_attn_compat.torch_flex.calls import WHOLE, FlexBackwardCall, FlexCall, lists_of, make_blocks, sizes_of
from flash_attn_compat.torch_flex.functions import Functions
from flash_attn_compat.torch_flex.operator import returns_maxima
from flash_attn_compat.torch_flex.policy import Policy

# Changes with the operators' arguments and with the string. Part of the operators' names and of keys of graphs on disk.
VERSION = 2
FORWARD, BACKWARD = f"flex_forward_{VERSION}", f"flex_backward_{VERSION}"
_NAMESPACE = "flash_attn_compat_flex"
_MASK = "Tensor? kv_num, Tensor? kv_indices, Tensor? full_kv_num, Tensor? full_kv_indices"
_TWINS = "Tensor? q_num, Tensor? q_indices, Tensor? full_q_num, Tensor? full_q_indices"
_REST = "Tensor[] captured, Tensor[] hosts, SymInt[] integers, int rows, int keys, float scale, str functions"
_SCHEMAS = {
    FORWARD: f"(Tensor query, Tensor key, Tensor value, {_MASK}, {_REST}) -> (Tensor, Tensor)",
    BACKWARD: (
        "(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse, "
        f"{_MASK}, {_TWINS}, {_REST}) -> Tensor[]"
    ),
}

# ---- The operators


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lists, others = rest[:4], rest[4:]
    fixed, tensors = _fixed_of(query, key, others, backward=False), (query, key, value, *lists, *others[0])
    guarded = warm.find_guarded(fixed, tensors)
    if guarded is not None:
        numbers, has_graph_strides = guarded.known
        out, lse = guarded.run(_repeated((query, key, value), lists, others, numbers, backward=False))
    else:
        found, inputs, scale = _inputs_of((query, key, value), lists, others, backward=False)
        if is_explaining():
            raise choice.Explained(choice.Explanation(launch.KERNELS, {launch.KERNELS: [], launch.PYTORCH: []}))
        run = launch.find_forward(found, inputs, scale)
        if isinstance(run, str):
            raise _refusal(run)
        out, lse = run(inputs)
        has_graph_strides = _as_in_graph(out, query) is out
        if not others[1]:
            warm.guard(fixed, tensors, run, (inputs.numbers, has_graph_strides))
    choice.served[launch.KERNELS] += 1
    return out if has_graph_strides else _as_in_graph(out, query), lse


def _backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor | None,
    grad_lse: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """Return dq, dk and dv, then the gradients of captured tensors in the order of the C++ text."""
    lists, others, qkv = rest[:8], rest[8:], (query, key, value)
    upstream = FlexUpstream(out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse)
    fixed, tensors = _fixed_of(query, key, others, backward=True), (*qkv, *upstream, *lists, *others[0])
    guarded = warm.find_guarded(fixed, tensors)
    if guarded is not None:
        numbers, has_graph_strides, sums = guarded.known
        _refuse_sums(sums)
        dq, dk, dv, *more = guarded.run(_repeated(qkv, lists, others, numbers, backward=True), upstream)
        return [dq, dk, dv, *more] if has_graph_strides else [*_all_as_in_graph((dq, dk, dv), qkv), *more]
    found, inputs, scale = _inputs_of(qkv, lists, others, backward=True)
    _refuse_sums(bool(found.mods.gradients))
    run = launch.find_backward(found, inputs, scale, upstream)
    if isinstance(run, str):
        raise _refusal(run)
    dq, dk, dv, *more = run(inputs, upstream)
    gradients = _all_as_in_graph((dq, dk, dv), qkv)
    if not others[1]:
        has_graph_strides = gradients[0] is dq and gradients[1] is dk and gradients[2] is dv
        warm.guard(fixed, tensors, run, (inputs.numbers, has_graph_strides, bool(found.mods.gradients)))
    return [*gradients, *more]


def _refuse_sums(sums: bool) -> None:
    """Raise RuntimeError if gradients are to be summed in a fixed order since the graph was compiled."""
    reason = policy.gradient_reason(sums)
    if reason is not None:
        raise _refusal(reason)


def _all_as_in_graph(gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    return [_as_in_graph(gradient, like) for gradient, like in zip(gradients, inputs)]


def _fixed_of(query: Tensor, key: Tensor, rest: Sequence[Any], backward: bool) -> Hashable:
    """Return what is compared of two calls besides their tensors."""
    captured, hosts, integers, rows, keys, scale, text = rest
    return text, backward, rows, keys, scale, tuple(integers), len(captured), len(hosts), query.numel(), key.numel()


def _repeated(
    tensors: tuple[Tensor, Tensor, Tensor], lists: Sequence[Tensor | None], rest: Sequence[Any],
    numbers: tuple[int, ...], backward: bool,
) -> FlexInputs:  # fmt: skip
    """Return the inputs of a call that a guard found. numbers: its captured numbers"""
    captured, rows, keys = rest[0], rest[3], rest[4]
    blocks = make_blocks(rows, keys, lists, backward)
    inputs: FlexInputs = new_tuple(FlexInputs, (*tensors, tuple(captured), numbers, blocks))
    return inputs


def _inputs_of(
    tensors: tuple[Tensor, Tensor, Tensor], lists: Sequence[Tensor | None], rest: Sequence[Any], backward: bool
) -> tuple[Functions, FlexInputs, float]:
    captured, hosts, integers, rows, keys, scale, text = rest
    found = functions.load(text)
    reason = functions.find_short_tensor(found, captured, tensors)
    if reason is not None:
        raise IndexError(reason)
    blocks = make_blocks(rows, keys, lists, backward)
    numbers = functions.number_order(found, hosts, integers)
    return found, FlexInputs(*tensors, tuple(captured), numbers, blocks), scale


def _refusal(reason: str) -> RuntimeError:
    return RuntimeError(
        f"this graph was compiled for flash_attn_compat's kernels, which do not serve this call: {reason}. Compile it "
        "without flex (unpatch, or FLASH_ATTN_COMPAT_FLEX=0) for PyTorch's own"
    )


def _graph_strides(x: Any, like: Any) -> Any:
    """Return an empty tensor of x's shape whose axes lie in memory in the order of like's, as PyTorch's results do."""
    # From sys.modules, since the attribute of the package with this name is the operator, not the module.
    module = sys.modules["torch._higher_order_ops.flex_attention"]
    return module._permute_strides(x, like.stride())


def _as_in_graph(x: Tensor, like: Tensor) -> Tensor:
    """Return ``x`` with the strides that the graph expects, even in axes of one element."""
    own, strides = x.stride(), _dense_strides(x.shape, like.stride())
    if own == strides:
        return x
    if all(size == 1 or one == wanted for size, one, wanted in zip(x.shape, own, strides)):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@functools.lru_cache(1024)
def _dense_strides(shape: torch.Size, like: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose axes lie in memory in the order of the strides ``like``."""
    order = sorted(range(len(shape) - 1), key=like.__getitem__, reverse=True)
    strides, step = [1] * len(shape), shape[-1]
    for axis in reversed(order):
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = _graph_strides(query.new_empty((*query.shape[:3], value.shape[-1])), query)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake_backward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
    captured, *_, text = rest[-len(_REST.split(",")) :]
    wanting = [captured[place] for place in functions.load(text).mods.gradients]
    gradients = [_graph_strides(x.new_empty(x.shape), x) for x in (query, key, value)]
    return gradients + [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanting]


def _define() -> Library:
    """Register our operators for every device at import: a graph from disk may run before flex is switched on."""
    library = Library(_NAMESPACE, "DEF")
    implementations = {FORWARD: (_forward, _fake_forward), BACKWARD: (_backward, _fake_backward)}
    for name, (run, fake) in implementations.items():
        library.define(name + _SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
    return library


_library = _define()

# ---- The lowerings

_originals: dict[Any, Callable[..., Any]] = {}


def replace(active: Policy) -> None:
    """Put our lowerings in place of inductor's, for calls that the policy ``active`` serves."""
    lowering = _import_lowerings()
    for target, make in _targets():
        current = lowering.lowerings.get(target)
        if current is not None and getattr(current, "flash_attn_compat_policy", None) != active:
            original = _originals.setdefault(target, current)
            lowering.lowerings[target] = make(active, original)


def restore() -> None:
    """Give inductor its own lowerings back."""
    if _originals:
        lowering = _import_lowerings()
        lowering.lowerings.update(_originals)
        _originals.clear()


def _targets() -> Iterator[tuple[Any, Callable[..., Any]]]:
    operators = torch.ops.higher_order
    yield operators.flex_attention, _make_forward_lowering
    yield operators.flex_attention_backward, _make_backward_lowering


def _import_lowerings() -> Any:
    """Return inductor's module of lowerings, after an import that registers PyTorch's own for flex_attention."""
    lowering = importlib.import_module("torch._inductor.lowering")
    try:
        importlib.import_module("torch._inductor.kernel.flex.flex_attention")
    except ModuleNotFoundError:  # before PyTorch 2.9
        importlib.import_module("torch._inductor.kernel.flex_attention")
    return lowering


def _make_forward_lowering(active: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    def lower(*arguments: Any) -> Any:
        call = FlexCall(*arguments)
        try:
            graphs = _graphs_of(call, call.score_mod)
            found = functions.of_printed(printer.print_functions(*graphs))
            rest = _check_and_pass(active, call, found, backward=False)
        except Declined:
            choice.served[launch.PYTORCH] += 1
            return original(*arguments)
        device = call.query.get_device()
        out, lse = _call(FORWARD, *call[:3], *lists_of(call.block_mask)[:4], *rest)
        if not returns_maxima():
            return out, lse
        # max_scores are unset, since no caller asked for them. Not lse again: autograd would take both for one tensor.
        return out, lse, _import_lowerings().empty_strided(lse.get_size(), None, dtype=torch.float32, device=device)

    return _marked(lower, active)


def _make_backward_lowering(active: Policy, original: Callable[..., Any]) -> Callable[..., Any]:
    def lower(*arguments: Any) -> Any:
        call = FlexBackwardCall(*arguments)
        forward = call.forward()
        try:
            score, mask = _graphs_of(forward, call.fw_graph)
            joint = Captured(call.joint_graph.graph_module, JOINT_ARGUMENTS, score.arguments)
            found = functions.of_printed(printer.print_functions(score, mask, joint))
            rest = _check_and_pass(active, forward, found, backward=True)
        except Declined:
            return original(*arguments)
        dq, dk, dv, *others = _call(BACKWARD, *call[:7], *lists_of(call.block_mask)[:8], *rest)
        return dq, dk, dv, functions.captured_gradients(found, others, len(call.score_mod_other_buffers))

    return _marked(lower, active)


def _marked(lower: Callable[..., Any], active: Policy) -> Callable[..., Any]:
    setattr(lower, "flash_attn_compat_policy", active)  # noqa: B010  # mypy knows no attributes of functions
    return lower


def _graphs_of(call: FlexCall, score_mod: Any) -> tuple[Captured, Captured]:
    """Return a call's score_mod and mask_mod, which inductor holds as subgraphs, with their captured arguments."""
    nodes: tuple[Any, ...] = call[:3]  # inductor's nodes of q, k and v
    device, found, first = nodes[0].get_device(), [], 0
    for subgraph, names in ((score_mod, SCORE_ARGUMENTS), (call.mask_mod, MASK_ARGUMENTS)):
        module = subgraph.graph_module
        holders = [node for node in module.graph.nodes if node.op == "placeholder"][len(names) :]
        arguments = capture.describe([node.meta["val"] for node in holders], device, first)
        found.append(Captured(module, names, arguments))
        first += len(arguments)
    return found[0], found[1]


def _check_and_pass(active: Policy, call: FlexCall, found: Functions, backward: bool) -> list[Any]:
    """Return our operator's arguments after the BlockMask's lists. Raises Declined if our kernels decline the call."""
    nodes: tuple[Any, ...] = call[:3]  # inductor's nodes of q, k and v
    reasons = [
        *policy.device_reasons(active, nodes[0].get_device()),
        *policy.dtype_reasons(*(x.get_dtype() for x in nodes)),
        *policy.option_reasons(call),
    ]
    reason = policy.gradient_reason(bool(found.mods.gradients))
    reasons += [] if reason is None else [reason]
    if _is_packaged():
        reasons.append("AOTInductor's packages run without this package")
    tensors, hosts, integers = functions.positions(found)
    captured = [call.captured[place] for place in tensors]
    rows, keys = map(_fixed, sizes_of(call.block_mask))
    if not reasons:
        reason = _kernels_reason(found, call, captured, (rows, keys), backward)
        reasons += [] if reason is None else [reason]
    if reasons:
        raise Declined(reasons[0])
    numbers = [call.captured[place] for place in integers]
    rest = captured, [call.captured[place] for place in hosts], numbers, rows, keys, call.scale, functions.dump(found)
    return list(rest)


def _is_packaged() -> bool:
    """Whether AOTInductor lowers the graph: its packages run in processes that may lack our operators."""
    from torch._inductor.virtualized import V

    return bool(getattr(V.graph, "aot_mode", False))


def _kernels_reason(
    found: Functions, call: FlexCall, captured: Sequence[Any], sizes: tuple[int, int], backward: bool
) -> str | None:
    """Return the kernels' reason to decline a call, or None. sizes: queries and keys of a block of its BlockMask"""
    from torch._inductor.virtualized import V

    with V.graph.fake_mode:
        q, k, v, *others = (_example(x) for x in (*call[:3], *captured))
        blocks = None
        if sizes != (WHOLE, WHOLE):
            lists = [None if x is None else _example(x) for x in lists_of(call.block_mask)]
            blocks = make_blocks(*sizes, lists, backward)
        return launch.find_reason(found, FlexInputs(q, k, v, tuple(others), (), blocks), backward)


def _example(box: Any) -> Tensor:
    """Return a fake tensor with the dtype and device of an inductor node, and with its shape as far as known."""
    return torch.empty([_hint(size) for size in box.get_size()], dtype=box.get_dtype(), device=box.get_device())


def _hint(size: Any) -> int:
    from torch._inductor.virtualized import V

    if isinstance(size, int):
        return size
    sizes: Any = V.graph.sizevars
    return int(sizes.size_hint(size) if hasattr(sizes, "size_hint") else sizes.optimization_hint(size))


def _fixed(size: Any) -> int:
    """Return a size as an int. The graph gets a guard: it is compiled again if the size changes."""
    from torch._inductor.virtualized import V

    if isinstance(size, int):
        return size
    sizes: Any = V.graph.sizevars
    return int(sizes.guard_int(size) if hasattr(sizes, "guard_int") else sizes.evaluate_static_shape(size))


def _call(name: str, *arguments: Any) -> Any:
    """Return a node that calls an operator of ours."""
    lowering = _import_lowerings()
    overload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return lowering.fallback_handler(overload, add_to_fallback_set=False)(*arguments)
