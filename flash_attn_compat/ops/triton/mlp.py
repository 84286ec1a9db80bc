"""Two linear layers with a squared relu between them."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.ops.fused_dense import FusedMLP, fused_mlp_func


def fused_dense_sqrelu_dense_function(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, checkpoint_lvl: int = 0
) -> Tensor:
    """linear2(relu(linear1(x)) squared) (So et al. 2021); arguments as `fused_mlp_func`, in another order."""
    out = fused_mlp_func(x, weight1, weight2, bias1, bias2, "sqrelu", checkpoint_lvl=checkpoint_lvl)
    assert isinstance(out, Tensor)
    return out


class FusedDenseSqreluDense(FusedMLP):
    """`FusedMLP` with a squared relu; biases are required."""

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
        assert bias1 and bias2, "DenseSqreluDense module without bias is currently not supported"
        assert checkpoint_lvl in (0, 1, 2), f"checkpoint_lvl must be 0, 1 or 2, got {checkpoint_lvl}"
        super().__init__(
            in_features,
            hidden_features,
            out_features,
            activation="sqrelu",
            checkpoint_lvl=checkpoint_lvl,
            device=device,
            dtype=dtype,
        )
