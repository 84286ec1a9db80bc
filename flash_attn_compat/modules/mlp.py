"""Feed-forward blocks: plain and gated, on one device and tensor-parallel."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn_compat.ops.activations import swiglu
from flash_attn_compat.ops.fused_dense import ColumnParallelLinear, FusedMLP, ParallelFusedMLP, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "FusedMLP",
    "GatedMlp",
    "Mlp",
    "ParallelFusedMLP",
    "ParallelGatedMlp",
    "ParallelMLP",
    "RowParallelLinear",
    "swiglu",
]

Activation = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """fc2(activation(fc1(x))).

    Args:
        in_features, hidden_features (4 * in_features by default), out_features (in_features by default).
        activation: applied between the two layers.
        bias1, bias2: whether fc1 and fc2 have biases.
        return_residual: return (y, x) instead of y.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(..., in_features) to (..., out_features)."""
        y = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class ParallelMLP(nn.Module):
    """`Mlp` over a process group, each rank with some of the hidden features; arguments as `Mlp`.

    sequence_parallel: input and output are this rank's part of the first axis; otherwise every rank has all of it.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.gelu,
        process_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = True,
        bias1: bool = True,
        bias2: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert process_group is not None, "process_group is required; Mlp works without one"
        out_features = in_features if out_features is None else out_features
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        self.fc1 = ColumnParallelLinear(
            in_features, hidden_features, process_group, bias1, sequence_parallel, device=device, dtype=dtype
        )
        self.activation = activation
        self.fc2 = RowParallelLinear(
            hidden_features, out_features, process_group, bias2, sequence_parallel, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, ..., in_features) to (n, ..., out_features)."""
        y: Tensor = self.fc2(self.activation(self.fc1(x)))
        return y


class GatedMlp(nn.Module):
    """fc2(y * activation(gate)) with (y, gate) the two halves of fc1(x) (Shazeer 2020).

    Args:
        in_features, out_features (in_features by default).
        hidden_features: 8 / 3 * in_features by default; rounded up to `multiple_of`.
        activation: of the gate; F.sigmoid makes this a GLU.
        bias1, bias2: whether fc1 and fc2 have biases.
        return_residual: return (y, x) instead of y.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = _count_gated_features(in_features, hidden_features, multiple_of)
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, 2 * hidden_features, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(..., in_features) to (..., out_features)."""
        y = self.fc2(_apply_gate(self.fc1(x), self.activation))
        return (y, x) if self.return_residual else y


class ParallelGatedMlp(nn.Module):
    """`GatedMlp` over a process group, with its arguments.

    A rank's fc1 holds its share of y, then its share of the gate.

    sequence_parallel: input and output are this rank's part of the first axis; otherwise every rank has all of it.
    """

    def __init__(
        self,
        in_features: int,
        process_group: dist.ProcessGroup,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = _count_gated_features(in_features, hidden_features, multiple_of)
        # multiple_of=2, since a rank's share must hold as many features of y as of the gate, even if shares differ.
        self.fc1 = ColumnParallelLinear(
            in_features, 2 * hidden_features, process_group, bias1, sequence_parallel, 2, device=device, dtype=dtype
        )
        self.activation = activation
        self.fc2 = RowParallelLinear(
            hidden_features, out_features, process_group, bias2, sequence_parallel, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, ..., in_features) to (n, ..., out_features)."""
        y: Tensor = self.fc2(_apply_gate(self.fc1(x), self.activation))
        return y


def _count_gated_features(in_features: int, hidden_features: int | None, multiple_of: int) -> int:
    hidden_features = int(8 * in_features / 3) if hidden_features is None else hidden_features
    return -(-hidden_features // multiple_of) * multiple_of


def _apply_gate(y: Tensor, activation: Activation) -> Tensor:
    """(..., 2 * hidden) to (..., hidden): the first half times activation(second half)."""
    if activation is F.sigmoid:
        return F.glu(y, dim=-1)
    y, gate = y.chunk(2, dim=-1)
    return swiglu(gate, y) if activation is F.silu else y * activation(gate)
