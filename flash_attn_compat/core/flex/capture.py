"""Turn the score_mod and mask_mod of flex_attention into graphs of aten operators on single numbers.

PyTorch's eager operator receives them as graphs of Python functions, which are traced once more here. The graphs of
PyTorch's compiler, and the joint graph of a backward, consist of aten operators already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from flash_attn_compat.core import torch_state
from flash_attn_compat.core.flex.operators import C_TYPES, Declined

MASK_ARGUMENTS = "b", "h", "q", "kv"
SCORE_ARGUMENTS = "score", *MASK_ARGUMENTS
JOINT_ARGUMENTS = *SCORE_ARGUMENTS, "dscore"  # dscore: the gradient of the loss by score_mod's result


class TensorArgument(NamedTuple):
    """A tensor that score_mod or mask_mod captures.

    position: its index among the captured arguments of score_mod and mask_mod together
    on_host: whether it is one number in CPU memory while q is on a GPU; the kernel then gets it as a number
    """

    position: int
    dtype: torch.dtype
    dims: int
    on_host: bool = False


class IntegerArgument(NamedTuple):
    """A captured integer, which may change from call to call."""

    position: int


_ANY = 1234567  # stands for a captured integer while a function is traced
Argument = TensorArgument | IntegerArgument


class Captured(NamedTuple):
    """A graph of aten operators on single numbers.

    names: the C++ names of its first placeholders; arguments: the captured arguments for its other placeholders
    """

    graph: GraphModule
    names: tuple[str, ...]
    arguments: tuple[Argument, ...]


def describe(captured: Sequence[Any], device: torch.device, first: int = 0) -> tuple[Argument, ...]:
    """Describe the captured arguments of one function. Raises Declined unless they are tensors and integers.

    captured: the arguments, or examples of them; device: q's device
    first: the position of the first one among the captured arguments of score_mod and mask_mod together
    """
    return tuple(_describe(x, device, first + place) for place, x in enumerate(captured))


def _describe(x: Any, device: torch.device, position: int) -> Argument:
    if isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool):
        return IntegerArgument(position)
    if not isinstance(x, Tensor):
        raise Declined(f"a captured {type(x).__name__}, which may change from call to call")
    if x.dtype not in C_TYPES:
        raise Declined(f"a captured tensor of {str(x.dtype).removeprefix('torch.')}")
    on_host = x.device != device
    if on_host and (x.dim() or x.device.type != "cpu"):
        raise Declined(f"a captured tensor on {x.device}, where q is on {device}")
    return TensorArgument(position, x.dtype, x.dim(), on_host)


def capture_mask(mask_mod: Callable[..., Any], captured: Sequence[Any], device: torch.device, first: int) -> Captured:
    """Trace a mask_mod. Raises Declined where it cannot be traced."""
    arguments = describe(captured, device, first)
    return Captured(_trace(mask_mod, _indices(device), captured), MASK_ARGUMENTS, arguments)


def capture_score(score_mod: Callable[..., Any], captured: Sequence[Any], device: torch.device) -> Captured:
    """Trace a score_mod over fp32 scores, whatever q's dtype is. Raises Declined where it cannot be traced."""
    arguments = describe(captured, device)
    return Captured(_trace(score_mod, [_score(device), *_indices(device)], captured), SCORE_ARGUMENTS, arguments)


def capture_joint(score_mod: Callable[..., Any], captured: Sequence[Any], device: torch.device) -> Captured:
    """Trace the gradients of a score_mod, computed by autograd. Raises Declined where they cannot be traced.

    The graph's outputs are ordered as in PyTorch's own joint graphs: the gradient of the score, four None for b, h, q
    and kv, and for each captured argument its gradient, or None if it requires none.
    """
    wanted = [isinstance(x, Tensor) and x.requires_grad for x in captured]

    def joint(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, dscore: Tensor, *others: Any) -> list[Any]:
        own = [x.detach().requires_grad_() if wants else x for x, wants in zip(others, wanted)]
        leaves = [score.detach().requires_grad_(), *(x for x, wants in zip(own, wanted) if wants)]
        with torch.enable_grad():
            modified = score_mod(leaves[0], b, h, q, kv, *own)
            found: list[Any] = [None] * len(leaves)
            if modified.requires_grad:
                found = list(torch.autograd.grad(modified, leaves, dscore.to(modified.dtype), allow_unused=True))
        of_score, *of_leaves = found
        of_others = iter(of_leaves)
        return [
            torch.zeros_like(score) if of_score is None else of_score, *[None] * len(MASK_ARGUMENTS),
            *(next(of_others) if wants else None for wants in wanted),
        ]  # fmt: skip

    arguments = describe(captured, device)
    plain = [x.detach() if isinstance(x, Tensor) else x for x in captured]
    with torch_state.with_autograd():
        graph = _trace(joint, [_score(device), *_indices(device), _score(device)], plain)
    return Captured(graph, JOINT_ARGUMENTS, arguments)


def _score(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)


def _indices(device: torch.device) -> list[Tensor]:
    return [torch.zeros((), dtype=torch.int32, device=device) for _ in MASK_ARGUMENTS]


def _trace(function: Callable[..., Any], numbers: Sequence[Tensor], captured: Sequence[Any]) -> GraphModule:
    """Trace a function. Captured integers become symbols, so that the graph does not depend on their values."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    environment, names = ShapeEnv(), itertools.count()
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)

    def example(x: Any) -> Any:
        if isinstance(x, Tensor):
            return fake.from_tensor(x.detach(), static_shapes=True)
        source = ConstantSource(f"captured_{next(names)}")
        symbol = environment.create_symbol(_ANY, source, DimDynamic.DYNAMIC, positive=None)
        return environment.create_symintnode(symbol, hint=_ANY, source=source)

    try:
        examples = [example(x) for x in (*numbers, *captured)]
        # TransformGetItemToIndex makes x[i] with a tensor i an aten.index, as in PyTorch's own traces of score_mods.
        with fake, TransformGetItemToIndex():
            graph = make_fx(function, tracing_mode="real", decomposition_table=_decompositions())(*examples)
            if any(map(_writes, graph.graph.nodes)):  # such as graphs of derivatives
                functional = torch.func.functionalize(graph, remove="mutations")
                graph = make_fx(functional, tracing_mode="real", decomposition_table=_decompositions())(*examples)
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Declined(f"a function that cannot be traced over numbers ({type(error).__name__}: {line})") from error
    if environment.guards:
        raise Declined("a function that does different things for different captured integers")
    return graph


def _writes(node: torch.fx.Node) -> bool:
    """Whether an operator writes to its argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return PyTorch's decompositions of activations and their derivatives into operators that we can print as C++."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    return get_decompositions([
        aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.softplus, aten.softplus_backward, aten.elu,
        aten.elu_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.hardtanh, aten.hardtanh_backward,
        aten.hardsigmoid, aten.hardsigmoid_backward, aten.log_sigmoid_forward, aten.log_sigmoid_backward,
        aten.addcmul, aten.addcdiv, aten.lerp, aten.masked_fill, aten.logit, aten.xlogy, aten.frac, aten.nan_to_num,
    ])  # fmt: skip
