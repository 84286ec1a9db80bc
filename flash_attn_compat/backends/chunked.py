"""Online softmax over tiles of keys in plain PyTorch: every feature, every device, memory linear in length.

Forward is algorithm 1 of FlashAttention-2 (Dao, 2023) and backward its algorithm 2, with tiles as large
as a fixed memory budget allows: one pass over all visible keys of a few rows where that fits, running
maxima only where it does not. Query heads that share a key head are rows of the same matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends.base import BlockwiseBackend, Capabilities
from flash_attn_compat.backends.chunked_tiles import SubBlock, sub_blocks
from flash_attn_compat.engine.call import AttentionCall, Upstream
from flash_attn_compat.engine.compilation import OptionallyCompiled
from flash_attn_compat.engine.features import Feature
from flash_attn_compat.engine.layout import Block, lse_dtype
from flash_attn_compat.engine.mask import Range


class Chunked(BlockwiseBackend):
    name = "chunked"
    capabilities = Capabilities(features=~(Feature.TRANSFORMS | Feature.BIAS))

    def forward_block(
        self, call: AttentionCall, block: Block, rng_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        n, seqlen_q, nheads = block.q.shape[:3]
        out = block.q.new_empty(n, seqlen_q, nheads, call.head_dim_v)
        lse = None
        if call.return_lse or call.needs_grad:
            lse = block.q.new_empty((n, nheads, seqlen_q), dtype=lse_dtype(block.q.dtype))
        if call.mask.rows_with_keys(seqlen_q, block.k.shape[1]).size < seqlen_q:
            # The others are not computed.
            out.zero_()
            if lse is not None:
                lse.fill_(torch.inf)
        for sub in sub_blocks(call, block, rng_state):
            for rows in sub.row_tiles():
                row_out, row_lse = _attend_rows(sub, rows)
                out[sub.n, rows.start : rows.stop, sub.heads] = row_out.transpose(1, 2)
                if lse is not None:
                    lse[sub.n, sub.heads, rows.start : rows.stop] = row_lse

        return out, lse

    def backward_block(self, call: AttentionCall, block: Block, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.zeros_like(block.q), torch.empty_like(block.k), torch.empty_like(block.v)
        for sub in sub_blocks(call, block, upstream.rng_state):
            totals = [torch.zeros_like(tensor, dtype=sub.dtype) for tensor in (sub.keys, sub.values)]
            for rows in sub.row_tiles():
                row_dq = _backpropagate_rows(sub, rows, upstream, *totals)
                dq[sub.n, rows.start : rows.stop, sub.heads] = row_dq.transpose(1, 2)
            for target, total in zip((dk, dv), totals):
                target[sub.n, :, sub.heads_kv] = total.unflatten(0, (sub.count, -1)).transpose(1, 2)
        return dq, dk, dv


def _attend_rows(sub: SubBlock, rows: Range) -> tuple[Tensor, Tensor]:
    """Algorithm 1 for one tile of rows: out (n, q heads, rows, head_dim_v) and its LSE."""
    queries = sub.fold(sub.q, rows)
    first, *others = sub.key_tiles(rows)
    out, total, peak = _attend_tile(sub, queries, rows, first, None)
    for columns in others:
        tile_out, tile_total, new_peak = _attend_tile(sub, queries, rows, columns, peak)
        decay = torch.exp(peak - new_peak)
        out.mul_(decay).add_(tile_out)
        total.mul_(decay).add_(tile_total)
        peak = new_peak
    dead = total == 0  # every visible score is -inf
    lse = total.log().add_(peak).masked_fill_(dead, torch.inf)
    return out.div_(total.mul_(1.0 - sub.call.dropout_p).masked_fill_(dead, 1.0)), lse.squeeze(-1)


def _attend_tile(
    sub: SubBlock, queries: Tensor, rows: Range, columns: Range, peak: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What one tile of keys adds to out and to the weights' sum, and the new running maximum."""
    weights, total, new_peak = _weigh(sub, queries, rows, columns, peak)
    keep = sub.keep(rows, columns)
    if keep is not None:
        weights.mul_(keep)
    values = sub.values[:, columns.start : columns.stop]
    out = sub.unfold(sub.product(weights.reshape(*queries.shape[:2], -1), values), rows)
    return out, total, new_peak


def _weigh(
    sub: SubBlock, queries: Tensor, rows: Range, columns: Range, peak: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - maximum) of a tile as an operand, its row sums, and the running maximum.

    That is finite where a row has seen nothing yet, too, or exp(-inf - maximum) would be nan.
    """
    if _fused_weights.is_enabled and sub.block.slopes is None and sub.block.first_key is None:
        raw, hidden = sub.raw_scores(queries, rows, columns), sub.hidden(rows, columns)
        return _fused_weights(raw, hidden, sub.call.softcap, peak, sub.operand_dtype)
    scores = sub.scores(queries, rows, columns)
    tile_peak = scores.amax(-1, keepdim=True)
    new_peak = tile_peak.clamp_min(torch.finfo(scores.dtype).min) if peak is None else torch.maximum(peak, tile_peak)
    weights = scores.sub_(new_peak).exp_()
    return weights.to(sub.operand_dtype), weights.sum(-1, keepdim=True), new_peak


@OptionallyCompiled
def _fused_weights(
    raw: Tensor, hidden: Tensor | None, softcap: float, peak: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What _weigh does after the matrix product, out of place and in one expression for the compiler to fuse."""
    scores = torch.tanh(raw) * softcap if softcap else raw
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    tile_peak = scores.amax(-1, keepdim=True)
    new_peak = tile_peak if peak is None else torch.maximum(peak, tile_peak)
    new_peak = torch.where(new_peak == -torch.inf, torch.finfo(scores.dtype).min, new_peak)
    weights = torch.exp(scores - new_peak)
    return weights.to(dtype), weights.sum(-1, keepdim=True), new_peak


def _backpropagate_rows(sub: SubBlock, rows: Range, upstream: Upstream, dk: Tensor, dv: Tensor) -> Tensor:
    """Algorithm 2 for one tile of rows: adds to dk and dv, returns dq (n, q heads, rows, head_dim)."""
    call = sub.call
    queries, dout = sub.fold(sub.q, rows), sub.fold(upstream.dout, rows)
    delta = (dout.to(sub.dtype) * sub.fold(upstream.out, rows)).sum(-1, keepdim=True)
    where = sub.n, sub.heads, slice(rows.start, rows.stop)
    if upstream.dlse is not None:
        delta -= upstream.dlse[where].reshape(delta.shape)
    row_lse = upstream.lse[where].to(sub.dtype).unsqueeze(-1)
    dq: Tensor | None = None
    for columns in sub.key_tiles(rows):
        inside = slice(columns.start, columns.stop)
        scores = sub.scores(queries, rows, columns)
        slope = sub.softcap_slope(queries, rows, columns, scores) if call.softcap else None
        folded = scores.sub_(row_lse).exp_().reshape(*queries.shape[:2], -1)
        keep = sub.keep(rows, columns)
        dropped = folded.to(sub.operand_dtype)
        if keep is not None:
            keep = keep.mul_(1.0 / (1.0 - call.dropout_p)).reshape(folded.shape)
            dropped = dropped * keep
        dv[:, inside] += sub.product(dropped.transpose(1, 2), dout)
        dscores = sub.product(dout, sub.values[:, inside].transpose(1, 2))
        if keep is not None:
            dscores.mul_(keep)
        dscores.sub_(delta).mul_(folded)
        if slope is not None:
            dscores.mul_(slope.reshape(dscores.shape))
        dscores = dscores.to(sub.operand_dtype)
        tile_dq = sub.product(dscores, sub.keys[:, inside], call.softmax_scale)
        dq = tile_dq if dq is None else dq.add_(tile_dq)
        dk[:, inside] += sub.product(dscores.transpose(1, 2), queries, call.softmax_scale)
    assert dq is not None  # rows that see no keys are in no tile
    return sub.unfold(dq, rows)
