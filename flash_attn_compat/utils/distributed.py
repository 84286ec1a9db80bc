"""Collectives with gradients, and the few helpers tensor-parallel code takes from flash_attn.

Works with every backend of torch.distributed; nothing here knows about attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Handle = dist.Work | None


def all_gather_raw(input_: Tensor, process_group: dist.ProcessGroup, async_op: bool = False) -> tuple[Tensor, Handle]:
    """Concatenate every rank's tensor along the first axis; no gradient.

    Args:
        input_: (n, ...), the same shape on every rank.
        async_op: return before the result is complete; wait on the handle.
    Returns:
        ((world_size * n, ...), handle or None).
    """
    world_size = dist.get_world_size(process_group)
    output = input_.new_empty(world_size * input_.shape[0], *input_.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    handle = gather(output, input_.contiguous(), group=process_group, async_op=async_op)
    return output, handle


def reduce_scatter_raw(
    input_: Tensor, process_group: dist.ProcessGroup, async_op: bool = False
) -> tuple[Tensor, Handle]:
    """Sum over ranks and keep this rank's part of the first axis; no gradient.

    Args:
        input_: (n, ...) with n a multiple of the world size.
    Returns:
        ((n / world_size, ...), handle or None).
    """
    world_size = dist.get_world_size(process_group)
    assert input_.shape[0] % world_size == 0, (
        f"input_ has shape {tuple(input_.shape)}, expected a first axis divisible by world_size = {world_size}"
    )
    part = input_.shape[0] // world_size
    if dist.get_backend(process_group) == "gloo":
        # Some releases of gloo lack reduce_scatter.
        total = input_.clone(memory_format=torch.contiguous_format)
        handle = dist.all_reduce(total, group=process_group, async_op=async_op)
        start = dist.get_rank(process_group) * part
        return total[start : start + part], handle
    output = input_.new_empty(part, *input_.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    handle = scatter(output, input_.contiguous(), group=process_group, async_op=async_op)
    return output, handle


def all_reduce_raw(input_: Tensor, process_group: dist.ProcessGroup, async_op: bool = False) -> tuple[Tensor, Handle]:
    """Sum over ranks, in place if `input_` is contiguous; no gradient. Returns (the sum, handle or None)."""
    input_ = input_.contiguous()
    handle = dist.all_reduce(input_, group=process_group, async_op=async_op)
    return input_, handle


class AllGatherFunc(torch.autograd.Function):
    """all_gather; its gradient is reduce_scatter."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad_output, ctx.process_group), None


class ReduceScatterFunc(torch.autograd.Function):
    """reduce_scatter; its gradient is all_gather."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad_output, ctx.process_group), None


class AllReduceFunc(torch.autograd.Function):
    """all_reduce; its gradient is the identity: every rank continues with the same loss."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        return all_reduce_raw(input_.clone(), process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def all_gather(input_: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """`all_gather_raw` with a gradient: (n, ...) to (world_size * n, ...)."""
    gathered: Tensor = AllGatherFunc.apply(input_, process_group)
    return gathered


def reduce_scatter(input_: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """`reduce_scatter_raw` with a gradient: (n, ...) to (n / world_size, ...)."""
    scattered: Tensor = ReduceScatterFunc.apply(input_, process_group)
    return scattered


def all_reduce(input_: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks with a gradient; `input_` is not changed."""
    reduced: Tensor = AllReduceFunc.apply(input_, process_group)
    return reduced


def sync_shared_params(model: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Copy rank 0's values of the parameters marked `_shared_params = True` to all ranks, in place."""
    source = dist.get_global_rank(process_group, 0)
    for _, parameter in _find_marked(model, "_shared_params"):
        with torch.no_grad():
            dist.broadcast(parameter, src=source, group=process_group)


def allreduce_sequence_parallel_grad(model: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Sum the gradients of the parameters marked `_sequence_parallel = True` over ranks, in place."""
    grads = [p.grad for _, p in _find_marked(model, "_sequence_parallel") if p.grad is not None]
    if not grads:
        return
    with torch.no_grad():
        total = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(total, group=process_group)
        for grad, value in zip(grads, torch.split(total, [grad.numel() for grad in grads])):
            grad.copy_(value.view(grad.shape))


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """Return this rank's share of `dim` in units of `multiple_of`; the first ranks take the remaining units."""
    units = dim // multiple_of
    return (units // world_size + int(local_rank < units % world_size)) * multiple_of


def _find_marked(model: nn.Module, attribute: str) -> list[tuple[str, nn.Parameter]]:
    # By name, because ranks may own different sets of parameters (a bias on rank 0 only).
    return sorted((name, p) for name, p in model.named_parameters() if getattr(p, attribute, False))
