"""Tokens of packed tensors that belong to no sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_outside(tensor: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Set the tokens of (total, heads, head_dim) that lie outside of all sequences to 0, in place.

    Kernels leave them as they find the memory. Half a token more than its index tells the token at a
    sequence's end from the last one within. head_dim must fill whole 8 bytes.
    """
    tokens = torch.arange(0.5, tensor.shape[0], dtype=torch.float64, device=tensor.device)
    outside = tokens.clamp(cu_seqlens[0], cu_seqlens[-1]) != tokens
    # Eight bytes at a time: the pass costs a third.
    tensor.view(torch.int64).masked_fill_(outside[:, None, None], 0)
    return tensor
