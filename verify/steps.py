"""From naive attention to FlashAttention in four steps, as in a lecture; `verify ladder` climbs them.

Read it from top to bottom: there is no timing, no check. "FA1" is Dao et al. 2022 (FlashAttention), "FA2" is Dao 2023
(FlashAttention-2); line numbers are those of the papers' listings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

Attention = Callable[..., Tensor]


# ---- shared by all steps --------------------------------------------------------------------------------------------


def over_heads(step: Attention) -> Attention:
    """Wrap a step on q (..., seqlen_q, head_dim) and k, v (..., seqlen_k, head_dim) into flash-attn's layout:
    q (batch, seqlen_q, nheads, head_dim), k and v (batch, seqlen_k, nheads_k, head_dim), out like q.
    """

    @functools.wraps(step)
    def attention(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, block_rows: int = 64, block_columns: int = 64
    ) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(groups, dim=2) if groups > 1 else x for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return step(q, k, v, causal, block_rows, block_columns).transpose(1, 2).to(q.dtype)

    del attention.__dict__["__wrapped__"]  # else inspect shows the step's signature, which has no defaults
    return attention


def blocks(n: int, size: int) -> list[slice]:
    """Return the tiles of 0 .. n - 1, each of `size`; the last is shorter if size does not divide n."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b with sums in fp32 or better. A CPU first widens half precision, whose products are slow there."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide) if a.device.type == "cpu" else (a @ b).to(wide)


def scores(q: Tensor, k: Tensor, rows: slice, columns: slice, causal: bool) -> Tensor:
    """Return the tile S_ij = Q_i K_j^T / sqrt(head_dim) of queries `rows` and keys `columns`; -inf for future keys."""
    s = matmul(q[..., rows, :] * q.shape[-1] ** -0.5, k[..., columns, :].transpose(-1, -2))
    if not causal:
        return s
    now = torch.arange(rows.start, rows.stop, device=q.device) + k.shape[-2] - q.shape[-2]  # the last row sees all keys
    return s.masked_fill(torch.arange(columns.start, columns.stop, device=q.device) > now[:, None], -math.inf)


def in_the_future(rows: slice, columns: slice, q: Tensor, k: Tensor) -> bool:
    """Whether the causal mask hides the whole tile."""
    return bool(columns.start > rows.stop - 1 + k.shape[-2] - q.shape[-2])


def finite(m: Tensor) -> Tensor:
    """Return the maxima with 0 for rows that have seen no key yet: subtracting their -inf would give NaN."""
    return m.masked_fill(m == -math.inf, 0.0)


def divided(o: Tensor, l: Tensor) -> Tensor:
    """Return diag(l)^-1 O; 0 for a row that sees no key."""
    return torch.where(l > 0, o / l, 0.0)


def zeros(q: Tensor, width: int, value: float = 0.0) -> Tensor:
    """Return a tensor (..., seqlen_q, width) in fp32 or better, filled with ``value``."""
    return q.new_full((*q.shape[:-1], width), value, dtype=torch.promote_types(q.dtype, torch.float32))


# ---- the steps ------------------------------------------------------------------------------------------------------


@over_heads
def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool, block_rows: int, block_columns: int) -> Tensor:
    """No blocks: S and P, seqlen_q x seqlen_k each, go to memory and back as whole matrices."""
    everything = slice(0, q.shape[-2]), slice(0, k.shape[-2])
    s = scores(q, k, *everything, causal)  # FA1 algorithm 0, line 1: S = Q K^T
    p = torch.exp(s - finite(s.amax(-1, keepdim=True)))  # line 2: P = softmax(S)
    p = divided(p, p.sum(-1, keepdim=True))
    return matmul(p.to(v.dtype), v)  # line 3: O = P V


@over_heads
def blocked_matmul(q: Tensor, k: Tensor, v: Tensor, causal: bool, block_rows: int, block_columns: int) -> Tensor:
    """Both products by blocks, as a matmul kernel does. The softmax between them still passes over all of S."""
    s = zeros(q, k.shape[-2])
    for rows in blocks(q.shape[-2], block_rows):  # FA1 algorithm 0, line 1, "by blocks"
        for columns in blocks(k.shape[-2], block_columns):
            s[..., rows, columns] = scores(q, k, rows, columns, causal)
    m = s.amax(-1, keepdim=True)  # line 2 in four passes over memory: maximum, exponential, sum, division
    p = s.sub_(finite(m)).exp_()
    p = p.div_(p.sum(-1, keepdim=True).clamp_(min=torch.finfo(p.dtype).tiny)).to(v.dtype)
    o = zeros(q, v.shape[-1])
    for rows in blocks(q.shape[-2], block_rows):  # line 3, "by blocks"
        for columns in blocks(k.shape[-2], block_columns):
            o[..., rows, :] += matmul(p[..., rows, columns], v[..., columns, :])
    return o


@over_heads
def fused_rows(q: Tensor, k: Tensor, v: Tensor, causal: bool, block_rows: int, block_columns: int) -> Tensor:
    """One query row at a time through all three lines: a row of S never leaves the chip. Memory is linear now, but
    every row reads all of K and V again.
    """
    o = zeros(q, v.shape[-1])
    for i in range(q.shape[-2]):
        row = slice(i, i + 1)
        s = scores(q, k, row, slice(0, k.shape[-2]), causal)  # FA1 algorithm 0, line 1, for one row
        p = torch.exp(s - finite(s.amax(-1, keepdim=True)))  # line 2
        l = p.sum(-1, keepdim=True)
        o[..., row, :] = divided(matmul(p.to(v.dtype), v), l)  # line 3
    return o


@over_heads
def online_tiles(q: Tensor, k: Tensor, v: Tensor, causal: bool, block_rows: int, block_columns: int) -> Tensor:
    """FlashAttention-2: the softmax is corrected at each tile, so one tile at a time is enough. Queries are in the
    outer loop, so O_i, l_i and m_i stay on chip until the row block is done. (FlashAttention has keys there, and O, l
    and m go to memory and back in each pass.) Row blocks are independent, and the division by l happens once.
    """
    o = zeros(q, v.shape[-1])
    for rows in blocks(q.shape[-2], block_rows):  # FA2 algorithm 1, line 3: for i; line 4: load Q_i
        qi = q[..., rows, :]
        oi, li, mi = zeros(qi, v.shape[-1]), zeros(qi, 1), zeros(qi, 1, -math.inf)  # line 5
        for columns in blocks(k.shape[-2], block_columns):  # line 6: for j; line 7: load K_j, V_j
            if causal and in_the_future(rows, columns, q, k):
                break
            s = scores(q, k, rows, columns, causal)  # line 8: S_ij = Q_i K_j^T
            m_new = torch.maximum(mi, s.amax(-1, keepdim=True))  # line 9: m, then P~ = exp(S - m), then l
            p = torch.exp(s - finite(m_new))
            before = torch.exp(mi - finite(m_new))
            li = before * li + p.sum(-1, keepdim=True)
            oi = before * oi + matmul(p.to(v.dtype), v[..., columns, :])  # line 10 (printed there with a stray ^-1)
            mi = m_new
        o[..., rows, :] = divided(oi, li)  # line 12, line 14; line 13 would be L_i = m_i + log(l_i)
    return o


STEPS: dict[str, Attention] = {
    "naive": naive,
    "blocked matmul": blocked_matmul,
    "fused rows": fused_rows,
    "online tiles": online_tiles,
}
# The steps' names in the papers, for the legend of a picture.
PAPER = {
    "naive": "naive: FlashAttention, algorithm 0",
    "blocked matmul": "blocked matmul: algorithm 0 by blocks",
    "fused rows": "fused rows: algorithm 0 row by row",
    "online tiles": "online tiles: FlashAttention-2, algorithm 1",
}
