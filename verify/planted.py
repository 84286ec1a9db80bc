"""A tiled kernel with planted classical mistakes, for `verify locate` to find.

    flash-attn-compat verify locate verify.planted:maximum_at_next_tile

`right` has no mistake, and the last four kernels only lack digits. The mistakes are on purpose; no other file may use
them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .steps import Attention, blocks, divided, finite, in_the_future, matmul, over_heads, scores, zeros


def planted(mistake: str, weights: torch.dtype | None = None) -> Attention:
    """Return FlashAttention-2 with ``mistake``. Its maxima and row sums are arrays over all rows, as in GPU memory.

    weights: the dtype to which probabilities are rounded before the product with V; by default v's
    """

    @over_heads
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, block_rows: int, block_columns: int) -> Tensor:
        o, l, m = zeros(q, v.shape[-1]), zeros(q, 1), zeros(q, 1, -math.inf)
        for rows in blocks(q.shape[-2], block_rows):
            for columns in blocks(k.shape[-2], block_columns):
                if causal and in_the_future(rows, columns, q, k):
                    continue
                s, vj = scores(q, k, rows, columns, causal), v[..., columns, :]
                m_new = torch.maximum(m[..., rows, :], s.amax(-1, keepdim=True))
                p = torch.exp(s - finite(m_new))
                before = torch.exp(m[..., rows, :] - finite(m_new))
                before_l = 1.0 if mistake == "row sum not rescaled" else before
                before_o = 1.0 if mistake == "output not rescaled" else before
                l[..., rows, :] = before_l * l[..., rows, :] + p.sum(-1, keepdim=True)
                o[..., rows, :] = before_o * o[..., rows, :] + matmul(p.to(weights or vj.dtype).to(vj.dtype), vj)
                height = rows.stop - rows.start
                start = {
                    "maximum at next tile": (rows.start + height) % m.shape[-2],
                    "maximum without tile offset": 0,
                }.get(mistake, rows.start)
                stop = min(start + height, m.shape[-2])
                m[..., start:stop, :] = m_new[..., : stop - start, :]
        return divided(o, l)

    return attention


right = planted("")
maximum_at_next_tile = planted("maximum at next tile")
maximum_without_tile_offset = planted("maximum without tile offset")
row_sum_not_rescaled = planted("row sum not rescaled")
output_not_rescaled = planted("output not rescaled")


# ---- right in lower precision ---------------------------------------------------------------------------------------


def in_half(inputs: torch.dtype | None = None, output: torch.dtype | None = None) -> Attention:
    """Return the right kernel, but with inputs or output rounded to these dtypes."""

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        given = (x if inputs is None else x.to(inputs).to(x.dtype) for x in (q, k, v))
        out = right(*given, causal=causal)
        return out if output is None else out.to(output).to(out.dtype)

    return attention


half_inputs = in_half(inputs=torch.float16)
half_output = in_half(output=torch.float16)
half_weights = planted("", weights=torch.float16)
bfloat16_throughout = in_half(torch.bfloat16, torch.bfloat16)
