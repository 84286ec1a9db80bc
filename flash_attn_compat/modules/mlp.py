"""Feed-forward blocks: plain and gated. The tensor-parallel ones are absent."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn_compat.ops.activations import swiglu
from flash_attn_compat.ops.fused_dense import FusedMLP

__all__ = ["FusedMLP", "GatedMlp", "Mlp"]


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
        activation: Callable[[Tensor], Tensor] = F.gelu,
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
        activation: Callable[[Tensor], Tensor] = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden_features = -(-hidden_features // multiple_of) * multiple_of
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, 2 * hidden_features, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(..., in_features) to (..., out_features)."""
        y = self.fc1(x)
        if self.activation is F.sigmoid:
            y = F.glu(y, dim=-1)
        else:
            y, gate = y.chunk(2, dim=-1)
            y = swiglu(gate, y) if self.activation is F.silu else y * self.activation(gate)
        y = self.fc2(y)
        return (y, x) if self.return_residual else y
