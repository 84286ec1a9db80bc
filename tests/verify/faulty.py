"""A tiled attention with a backward of its own (FlashAttention-2, algorithms 1 and 2), and mistakes to plant in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TILE = 32


def tiles(n: int) -> list[slice]:
    return [slice(start, min(start + TILE, n)) for start in range(0, n, TILE)]


def kernel(mistake: str = "") -> Callable[..., Tensor]:
    """attention(q, k, v, causal, softcap) in flash-attn's layout, which makes one of the mistakes below, or none."""

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softcap: float = 0.0) -> Tensor:
        out: Tensor = Tiled.apply(q, k, v, causal, softcap, mistake)  # type: ignore[no-untyped-call]  # as torch types it
        return out

    return attention


class Tiled(torch.autograd.Function):
    """In fp32, or in fp64 where that comes in."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float, mistake: str) -> Tensor:
        wide, group = torch.promote_types(q.dtype, torch.float32), q.shape[2] // k.shape[2]
        heads = [x.transpose(1, 2).to(wide) for x in (q, k, v)]
        tiled = mistake == "tiled heads"
        heads[1:] = [x.repeat(1, group, 1, 1) if tiled else x.repeat_interleave(group, 1) for x in heads[1:]]
        work = Work(*heads, causal, softcap, mistake)
        out, l, m = work.forward()
        ctx.work, ctx.kept, ctx.group, ctx.dtype = work, (out, l, m), group, q.dtype
        return out.transpose(1, 2).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        dout = upstream[0].transpose(1, 2).to(ctx.work.q.dtype)
        dq, dk, dv = ctx.work.backward(dout, *ctx.kept)
        only = {"one head of a group": -1, "the first head of a group": 0}.get(ctx.work.mistake)
        dk, dv = (x.unflatten(1, (-1, ctx.group)) for x in (dk, dv))
        dk, dv = (x.sum(2) if only is None else x[:, :, only] for x in (dk, dv))
        return *(x.transpose(1, 2).to(ctx.dtype) for x in (dq, dk, dv)), None, None, None


class Work:
    """Of (batch, heads, seqlen, head_dim)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float, mistake: str) -> None:
        self.q, self.k, self.v, self.causal, self.softcap, self.mistake = q, k, v, causal, softcap, mistake
        head_dim = q.shape[-1]
        wrong = {
            "no scale": 1.0,
            "scale of a padded head_dim": 32**-0.5,
            "exp2 of scores": math.log(2) * head_dim**-0.5,
        }
        self.scale = wrong.get(mistake, head_dim**-0.5)

    def scores(self, rows: slice, columns: slice, backward: bool = False) -> Tensor:
        s = self.scale * self.q[..., rows, :] @ self.k[..., columns, :].mT
        s = self.softcap * torch.tanh(s / self.softcap) if self.softcap and self.mistake != "no softcap" else s
        if not self.causal or (backward and self.mistake == "backward without mask"):
            return s
        offset = 0 if self.mistake == "top left" else self.k.shape[-2] - self.q.shape[-2]
        offset += self.mistake == "mask one too far" or (backward and self.mistake == "backward mask one too far")
        offset -= self.mistake == "diagonal hidden"
        row = torch.arange(rows.start, rows.stop)[:, None] + offset
        hidden = 0.0 if self.mistake == "hidden keys are 0" else -math.inf
        return s.masked_fill(torch.arange(columns.start, columns.stop) > row, hidden)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        q, mistake = self.q, self.mistake
        out, (l, m) = torch.zeros_like(q), (q.new_full((*q.shape[:-1], 1), x) for x in (0.0, -math.inf))
        keys = tiles(self.k.shape[-2])
        keys = [tile for tile in keys if tile.stop - tile.start == TILE] if mistake == "no remainder" else keys
        keys = keys[:1] + keys[2:] if mistake == "tile left out" else keys
        keys = keys + keys[2:3] if mistake == "tile twice" else keys
        for rows in tiles(q.shape[-2]):
            for j, columns in enumerate(keys):
                before = tiles(self.k.shape[-2])[max(0, j - 1)] if columns.stop - columns.start == TILE else columns
                s = self.scores(rows, before if mistake == "K of the tile before" else columns)
                above = torch.maximum(m[..., rows, :], s.amax(-1, keepdim=True))
                above = s.amax(-1, keepdim=True) if mistake == "own maximum" else above
                safe = above.masked_fill(above == -math.inf, 0.0)
                p, shrink = torch.exp(s - safe), torch.exp(m[..., rows, :] - safe)
                shrink = torch.ones_like(shrink) if mistake == "own maximum" else shrink
                shrink = torch.where(shrink > 0, 1 / shrink, 0.0) if mistake == "inverted" else shrink
                forgets = {what for what in ("output", "row sum") if mistake.startswith((what, "neither"))}
                forgets &= forgets if j >= 2 or not mistake.endswith("tile 2") else set()
                of_l, of_o = (1.0 if what in forgets else shrink for what in ("row sum", "output"))
                beyond = (TILE - p.shape[-1]) * torch.exp(-safe) if mistake == "padding counted" else 0.0
                l[..., rows, :] = of_l * l[..., rows, :] + p.sum(-1, keepdim=True) + beyond
                values = self.v[..., before if mistake == "V of the tile before" else columns, :]
                out[..., rows, :] = of_o * out[..., rows, :] + p @ values
                start = (rows.start + TILE) % m.shape[-2] if mistake == "maximum at next tile" else rows.start
                stop = min(start + rows.stop - rows.start, m.shape[-2])
                m[..., start:stop, :] = above[..., : stop - start, :]
        if mistake != "no division":
            out = out / l if mistake == "NaN in empty rows" else torch.where(l > 0, out / l, 0.0)
        return (out[..., [1, 0, *range(2, out.shape[-1])]] if mistake == "channels swapped" else out), l, m

    def backward(self, dout: Tensor, out: Tensor, l: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mistake, (dq, dk, dv) = self.mistake, (torch.zeros_like(x) for x in (self.q, self.k, self.v))
        lse = m + (0.0 if mistake == "no row sum" else torch.log(l))
        delta = (dout * out).sum(-1, keepdim=True)
        wrong = {"no delta": 0 * delta, "delta added": -delta, "half of delta": delta / 2, "delta undivided": delta * l}
        delta = wrong.get(mistake, delta)
        for columns in tiles(self.k.shape[-2]):
            for i, rows in enumerate(tiles(self.q.shape[-2])):
                s = self.scores(rows, columns, backward=True)
                p = (torch.exp2 if mistake == "exp2 of a natural LSE" else torch.exp)(s - lse[..., rows, :])
                slope = 1 - (s / self.softcap) ** 2 if self.softcap and mistake != "no derivative" else 1.0
                dp = dout[..., rows, :] @ self.v[..., columns, :].mT
                ds = (p * (dp - delta[..., rows, :]) * slope).nan_to_num(0.0)
                times = 2.0 if mistake == "query tile twice" and i == 1 else 1.0
                dv[..., columns, :] += times * p.mT @ dout[..., rows, :]
                dk[..., columns, :] += self.scale * ds.mT @ self.q[..., rows, :]
                added = self.scale * ds @ self.k[..., columns, :]
                dq[..., rows, :] = added if mistake == "dq overwritten" else dq[..., rows, :] + added
        dq *= {"dq without scale": 1 / self.scale, "dq in log2": math.log(2)}.get(mistake, 1.0)
        dk *= {"dk off": 1.05, "dk scaled twice": self.scale}.get(mistake, 1.0)
        dv *= {"dv negative": -1.0}.get(mistake, 1.0)
        dq = {
            "dq heads reversed": dq.flip(1),
            "dq a tile down": dq.roll(TILE, 2),
            "dq in bf16": dq.bfloat16().to(dq),
        }.get(mistake, dq)
        if mistake == "races":
            dq += 0.1 * torch.rand_like(dq)
        return (dq, dv, dk) if mistake == "dk and dv swapped" else (dq, dk, dv)
