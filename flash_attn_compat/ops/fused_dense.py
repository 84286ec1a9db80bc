"""Linear layers and the two-layer MLP under the names of flash-attn's fused kernels, on one device.

The kernels are gone, the arithmetic and the parameter names stay. The tensor-parallel classes are absent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """x @ weight.T + bias: x (..., in_features), weight (out_features, in_features), bias (out_features,).

    Returns:
        (..., out_features), or that and x with `return_residual`.
    Raises:
        NotImplementedError: with a process_group.
    """
    _check_one_device(process_group)
    out = F.linear(x, weight, bias)
    return (out, x) if return_residual else out


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

    def forward(self, x: Tensor, process_group: Any = None) -> Any:
        """(..., in_features) to (..., out_features), or to that and x with `return_residual`."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


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
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """linear2(activation(linear1(x))): x (..., in_features), weight1 (hidden, in), weight2 (out, hidden).

    Args:
        activation: "gelu_approx" (tanh), "relu" or "sqrelu" (relu squared).
        checkpoint_lvl: above 0, hidden activations are recomputed in the backward instead of kept.
        save_pre_act, heuristic: accepted; they choose between kernels that give the same values.
    Returns:
        (..., out_features), or that and x with `return_residual`.
    Raises:
        NotImplementedError: with a process_group, or another activation.
    """
    _check_one_device(process_group)
    act = _activation(activation)

    def run(x: Tensor) -> Tensor:
        return F.linear(act(F.linear(x, weight1, bias1)), weight2, bias2)

    if checkpoint_lvl > 0 and torch.is_grad_enabled():
        out = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
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
        _activation(activation)
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        self.activation = activation
        self.return_residual = return_residual
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = heuristic
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor, process_group: Any = None) -> Tensor | tuple[Tensor, Tensor]:
        """(..., in_features) to (..., out_features), or to that and x with `return_residual`."""
        return fused_mlp_func(
            x,
            self.fc1.weight,
            self.fc2.weight,
            self.fc1.bias,
            self.fc2.bias,
            activation=self.activation,
            return_residual=self.return_residual,
            checkpoint_lvl=self.checkpoint_lvl,
            process_group=process_group,
        )


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        raise NotImplementedError(f"activation is {name!r}, expected one of {', '.join(map(repr, _ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _check_one_device(process_group: Any) -> None:
    if process_group is not None:
        raise NotImplementedError("process_group: tensor-parallel layers are not part of flash_attn_compat")
