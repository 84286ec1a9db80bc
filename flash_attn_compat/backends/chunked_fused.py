"""`chunked` in half precision on NVIDIA GPUs: tiles hold whole rows of scores, one kernel does what is elementwise.

Without running maxima over blocks of keys, a tile takes two matrix products and three passes over its scores,
its backward five products and one pass. Launches are what is left to save, so statistics of all rows are
kept until the last tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_attn_compat.engine import elementwise
from flash_attn_compat.engine.call import Upstream

if TYPE_CHECKING:
    from flash_attn_compat.backends.chunked import Piece


def forward(piece: Piece, out: Tensor, lse: Tensor | None) -> None:
    """Write the piece's rows of out (n, seqlen_q, nheads, head_dim_v) and, if wanted, lse (n, nheads, seqlen_q).

    Rows that see no key are left as they are, 0 and +inf.
    """
    factor, softcap = _score_parameters(piece)
    blocks = list(piece.row_blocks())
    if not blocks:
        return
    peaks, totals = [], []
    for rows in blocks:
        columns = piece.visible_keys(rows)
        queries = piece.fold(piece.q, rows)
        products = piece.raw_scores(queries, rows, columns)
        # Scores rise with the products, so their maxima are in the same places.
        peaks.append(elementwise.score(products.amax(-1, keepdim=True), factor, softcap))
        weights, sums = elementwise.weights(products, peaks[-1], factor, softcap, piece.operand_dtype)
        totals.append(sums.sum(-1, keepdim=True))
        total = totals[-1]
        if piece.block.first_key is not None:
            # Rows of padding, or rows that see nothing but padding.
            total = total.masked_fill(total == 0, 1.0)
        values = piece.values[:, columns.start : columns.stop]
        found = piece.unfold(piece.product(weights.reshape(*queries.shape[:2], -1), values), rows)
        target = out[piece.n, rows.start : rows.stop, piece.heads].transpose(1, 2)
        torch.div(found, total, out=target)
    if lse is None:
        return
    total, peak = (torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0] for parts in (totals, peaks))
    found_lse = torch.log(total).add_(peak)
    if piece.block.first_key is not None:
        found_lse.masked_fill_(total == 0, torch.inf)
    lse[piece.n, piece.heads, blocks[0].start : blocks[-1].stop] = found_lse.squeeze(-1)


def backward(piece: Piece, upstream: Upstream, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write the piece's rows of dq (n, seqlen_q, nheads, head_dim), add to dk, dv (n * kv heads, seqlen_k, ...)."""
    factor, softcap = _score_parameters(piece)
    scale = piece.call.softmax_scale
    dout, out, lse = (
        tensor[piece.n, ..., piece.heads, :] for tensor in (upstream.dout, upstream.out, upstream.softmax_lse)
    )
    deltas = (dout.to(piece.dtype) * out).sum(-1).transpose(1, 2)
    for rows in piece.row_blocks():
        columns = piece.visible_keys(rows)
        inside = slice(columns.start, columns.stop)
        queries, row_dout = piece.fold(piece.q, rows), piece.fold(upstream.dout, rows)
        row_lse, delta = (tensor[..., rows.start : rows.stop].unsqueeze(-1) for tensor in (lse, deltas))
        products = piece.raw_scores(queries, rows, columns)
        dp = piece.unfold(piece.product(row_dout, piece.values[:, inside].transpose(1, 2)), rows)
        found = elementwise.gradients(products, dp, row_lse, delta, factor, softcap, piece.operand_dtype)
        p, ds = (tensor.reshape(*queries.shape[:2], -1) for tensor in found)
        piece.add_product(dv[:, inside], p.transpose(1, 2), row_dout)
        piece.add_product(dk[:, inside], ds.transpose(1, 2), queries, scale)
        row_dq = piece.unfold(piece.product(ds, piece.keys[:, inside]), rows)
        target = dq[piece.n, rows.start : rows.stop, piece.heads].transpose(1, 2)
        torch.mul(row_dq, scale, out=target)


def _score_parameters(piece: Piece) -> tuple[float, float]:
    """What elementwise.py makes scores of inner products with: factor and softcap."""
    softcap = piece.call.softcap
    return piece.call.softmax_scale / (softcap or 1.0), softcap
