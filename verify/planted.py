"""A tiled kernel with its trace, and classical mistakes planted in it: something for `verify locate` to find.

    python -m verify locate verify.planted:maximum_at_next_tile

`right` has none. The mistakes are made on purpose; nothing else may use this file.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from verify.steps import blocks, divided, finite, in_the_future, matmul, over_heads, scores, zeros

Trace = dict[str, Tensor]


def _tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    block_rows: int = 64,
    block_columns: int = 64,
    *,
    mistake: str,
) -> tuple[Tensor, Trace]:
    """FlashAttention-2, with running maxima and row sums of all rows in one array each, as in GPU memory.

    Returns out like q and the trace: running_max and row_sum, each (batch, nheads, seqlen_q, key tiles).
    """
    after: list[tuple[Tensor, Tensor]] = []

    @over_heads
    def step(q: Tensor, k: Tensor, v: Tensor, causal: bool, block_rows: int, block_columns: int) -> Tensor:
        o, l, m = zeros(q, v.shape[-1]), zeros(q, 1), zeros(q, 1, -math.inf)
        kept = [(m.clone(), l.clone()) for _ in blocks(k.shape[-2], block_columns)]
        for rows in blocks(q.shape[-2], block_rows):
            for j, columns in enumerate(blocks(k.shape[-2], block_columns)):
                if not (causal and in_the_future(rows, columns, q, k)):
                    _tile(scores(q, k, rows, columns, causal), v[..., columns, :], rows, o, l, m)
                for stored, array in zip(kept[j], (m, l)):
                    stored[..., rows, :] = array[..., rows, :]
        after.extend(kept)
        return divided(o, l)

    def _tile(s: Tensor, vj: Tensor, rows: slice, o: Tensor, l: Tensor, m: Tensor) -> None:
        m_new = torch.maximum(m[..., rows, :], s.amax(-1, keepdim=True))
        p = torch.exp(s - finite(m_new))
        before = torch.exp(m[..., rows, :] - finite(m_new))
        before_l = torch.ones_like(before) if mistake == "row sum not rescaled" else before
        before_o = torch.ones_like(before) if mistake == "output not rescaled" else before
        l[..., rows, :] = before_l * l[..., rows, :] + p.sum(-1, keepdim=True)
        o[..., rows, :] = before_o * o[..., rows, :] + matmul(p.to(vj.dtype), vj)
        height = rows.stop - rows.start
        start = {
            "maximum at next tile": (rows.start + height) % m.shape[-2],
            "maximum without tile offset": 0,
        }.get(mistake, rows.start)
        stop = min(start + height, m.shape[-2])
        m[..., start:stop, :] = m_new[..., : stop - start, :]

    out = step(q, k, v, causal, block_rows, block_columns)
    m, l = (torch.cat([pair[i] for pair in after], dim=-1) for i in range(2))
    return out, {"running_max": m, "row_sum": l}


right = functools.partial(_tiled, mistake="")
maximum_at_next_tile = functools.partial(_tiled, mistake="maximum at next tile")
maximum_without_tile_offset = functools.partial(_tiled, mistake="maximum without tile offset")
row_sum_not_rescaled = functools.partial(_tiled, mistake="row sum not rescaled")
output_not_rescaled = functools.partial(_tiled, mistake="output not rescaled")
