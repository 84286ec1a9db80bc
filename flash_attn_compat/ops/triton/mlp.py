"""Two linear layers with a squared relu between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_attn_compat.ops.fused_dense import fused_mlp_func


def fused_dense_sqrelu_dense_function(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, checkpoint_lvl: int = 0
) -> Tensor:
    """linear2(relu(linear1(x)) squared) (So et al. 2021); arguments as `fused_mlp_func`, in another order."""
    out = fused_mlp_func(x, weight1, weight2, bias1, bias2, "sqrelu", checkpoint_lvl=checkpoint_lvl)
    assert isinstance(out, Tensor)
    return out


class FusedDenseSqreluDense(nn.Module):
    """`fused_dense_sqrelu_dense_function` with its parameters in fc1 and fc2; biases are required."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        checkpoint_lvl: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert bias1 and bias2, "DenseSqreluDense module without bias is currently not supported"
        assert checkpoint_lvl in (0, 1, 2), f"checkpoint_lvl must be 0, 1 or 2, got {checkpoint_lvl}"
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        self.checkpoint_lvl = checkpoint_lvl
        self.fc1 = nn.Linear(in_features, hidden_features, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        first, second = self.fc1, self.fc2
        return fused_dense_sqrelu_dense_function(
            x, first.weight, first.bias, second.weight, second.bias, self.checkpoint_lvl
        )
