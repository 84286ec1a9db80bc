"""`chunked` in half precision on NVIDIA GPUs: tiles hold whole rows of scores, one kernel does what is elementwise.

Without running maxima over blocks of keys, a tile takes two matrix products and two passes over its scores,
its backward five products and one pass. Launches are what is left to save.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends.chunked_tiles import Piece
from flash_attn_compat.engine import elementwise
from flash_attn_compat.engine.call import Upstream
from flash_attn_compat.engine.mask import Range


def forward(piece: Piece, out: Tensor, lse: Tensor | None) -> None:
    """Write the piece's rows of out (n, seqlen_q, nheads, head_dim_v) and, if wanted, lse (n, nheads, seqlen_q).

    Rows that see no key are left as they are, 0 and +inf.
    """
    factor, softcap = _score_parameters(piece)
    blocks = list(piece.row_blocks())
    if not blocks:
        return
    everything = Range(blocks[0].start, blocks[-1].stop)
    queries = piece.fold_rows(piece.q, everything)
    for rows in blocks:
        columns, share = piece.visible_keys(rows), _share(piece, everything, rows)
        products = piece.inner_products(queries[:, share], columns)
        sight = piece.sight(rows, columns)
        # Scores rise with the products, so their maxima are in the same places.
        peak = elementwise.peaks(products, sight)
        weights, total = elementwise.weights(products, peak, factor, softcap, piece.operand_dtype, sight)
        found = piece.product(weights.flatten(2, 3).flatten(0, 1), piece.values[:, columns.start : columns.stop])
        row_lse = None if lse is None else piece.rows_by_key_head(lse.transpose(1, 2), rows)
        row_out = piece.rows_by_key_head(out, rows)
        elementwise.finish(piece.unfold_rows(found), total, peak, factor, softcap, row_out, row_lse)


def backward(piece: Piece, upstream: Upstream, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write the piece's rows of dq (n, seqlen_q, nheads, head_dim), add to dk, dv (n * kv heads, seqlen_k, ...)."""
    factor, softcap = _score_parameters(piece)
    scale = piece.call.softmax_scale
    blocks = list(piece.row_blocks())
    if not blocks:
        return
    everything = Range(blocks[0].start, blocks[-1].stop)
    queries, dout = piece.fold_rows(piece.q, everything), piece.fold_rows(upstream.dout, everything)
    out = piece.rows_by_key_head(upstream.out, everything)
    deltas = (piece.unfold_rows(dout) * out.to(piece.dtype)).sum(-1, keepdim=True)
    lse = piece.rows_by_key_head(upstream.lse.transpose(1, 2).unsqueeze(-1), everything)
    for rows in blocks:
        columns, share = piece.visible_keys(rows), _share(piece, everything, rows)
        inside = slice(columns.start, columns.stop)
        row_lse, delta = (tensor.narrow(2, rows.start - everything.start, rows.size) for tensor in (lse, deltas))
        products = piece.inner_products(queries[:, share], columns)
        dp = piece.unfold_rows(piece.product(dout[:, share], piece.values[:, inside].transpose(1, 2)))
        found = elementwise.gradients(
            products, dp, row_lse, delta, factor, softcap, piece.operand_dtype, piece.sight(rows, columns)
        )
        p, ds = (tensor.flatten(2, 3).flatten(0, 1) for tensor in found)
        piece.add_product(dv[:, inside], p.transpose(1, 2), dout[:, share])
        piece.add_product(dk[:, inside], ds.transpose(1, 2), queries[:, share], scale)
        row_dq = piece.unfold_rows(piece.product(ds, piece.keys[:, inside]))
        torch.mul(row_dq, scale, out=piece.rows_by_key_head(dq, rows))


def _share(piece: Piece, everything: Range, rows: Range) -> slice:
    """Where ``rows`` lie in what fold_rows made of ``everything``."""
    return slice((rows.start - everything.start) * piece.group, (rows.stop - everything.start) * piece.group)


def _score_parameters(piece: Piece) -> tuple[float, float]:
    """What elementwise.py makes scores of inner products with: factor and softcap."""
    softcap = piece.call.softcap
    return piece.call.softmax_scale / (softcap or 1.0), softcap
