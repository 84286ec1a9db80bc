"""Merging softmax results that were computed over disjoint sets of keys.

With ``lse = log(sum(exp(scores)))`` of each part, the whole is the average of the outputs weighted by
``exp(lse_part - lse_whole)`` (Milakov and Gimelshein, 2018; FlashAttention, algorithm 1). A row that saw
no key in a part carries ``+inf`` there, as flash-attn reports it, and weighs nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two partial results.

    out: (..., head_dim) fp32 or fp64, lse: the same shape without head_dim, +inf where no key was seen.
    Returns the merged ``(out, lse)`` in the same convention.
    """
    a = _empty_to_minus_inf(lse_a)
    b = _empty_to_minus_inf(lse_b)
    lse = torch.logaddexp(a, b)
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    weight_a = torch.exp(a - finite).unsqueeze(-1)
    weight_b = torch.exp(b - finite).unsqueeze(-1)
    return out_a * weight_a + out_b * weight_b, minus_inf_to_empty(lse)


def _empty_to_minus_inf(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == math.inf, -math.inf)


def minus_inf_to_empty(lse: Tensor) -> Tensor:
    """flash-attn marks a row without keys by +inf, logsumexp by -inf."""
    return lse.masked_fill(lse == -math.inf, math.inf)
