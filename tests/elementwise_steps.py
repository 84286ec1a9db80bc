"""engine/elementwise.py's kernels as plain PyTorch, packing included, so that what surrounds them runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def score(product: Tensor, factor: float, softcap: float) -> Tensor:
    found = torch.tanh(product * factor) * softcap if softcap else product * factor
    return found.masked_fill(product == -torch.inf, -torch.inf)


def compiled(name: str, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    def weights(even: Tensor, odd: Tensor, peak: Tensor, **parameters: Any) -> tuple[Tensor, Tensor]:
        shift = score(peak, **parameters).masked_fill(peak == -torch.inf, 0.0)
        low, high = (torch.exp(score(products, **parameters) - shift) for products in (even, odd))
        return _pack(low, high, dtype), low + high

    def gradients(
        even: Tensor, odd: Tensor, dp_even: Tensor, dp_odd: Tensor, lse: Tensor, delta: Tensor, **parameters: Any
    ) -> tuple[Tensor, Tensor]:
        p = [torch.exp(score(products, **parameters) - lse) for products in (even, odd)]
        ds = []
        for one, products, dp in zip(p, (even, odd), (dp_even, dp_odd), strict=True):
            tanh = torch.tanh(products * parameters["factor"]) if parameters["softcap"] else torch.zeros(())
            ds.append((one * (dp - delta) * (1 - tanh * tanh)).masked_fill(one == 0, 0.0))
        return _pack(*p, dtype), _pack(*ds, dtype)

    return {"weights": weights, "gradients": gradients}[name]


def compiled_bias(dtype: torch.dtype) -> Callable[..., Tensor]:
    def bias(slopes: Tensor, shift: Tensor, positions: Tensor, even: Tensor) -> Tensor:
        low, high = (shift - slopes * (columns - positions).abs() for columns in (even, even + 1))
        return _pack(low, high, dtype)

    return bias


def _pack(low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.stack((low.to(dtype), high.to(dtype)), dim=-1).contiguous().view(torch.float32).squeeze(-1)
