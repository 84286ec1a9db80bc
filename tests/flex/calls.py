"""Calls of flex_attention, and the same by PyTorch's own composition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn_compat.torch_flex import functions, inductor, launch, warm
from flash_attn_compat.torch_flex.calls import FlexCall, lists_of, sizes_of

import torch._higher_order_ops.flex_attention  # isort: skip

OPERATOR = torch.ops.higher_order.flex_attention
COMPOSED = OPERATOR.py_kernels[DispatchKey.CompositeExplicitAutograd]
Mod = Callable[..., Tensor]


def identity(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


class Answer(NamedTuple):
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...] = ()


def tensors(
    batch: int = 1, heads: int = 4, heads_k: int = 2, rows: int = 130, keys: int = 130, dim: int = 32,
    dim_v: int | None = None, dtype: torch.dtype = torch.float16, device: str = "cpu", seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v as models make them: (batch, rows, heads, dim) transposed."""
    torch.manual_seed(seed)
    shapes = (rows, heads, dim), (keys, heads_k, dim), (keys, heads_k, dim_v or dim)
    q, k, v = (torch.randn(batch, *shape, device=device).to(dtype).transpose(1, 2) for shape in shapes)
    return q * 2, k, v


def make_mask(mask_mod: Mod, q: Tensor, k: Tensor, per_head: bool = False, block: Any = 128) -> BlockMask:
    batch, heads = (q.shape[0], q.shape[1]) if per_head else (None, None)
    device = q.device.type
    return create_block_mask(mask_mod, batch, heads, q.shape[2], k.shape[2], device=device, BLOCK_SIZE=block)


def call(
    qkv: Sequence[Tensor], score_mod: Mod = identity, mask: BlockMask | None = None, scale: float | None = None,
    backend: str = "eager", options: dict[str, Any] | None = None, more: Sequence[Tensor] = (),
    gradients: bool = True, dynamic: bool | None = None,
) -> Answer:  # fmt: skip
    """Call PyTorch's operator as flex_attention does; the function itself refuses gradients and LSE on a CPU.

    more: further tensors that want a gradient
    """
    leaves = [x.detach().requires_grad_() if gradients else x for x in qkv]
    run = of_operator(leaves, score_mod, mask, scale, options)
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=dynamic)
    return _answer(compiled(*leaves), leaves, more, gradients)


def of_operator(
    qkv: Sequence[Tensor], score_mod: Mod = identity, mask: BlockMask | None = None, scale: float | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return a function of q, k and v; its graph makes no BlockMask, for which inductor would compile C++."""
    lists, factor = rest_of(qkv, mask, scale)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return OPERATOR(q, k, v, score_mod, lists, factor, {"BACKEND": "AUTO", **(options or {})})

    return run


def upstream(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(out.shape, generator=generator).to(out.device)


def composed(
    qkv: Sequence[Tensor], score_mod: Mod = identity, mask: BlockMask | None = None, scale: float | None = None,
    more: Sequence[Tensor] = (), gradients: bool = True,
) -> Answer:  # fmt: skip
    """Return the same by PyTorch's own composition in the call's dtype, which autograd differentiates."""
    leaves = [x.detach().requires_grad_(gradients) for x in qkv]
    return _answer(COMPOSED(*leaves, score_mod, *rest_of(leaves, mask, scale), {}, (), ()), leaves, more, gradients)


def in_fp32(qkv: Sequence[Tensor], *arguments: Any, **named: Any) -> Answer:
    return composed([x.float() for x in qkv], *arguments, **named)


def rest_of(leaves: Sequence[Tensor], mask: BlockMask | None = None, scale: float | None = None) -> tuple[Any, float]:
    """Return the operator's arguments behind score_mod."""
    from torch.nn.attention.flex_attention import _create_empty_block_mask

    used = _create_empty_block_mask(*leaves[:2]) if mask is None else mask
    return used.as_tuple(), leaves[0].shape[-1] ** -0.5 if scale is None else scale


def _answer(results: Any, leaves: Sequence[Tensor], more: Sequence[Tensor], gradients: bool) -> Answer:
    out, lse, *_ = results
    if not gradients:
        return Answer(out, lse)
    loss = (out.float() * upstream(out)).sum() + torch.where(lse.isfinite(), lse, 0.0).sin().sum()
    return Answer(out.detach(), lse.detach(), torch.autograd.grad(loss, [*leaves, *more]))


def assert_close(found: Answer, right: Answer, dtype: torch.dtype) -> None:
    """Within twice a rounding of the dtype at each array's largest number, and LSE in fp32."""
    eps = torch.finfo(dtype).eps
    pairs = [(found.out, right.out), *zip(found.gradients, right.gradients)]
    for x, y in pairs:
        largest = y.abs().max().item() or 1.0
        torch.testing.assert_close(x.float(), y.float(), rtol=4 * eps, atol=2 * eps * max(largest, 1.0))
    torch.testing.assert_close(found.lse, right.lse, rtol=2e-5, atol=2e-5)


def forget_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without prepared calls, which launch the kernels of the GPU or emulator for which they were prepared."""
    for module, name in ((launch, "_runs"), (warm, "_prepared"), (warm, "_guards")):
        monkeypatch.setattr(module, name, {})


# ---- Warm calls: what may change between two calls of the same functions


def warm_call(**changed: Any) -> tuple[Any, ...]:
    """Return the operator's arguments, all of them with the graphs SCORE and MASK. changed: some other arguments"""
    q, k, v = changed.pop("qkv", None) or tensors(rows=40, keys=40)
    table = changed.pop("table", None)
    table = torch.arange(200.0).view(4, 50) if table is None else table
    mask = changed.pop("mask", None) or make_mask(causal, q, k)
    lists = (*mask.as_tuple()[:-1], MASK)
    scale, options, limit = changed.get("scale", 0.125), changed.get("options", {}), changed.get("limit", 30)
    return q, k, v, SCORE, lists, scale, options, (table,), (limit,) if "limit" in changed else (torch.tensor(30),)


SCORE = torch.fx.symbolic_trace(lambda score, b, h, q, kv, table: score + table[h, kv] * 0.01)
MASK = torch.fx.symbolic_trace(lambda b, h, q, kv, limit: (q >= kv) & (kv < limit))
CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "numbers in tensors": lambda: {"table": torch.randn(4, 50)},
    "a captured tensor's dtype": lambda: {"table": torch.randn(4, 50).half()},
    "a captured tensor's shape": lambda: {"table": torch.randn(4, 70)},
    "a captured tensor's strides": lambda: {"table": torch.randn(50, 4).T},
    "a captured integer for a tensor": lambda: {"limit": 20},
    "another captured integer": lambda: {"limit": 25},
    "lists of blocks": lambda: masked(lambda b, h, q, kv: (q >= kv) & (q < 16)),
    "the size of blocks": lambda: in_blocks_of(64),
    "heads of the BlockMask": lambda: masked(per_head=True),
    "the length": lambda: {"qkv": tensors(rows=24, keys=48)},
    "strides of q, k and v": lambda: {"qkv": [x.contiguous() for x in tensors(rows=40, keys=40)]},
    "alignment": lambda: {"qkv": [shifted(x) for x in tensors(rows=40, keys=40)]},
    "the scale": lambda: {"scale": 0.5},
}  # fmt: skip


# Of these changes the call before is another than ``warm_call()``.
BEFORE: dict[str, Callable[[], dict[str, Any]]] = {"the size of blocks": lambda: in_blocks_of(48)}


def in_blocks_of(size: int) -> dict[str, Any]:
    """Return arguments whose lists have the same shapes with blocks of 48 as of 64, and other blocks."""
    q, k, v = tensors(rows=70, keys=70)
    mask = make_mask(lambda b, h, q, kv: (q >= kv) & (kv < 60), q, k, block=size)
    return {"qkv": (q, k, v), "mask": mask, "table": torch.randn(4, 80), "limit": torch.tensor(60)}


def masked(mask_mod: Mod = causal, **options: Any) -> dict[str, Any]:
    return {"mask": make_mask(mask_mod, *tensors(rows=40, keys=40)[:2], **options)}


def shifted(x: Tensor) -> Tensor:
    """A copy whose memory begins 2 bytes after a multiple of 16."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)[1:]
    return memory.view(x.shape).copy_(x)


def call_eagerly(*arguments: Any) -> Any:
    return OPERATOR.py_kernels[DispatchKey.CPU](*arguments)


def call_as_compiled(*arguments: Any) -> Any:
    """Call the operator that a graph of inductor calls."""
    call = FlexCall(*arguments)
    found = functions.find(call, backward=False)
    assert not isinstance(found, str)
    captured = [[call.captured[place] for place in places] for places in functions.positions(found)]
    rest = *lists_of(call.block_mask)[:4], *captured, *sizes_of(call.block_mask), call.scale, functions.dump(found)
    return getattr(getattr(torch.ops, inductor._NAMESPACE), inductor.FORWARD)(*call[:3], *rest)


# ---- Who serves a call behind autograd's key


class Marked(Tensor):
    """A subclass that changes nothing."""


class Mode(TorchDispatchMode):
    """Sees the operators of a program."""


def learned(values: Tensor) -> Tensor:
    return values.requires_grad_()


# Each entry: whether our kernels serve the call (else PyTorch's autograd function gets it), the context around it, and
# arguments other than those of ``warm_call()``.
BEHIND: dict[str, Callable[[], tuple[bool, AbstractContextManager[object], dict[str, Any]]]] = {
    "no gradient": lambda: (True, torch.enable_grad(), {}),
    "a gradient that is not recorded": lambda: (True, torch.no_grad(), {"table": learned(torch.ones(4, 50))}),
    "a gradient": lambda: (False, torch.enable_grad(), {"qkv": [learned(x) for x in tensors(rows=40, keys=40)]}),
    "a gradient of a captured tensor": lambda: (False, torch.enable_grad(), {"table": learned(torch.ones(4, 50))}),
    "a gradient of the mask": lambda: (False, torch.no_grad(), {"limit": learned(torch.tensor(30.0))}),
    "a level of tangents": lambda: (False, forward_ad.dual_level(), {}),
    "a mode": lambda: (False, Mode(), {}),
    "a subclass": lambda: (False, torch.no_grad(), {"table": torch.ones(4, 50).as_subclass(Marked)}),
}
