"""Linear layers and the two-layer MLP under the names of flash-attn's fused kernels, on one device and parallel.

Plain PyTorch replaces the kernels; parameter names are the same. Tensor-parallel layers follow Shoeybi et al.
2019, with sequence parallelism as in Korthikanti et al. 2022: between layers each rank holds its part of the
first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_attn_compat.core.torch_state import autocasts
from flash_attn_compat.utils.distributed import (
    all_gather,
    all_gather_raw,
    all_reduce,
    all_reduce_raw,
    get_dim_for_local_rank,
    reduce_scatter,
    reduce_scatter_raw,
)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_approx": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "sqrelu": lambda x: F.relu(x).square(),
}


def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    return_residual: bool = False,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """x @ weight.T + bias: x (..., in_features), weight (out_features, in_features), bias (out_features,).

    Args:
        process_group: the ranks that hold other rows of the weight; x's gradient is summed over them.
        sequence_parallel: with a process_group, x is this rank's part of the first axis and is gathered first.
    Returns:
        (..., out_features), or that and x with `return_residual`.
    """
    out = F.linear(_sum_gradient_over_ranks(x, process_group, sequence_parallel), weight, bias)
    return (out, x) if return_residual else out


class FusedDenseFunc(torch.autograd.Function):
    """`fused_dense_func` as one step of autograd, for programs that apply it, subclass it, or read its ctx.

    ctx has compute_weight_gradient, return_residual, process_group, sequence_parallel, and saves x and weight, or
    weight alone if weight needs no gradient.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]  # sets the state for custom_bwd
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        return_residual: bool = False,
        process_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.compute_weight_gradient = weight.requires_grad
        ctx.return_residual = return_residual
        ctx.process_group = process_group
        ctx.sequence_parallel = sequence_parallel
        if autocasts(x):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        x = x.contiguous()
        ctx.save_for_backward(*((x, weight) if ctx.compute_weight_gradient else (weight,)))
        out = F.linear(_gather(x, process_group, sequence_parallel), weight, bias)
        return (out, x) if return_residual else out

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]  # PyTorch gives it no types
    def backward(ctx: Any, grad_output: Tensor, *of_residual: Tensor) -> tuple[Tensor | None, ...]:
        *x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = dweight = None
        if needs_x:
            dx = grad_output @ weight
            if ctx.process_group is not None:
                reduce = reduce_scatter_raw if ctx.sequence_parallel else all_reduce_raw
                dx = reduce(dx, ctx.process_group)[0]
            if ctx.return_residual:
                dx = dx + of_residual[0]
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        if needs_weight:
            total = _gather(x[0], ctx.process_group, ctx.sequence_parallel)
            dweight = rows.t() @ total.reshape(-1, total.shape[-1])
        return dx, dweight, rows.sum(dim=0) if needs_bias else None, None, None, None


class FusedDense(nn.Linear):
    """nn.Linear that can also return its input."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: dist.ProcessGroup | None = None) -> Any:
        """(..., in_features) to (..., out_features), or to that and x with `return_residual`."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


class ColumnParallelLinear(nn.Linear):
    """Each rank holds some of the output features.

    Args:
        in_features, out_features: of the whole layer.
        sequence_parallel: the input is this rank's part of the first axis; otherwise every rank has all of it.
        multiple_of: the unit of a rank's features; the first ranks take the remaining units.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: dist.ProcessGroup,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        local = _count_local_features("out_features", out_features, process_group, multiple_of)
        super().__init__(in_features, local, bias=bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Any:
        """(n, ..., in_features) to (n or world_size * n, ..., features of this rank)."""
        return fused_dense_func(
            x, self.weight, self.bias, process_group=self.process_group, sequence_parallel=self.sequence_parallel
        )


class RowParallelLinear(nn.Linear):
    """Each rank holds some of the input features, rank 0 the bias; the outputs are summed.

    Args:
        in_features, out_features: of the whole layer.
        sequence_parallel: each rank keeps its part of the first axis of the sum; otherwise all keep all of it.
        multiple_of: as `ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: dist.ProcessGroup,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        local = _count_local_features("in_features", in_features, process_group, multiple_of)
        has_bias = bias and dist.get_rank(process_group) == 0
        super().__init__(local, out_features, bias=has_bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """(n, ..., features of this rank) to (n or n / world_size, ..., out_features)."""
        return _sum_over_ranks(F.linear(x, self.weight, self.bias), self.process_group, self.sequence_parallel)


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int | str = 0,
    process_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """linear2(activation(linear1(x))): x (..., in_features), weight1 (hidden, in), weight2 (out, hidden).

    Args:
        activation: "gelu_approx" (tanh), "relu" or "sqrelu" (relu squared).
        checkpoint_lvl: above 0, hidden activations are recomputed in the backward instead of kept.
        save_pre_act, heuristic: accepted; they choose between kernels that give the same values.
        process_group, sequence_parallel: of the first layer, as `fused_dense_func`; the result is this rank's
            addend of the sum over ranks.
    Returns:
        (..., out_features), or that and x with `return_residual`.
    Raises:
        NotImplementedError: for another activation.
    """
    act = _find_activation(activation)

    def run(x: Tensor) -> Tensor:
        total = _sum_gradient_over_ranks(x, process_group, sequence_parallel)
        return F.linear(act(F.linear(total, weight1, bias1)), weight2, bias2)

    if checkpoint_lvl > 0 and torch.is_grad_enabled():
        out: Tensor = checkpoint(run, x, use_reentrant=False)
    else:
        out = run(x)
    return (out, x) if return_residual else out


class FusedMLP(nn.Module):
    """Two linear layers, `fc1` and `fc2`, with an activation between them.

    Args:
        in_features, hidden_features (4 * in_features by default), out_features (in_features by default).
        bias1, bias2: whether fc1 and fc2 have biases.
        activation, return_residual, checkpoint_lvl, heuristic: as `fused_mlp_func`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _find_activation(activation)
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        self.activation = activation
        self.return_residual = return_residual
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = heuristic
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """(..., in_features) to (..., out_features), or to that and x with `return_residual`.

        With a process_group, fc1 and fc2 hold this rank's hidden features; x and the result are its part of the
        first axis.
        """
        out = _run_mlp(self, x, process_group, sequence_parallel=True)
        return (out, x) if self.return_residual else out


class ParallelFusedMLP(nn.Module):
    """`FusedMLP` over a process group, each rank with some of the hidden features; arguments as `FusedMLP`.

    sequence_parallel: input and output are this rank's part of the first axis; otherwise every rank has all of it.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: str = "gelu_approx",
        process_group: dist.ProcessGroup | None = None,
        bias1: bool = True,
        bias2: bool = True,
        sequence_parallel: bool = True,
        checkpoint_lvl: int = 0,
        heuristic: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _find_activation(activation)
        assert process_group is not None, "process_group is required; FusedMLP works without one"
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.activation = activation
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = heuristic
        self.fc1 = ColumnParallelLinear(in_features, hidden_features, process_group, bias=bias1, **where)
        self.fc2 = RowParallelLinear(hidden_features, out_features, process_group, bias=bias2, **where)

    def forward(self, x: Tensor) -> Tensor:
        """(n, ..., in_features) to (n, ..., out_features)."""
        return _run_mlp(self, x, self.process_group, self.sequence_parallel)


def _run_mlp(
    module: FusedMLP | ParallelFusedMLP, x: Tensor, process_group: dist.ProcessGroup | None, sequence_parallel: bool
) -> Tensor:
    """Return `fused_mlp_func` with the parameters of ``module``, summed over the ranks."""
    fc1, fc2 = module.fc1, module.fc2
    out: Any = fused_mlp_func(
        x,
        fc1.weight,
        fc2.weight,
        fc1.bias,
        fc2.bias,
        activation=module.activation,
        checkpoint_lvl=module.checkpoint_lvl,
        process_group=process_group,
        sequence_parallel=sequence_parallel,
    )
    return out if process_group is None else _sum_over_ranks(out, process_group, sequence_parallel)


def _find_activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        raise NotImplementedError(f"activation is {name!r}, expected one of {', '.join(map(repr, _ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _count_local_features(name: str, features: int, process_group: dist.ProcessGroup, multiple_of: int) -> int:
    if features % multiple_of:
        raise ValueError(f"{name} ({features}) must be a multiple of {multiple_of}")
    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    return get_dim_for_local_rank(features, world_size, rank, multiple_of)


def _sum_gradient_over_ranks(x: Tensor, process_group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Return the whole input of a column-parallel layer; its backward sums the gradient over the ranks."""
    if process_group is None:
        return x
    if sequence_parallel:
        return all_gather(x, process_group)
    same: Tensor = _GradientOfAllRanks.apply(x, process_group)
    return same


def _gather(x: Tensor, process_group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Return the whole input of a column-parallel layer, outside of autograd."""
    return x if process_group is None or not sequence_parallel else all_gather_raw(x, process_group)[0]


def _sum_over_ranks(x: Tensor, process_group: dist.ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Return the sum of x over the ranks, a row-parallel layer's output; this rank's part if sequence_parallel."""
    return (reduce_scatter if sequence_parallel else all_reduce)(x, process_group)


class _GradientOfAllRanks(torch.autograd.Function):
    """The identity, with a gradient summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.process_group), None
