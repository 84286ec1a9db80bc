"""Calls of flex_attention, and the same by PyTorch's own composition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flash_attn_compat.torch_flex import launch, warm

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
    for module, name in ((launch, "_runs"), (warm, "_prepared"), (warm, "_latest")):
        monkeypatch.setattr(module, name, {})
