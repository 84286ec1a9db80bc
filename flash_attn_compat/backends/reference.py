"""The backend that all others are checked against: it computes all scores at once, in fp64 if the device has it.

It consists of differentiable, out-of-place operators, so it also supports forward-mode AD, torch.func and double
backward. Its memory grows with the product of the lengths. It has the last rank of all backends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends.base import BlockwiseBackend, Capabilities
from flash_attn_compat.backends.scores import scores_of
from flash_attn_compat.backends.varlen import Block
from flash_attn_compat.core.call import AttentionCall, BackwardInputs
from flash_attn_compat.core.features import all_but
from flash_attn_compat.core.mask import MASK_FEATURES, Range


class Reference(BlockwiseBackend):
    name = "reference"
    capabilities = Capabilities(features=all_but(0) | MASK_FEATURES)

    def forward_block(
        self, call: AttentionCall, block: Block, rng_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = _repeat_key_heads(call, block)
        scores, _ = scores_of(call, block, q, k)
        peak = _row_maximum(scores.detach())
        weights = torch.exp(scores - peak)
        total = weights.sum(-1, keepdim=True)
        dead = total == 0
        lse = torch.where(dead, torch.inf, total.masked_fill(dead, 1.0).log() + peak).squeeze(-1)
        probabilities = weights / total.masked_fill(dead, 1.0)
        keep = _dropout_factors(call, block, rng_state)
        if keep is not None:
            probabilities = probabilities * keep
        out = torch.einsum("bhqk,bkhd->bqhd", probabilities, v)
        return out.to(block.q.dtype).contiguous(), lse.to(torch.float64 if q.dtype == block.q.dtype else torch.float32)

    def backward_block(
        self, call: AttentionCall, block: Block, upstream: BackwardInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _repeat_key_heads(call, block)
        dout, out, lse = (tensor.to(q.dtype) for tensor in (upstream.dout, upstream.out, upstream.lse))
        scores, softcap_slope = scores_of(call, block, q, k)
        probabilities = torch.exp(scores - lse.unsqueeze(-1))
        keep = _dropout_factors(call, block, upstream.rng_state)
        dropped = probabilities if keep is None else probabilities * keep
        dv = torch.einsum("bhqk,bqhd->bkhd", dropped, dout)
        dprobabilities = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        if keep is not None:
            dprobabilities = dprobabilities * keep
        delta = torch.einsum("bqhd,bqhd->bhq", dout, out)
        if upstream.dlse is not None:
            delta = delta - upstream.dlse
        dscores = probabilities * (dprobabilities - delta.unsqueeze(-1))
        if softcap_slope is not None:
            dscores = dscores * softcap_slope
        dq = torch.einsum("bhqk,bkhd->bqhd", dscores, k) * call.softmax_scale
        dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q) * call.softmax_scale
        groups = (block.k.shape[2], -1)
        return dq, dk.unflatten(2, groups).sum(3), dv.unflatten(2, groups).sum(3)


def _row_maximum(scores: Tensor) -> Tensor:
    """Return the largest score of each row; a finite number for a row that sees no key, and if there are no keys."""
    lowest = torch.finfo(scores.dtype).min
    if not scores.shape[-1]:
        return scores.new_full((*scores.shape[:-1], 1), lowest)
    return scores.amax(-1, keepdim=True).clamp_min(lowest)


def _repeat_key_heads(call: AttentionCall, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v in the working precision, with key and value heads repeated for their query heads."""
    dtype = _working_dtype(block)
    group = call.nheads // call.nheads_k
    k, v = (tensor.to(dtype).repeat_interleave(group, dim=2) for tensor in (block.k, block.v))
    return block.q.to(dtype), k, v


def _dropout_factors(call: AttentionCall, block: Block, rng_state: Tensor | None) -> Tensor | None:
    """Return dropout's factors of probabilities, 0 or 1 / (1 - p); None without dropout."""
    if not call.dropout_p:
        return None
    rows, keys = Range(0, block.q.shape[1]), Range(0, block.k.shape[1])
    kept = block.kept(rng_state, call.dropout_p, Range(0, call.nheads), rows, keys)
    return kept.to(_working_dtype(block)) / (1.0 - call.dropout_p)


def _working_dtype(block: Block) -> torch.dtype:
    return torch.float32 if block.q.device.type == "mps" else torch.float64
