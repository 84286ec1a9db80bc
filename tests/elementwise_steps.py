"""engine/elementwise.py's kernels as plain PyTorch, so that what surrounds them runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.engine.elementwise import Sight


def score(products: Tensor, factor: float, softcap: float) -> Tensor:
    found = torch.tanh(products * factor) * softcap if softcap else products * factor
    return found.masked_fill(products == -torch.inf, -torch.inf)


def peaks(products: Tensor, sight: Sight) -> Tensor:
    return products.masked_fill(_hidden(products, sight), -torch.inf).amax(-1, keepdim=True)


def weights(
    products: Tensor, peak: Tensor, factor: float, softcap: float, dtype: torch.dtype, sight: Sight
) -> tuple[Tensor, Tensor]:
    shift = score(peak, factor, softcap).masked_fill(peak == -torch.inf, 0.0)
    found = torch.exp(score(products, factor, softcap) - shift).masked_fill(_hidden(products, sight), 0.0)
    return _padded(found, dtype), found.sum(-1, keepdim=True)


def finish(
    products: Tensor, total: Tensor, peak: Tensor, factor: float, softcap: float, out: Tensor, lse: Tensor | None
) -> None:
    dead = total == 0
    out.copy_((products / total).masked_fill(dead, 0.0))
    if lse is not None:
        lse.copy_((total.log() + score(peak, factor, softcap)).masked_fill(dead, torch.inf).squeeze(-1))


def gradients(
    products: Tensor,
    dp: Tensor,
    lse: Tensor,
    delta: Tensor,
    factor: float,
    softcap: float,
    dtype: torch.dtype,
    sight: Sight,
) -> tuple[Tensor, Tensor]:
    p = torch.exp(score(products, factor, softcap) - lse).masked_fill(_hidden(products, sight), 0.0)
    tanh = torch.tanh(products * factor) if softcap else products.new_zeros(())
    ds = (p * (dp - delta) * (1 - tanh * tanh)).masked_fill(p == 0, 0.0)
    return _padded(p, dtype), _padded(ds, dtype)


def alibi_bias(
    slopes: Tensor, shift: Tensor, positions: Tensor, first_column: int, columns: int, dtype: torch.dtype
) -> Tensor:
    assert columns % 8 == 0
    places = torch.arange(first_column, first_column + columns, dtype=torch.float32, device=shift.device)
    return (shift - slopes * (places - positions.unsqueeze(1)).abs()).to(dtype)


def _padded(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows on 16 bytes, as the kernels write them."""
    columns = tile.shape[-1]
    found = torch.full((*tile.shape[:-1], columns + -columns % 8), torch.nan, dtype=dtype, device=tile.device)
    found[..., :columns] = tile
    return found[..., :columns]


def _hidden(products: Tensor, sight: Sight) -> Tensor:
    """Like products or broadcast to it, by the words of Sight alone."""
    n, _, rows, _, columns = products.shape
    device = products.device
    place = torch.arange(rows, device=device).view(rows, 1, 1) + sight.position
    column = torch.arange(columns, device=device)
    if sight.first_keys is None:
        blank = sight.blank - sight.blank_step * torch.arange(n, device=device)
    else:
        blank = sight.first_keys - sight.start
    outside = (column < place - sight.left) | (column > place + sight.right)
    return outside | (column < blank.view(n, 1, 1, 1, 1))
