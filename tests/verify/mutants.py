"""A small right implementation of the seven public functions, a tiled kernel, and the ways to get them wrong.

`correct` must pass verify, and verify must find each of the others; locate names the mistakes of `kernel`. No code is
shared with the package or with verify.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 32


@dataclass(frozen=True)
class Naive:
    """Attention in fp32, one sequence at a time. Each field is one mistake; the defaults make none."""

    left_edge: int = 0  # keys too many at the left edge of a window
    right_edge: int = 0  # keys too many at the right edge, causal included
    top_left_causal: bool = False
    softcap_before_scale: bool = False
    alibi_sign: int = -1
    alibi_softcapped: bool = False
    tiled_heads: bool = False  # query head h reads kv head h % nheads_k
    log2_lse: bool = False
    fp16_accumulation: bool = False
    unwindowed_backward: bool = False
    stale_key_tile: bool = False  # the last full tile of keys is that before it
    stored_maximum_lost: bool = False  # every tile after the first is weighed with the first one's maximum
    cache_row_late: int = 0
    dropout_unscaled: bool = False
    dropout_of_scores: bool = False  # dropped before normalising
    dead_rows_average: bool = False
    dead_rows_minus_inf: bool = False
    scale_of_padded_head_dim: bool = False
    no_maximum_subtracted: bool = False
    rotary_halves_swapped: bool = False
    leftpad_ignored: bool = False
    aligned_to_longest: bool = False  # varlen: aligned by max_seqlen, not by each sequence's own lengths
    gradient_of_one_group_head: bool = False
    # What one maximum over a whole tensor would hide, because it is lost, or added, in small heads only:
    values_share_a_scale: bool = False  # v goes through fp16, moved into its range by one power of two
    upstream_shares_a_scale: bool = False  # so does dout
    scores_share_a_scale: bool = False  # so do q and k, by the power of two that balances them
    neighbouring_head_leaks: bool = False  # 1e-5 of another head's output is added
    # And what only numbers that are not finite show:
    largest_of_all_sequences: bool = False  # v is divided by the largest of all, exactly, and out multiplied by it
    padding_times_zero: bool = False  # what lies outside of the sequences, or behind a cache's end, is weighed with 0

    # ---- the public functions ---------------------------------------------------------------------------------------

    def flash_attn_func(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False
    ):  # fmt: skip
        rules = dict(
            p=dropout_p, scale=softmax_scale, causal=causal, window=_open(window_size, k.shape[1]), softcap=softcap
        )
        q, k, v, back = self._of_one_scale(q, k, v)
        parts = [self._sequence(q[b], k[b], v[b], slopes=_row(alibi_slopes, b), **rules) for b in range(q.shape[0])]
        out, lse = (torch.stack([part[i] for part in parts]) for i in range(2))
        out = self._finished(out, back)
        return (out, lse, _slab([part[2] for part in parts], q.dtype, dropout_p)) if return_attn_probs else out

    def flash_attn_kvpacked_func(self, q, kv, *args, **kwargs):
        return self.flash_attn_func(q, *kv.unbind(2), *args, **kwargs)

    def flash_attn_qkvpacked_func(self, qkv, *args, **kwargs):
        return self.flash_attn_func(*qkv.unbind(2), *args, **kwargs)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None
    ):  # fmt: skip
        rules = dict(
            p=dropout_p, scale=softmax_scale, causal=causal, window=_open(window_size, max_seqlen_k), softcap=softcap
        )
        if self.aligned_to_longest:
            rules["shift"] = int(max_seqlen_k) - int(max_seqlen_q)
        bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        q, k, v, back = self._of_one_scale(q, k, v)
        parts = []
        for b in range(len(bounds_q) - 1):
            keys = slice(bounds_k[b], bounds_k[b + 1])
            if block_table is None:
                kb, vb = k[keys], v[keys]
            else:
                kb, vb = (x[block_table[b].long()].flatten(0, 1)[: keys.stop - keys.start] for x in (k, v))
            parts.append(
                self._sequence(q[bounds_q[b] : bounds_q[b + 1]], kb, vb, slopes=_row(alibi_slopes, b), **rules)
            )
        out, lse = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], dim=1)
        before, after = bounds_q[0], q.shape[0] - bounds_q[-1]
        out, lse = F.pad(self._finished(out, back), (0, 0, 0, 0, before, after)), F.pad(lse, (before, after))
        if self.padding_times_zero and block_table is None:
            out = out + 0 * (v[: bounds_k[0]].sum() + v[bounds_k[-1] :].sum()).to(out.dtype)
        return (out, lse, _slab([part[2] for part in parts], q.dtype, dropout_p)) if return_attn_probs else out

    def flash_attn_varlen_kvpacked_func(self, q, kv, *args, **kwargs):
        return self.flash_attn_varlen_func(q, *kv.unbind(1), *args, **kwargs)

    def flash_attn_varlen_qkvpacked_func(self, qkv, cu_seqlens, max_seqlen, *args, **kwargs):
        q, k, v = qkv.unbind(1)
        return self.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False
    ):  # fmt: skip
        batch, page = q.shape[0], k_cache.shape[1]
        capacity = page if block_table is None else page * block_table.shape[1]
        if cache_seqlens is None:
            cache_seqlens = capacity
        lengths = cache_seqlens.tolist() if isinstance(cache_seqlens, Tensor) else [cache_seqlens] * batch
        window = _open(window_size, capacity)
        local = causal or window != (-1, -1)
        parts = []
        for b in range(batch):
            row = b if cache_batch_idx is None else int(cache_batch_idx[b])

            def where(index: Tensor) -> tuple[Any, Tensor]:
                return (row, index) if block_table is None else (block_table[b].long()[index // page], index % page)

            start, end = lengths[b], lengths[b]
            if k is not None:
                positions = torch.arange(start, start + k.shape[1], device=q.device)
                late = (positions + self.cache_row_late).clamp(max=capacity - 1)
                k_cache[where(late)] = self._rotated(k[b], rotary_cos, rotary_sin, positions, rotary_interleaved)
                v_cache[where(late)] = v[b]
                end += k.shape[1]
            first = 0 if cache_leftpad is None or self.leftpad_ignored else int(cache_leftpad[b])
            kept = where(torch.arange(first, end, device=q.device))
            rows = torch.arange(q.shape[1], device=q.device) * int(local) + start
            rules = dict(scale=softmax_scale, causal=causal, window=window, softcap=softcap)
            turned = self._rotated(q[b], rotary_cos, rotary_sin, rows, rotary_interleaved)
            parts.append(self._sequence(turned, k_cache[kept], v_cache[kept], slopes=_row(alibi_slopes, b), **rules))
        out, lse = (torch.stack([part[i] for part in parts]) for i in range(2))
        out = self._finished(out, None)
        if self.padding_times_zero and block_table is None and cache_batch_idx is None:
            new = 0 if k is None else k.shape[1]
            behind = [v_cache[b, lengths[b] + new :].double().sum() for b in range(batch)]
            out = out + 0 * torch.stack(behind)[:, None, None, None].to(out.dtype)
        return (out, lse) if return_softmax_lse else out

    # ---- whole tensors ----------------------------------------------------------------------------------------------

    def _of_one_scale(self, q, k, v, read=slice(None)):
        """Return q, k, v and the factor for out; `read`: the keys that belong to a sequence."""
        back = None
        if self.values_share_a_scale:
            v = _through_fp16(v, _power_of_two(1 / _largest(v)))
        if self.scores_share_a_scale:
            balance = _power_of_two((_largest(k) / _largest(q)).sqrt())
            q, k = _through_fp16(q, balance), _through_fp16(k, 1 / balance)
        if self.largest_of_all_sequences and q.dtype != torch.float16 and v[read].numel():
            back = _power_of_two(v[read].detach().abs().amax().float())
            v = v.float() / back
        return q, k, v, back

    def _finished(self, out, back):
        if back is not None:
            out = (out.float() * back).to(out.dtype)
        if self.neighbouring_head_leaks:
            out = out + (torch.finfo(out.dtype).eps / 8 * out.float().roll(1, -2)).to(out.dtype)
        return _UpstreamThroughFp16.apply(out) if self.upstream_shares_a_scale else out

    # ---- one sequence -----------------------------------------------------------------------------------------------

    def _sequence(
        self, q, k, v, p=0.0, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, shift=None
    ):
        """out (seqlen_q, nheads, dv), lse (nheads, seqlen_q), signed exp(s - max) (nheads, seqlen_q, seqlen_k)."""
        dtype, (sq, nheads, d), sk = q.dtype, q.shape, k.shape[0]
        compute = torch.promote_types(dtype, torch.float32)
        groups = nheads // k.shape[1]
        if self.stale_key_tile and sk >= 2 * TILE:
            last = sk // TILE * TILE
            k = torch.cat((k[: last - TILE], k[last - 2 * TILE : last - TILE], k[last:]))
        if self.tiled_heads:
            k, v = (x.repeat(1, groups, 1) for x in (k, v))
        else:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if self.gradient_of_one_group_head:
            first = (torch.arange(nheads, device=q.device) % groups == 0)[:, None]
            k, v = (torch.where(first, x, x.detach()) for x in (k, v))
        q, k, v = (x.to(compute).transpose(0, 1) for x in (q, k, v))
        scale = (-(-d // 8) * 8 if self.scale_of_padded_head_dim else d) ** -0.5 if scale is None else scale

        s = q @ k.transpose(1, 2) * (1.0 if self.softcap_before_scale and softcap > 0 else scale)
        i = torch.arange(sq, device=q.device)[:, None] + (sk - sq if shift is None else shift)
        j = torch.arange(sk, device=q.device)[None, :]
        bias = 0 if slopes is None else self.alibi_sign * slopes[:, None, None].to(compute) * (i - j).abs()
        if self.alibi_softcapped:
            s, bias = s + bias, 0
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap) * (scale if self.softcap_before_scale else 1.0)
        s = s + bias

        left, right = int(window[0]), 0 if causal else int(window[1])
        if self.top_left_causal and causal:
            i = i - (sk - sq)
        visible = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
        if left >= 0:
            visible &= j >= i - left - self.left_edge
        if right >= 0:
            visible &= j <= i + right + self.right_edge
        kept = torch.ones(nheads, sq, sk, dtype=torch.bool, device=q.device)
        if p > 0:
            kept = torch.randint(0, 256, kept.shape, device=q.device) <= math.floor(255 * (1 - p))

        out, lse, weights = self._softmax(s, visible, kept, v, p, dtype)
        if self.unwindowed_backward and left >= 0:
            wide, _, _ = self._softmax(s, torch.ones_like(visible), kept, v, p, dtype)
            out = wide + (out - wide).detach()
        if slopes is not None and right == 0 and left < 0:
            lse = lse + slopes[:, None] * (torch.arange(sq, device=q.device) + sk - sq)
        return out.transpose(0, 1).to(dtype), lse.float(), weights

    def _softmax(self, s, visible, kept, v, p, dtype):
        alive = visible.any(dim=1)
        s = s.masked_fill(~(visible | ~alive[:, None]), -math.inf)
        top = s.detach().amax(dim=-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
        if self.no_maximum_subtracted:
            top = torch.zeros_like(top)
        e = torch.exp(s - top)
        if self.stored_maximum_lost and s.shape[-1] > TILE:
            first = s[..., :TILE].detach().amax(dim=-1, keepdim=True).clamp(min=-1e4)
            e = torch.cat((e[..., :TILE], torch.exp(s[..., TILE:] - first)), dim=-1)
        if self.dropout_of_scores and p > 0:
            e = e * kept
        total = e.sum(dim=-1, keepdim=True)
        weights = e / total * (1 if self.dead_rows_average else alive[:, None])
        if p > 0:
            weights = weights * kept / (1.0 if self.dropout_unscaled else 1 - p)
        lse = (top + total.log()).squeeze(-1)
        if self.log2_lse:
            lse = lse / math.log(2)
        lse = lse.masked_fill(~alive, -math.inf if self.dead_rows_minus_inf else math.inf)
        signed = torch.where(kept, e, -e - 1e-30).detach() * alive[:, None]
        return self._product(weights, v, dtype), lse, signed

    def _product(self, weights, v, dtype):
        if not self.fp16_accumulation or dtype != torch.float16:
            return weights @ v
        total = torch.zeros(*weights.shape[:-1], v.shape[-1], dtype=torch.float16, device=v.device)
        for tile in range(0, weights.shape[-1], TILE):
            total = total + (weights[..., tile : tile + TILE] @ v[..., tile : tile + TILE, :]).half()
        return total.float()

    def _rotated(self, x, cos, sin, positions, interleaved):
        if cos is None:
            return x
        cos, sin = (table[positions].float()[:, None] for table in (cos, sin))
        if interleaved != self.rotary_halves_swapped:
            cos, sin = (table.repeat_interleave(2, dim=-1) for table in (cos, sin))
        else:
            cos, sin = (table.repeat(1, 1, 2) for table in (cos, sin))
        head, tail = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :]
        if interleaved != self.rotary_halves_swapped:
            turned = torch.stack((-head[..., 1::2], head[..., ::2]), dim=-1).flatten(-2)
        else:
            a, b = head.chunk(2, dim=-1)
            turned = torch.cat((-b, a), dim=-1)
        return torch.cat(((head * cos + turned * sin).to(x.dtype), tail), dim=-1)


class _UpstreamThroughFp16(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.view_as(out)

    @staticmethod
    def backward(ctx, dout):
        return _through_fp16(dout, _power_of_two(1 / _largest(dout)))


def _through_fp16(x: Tensor, scale: Tensor) -> Tensor:
    """The value that is left of x * scale in fp16, with x's gradient; only of bf16, which needs such a thing."""
    if x.dtype != torch.bfloat16:
        return x
    kept = ((x.float() * scale).half().float() / scale).to(x.dtype)
    return x + (kept - x).detach()


def _largest(x: Tensor) -> Tensor:
    finite = x.detach().float().abs().nan_to_num(0.0, 0.0, 0.0)
    return finite.amax().clamp(min=1e-30) if x.numel() else finite.new_ones(())


def _power_of_two(x: Tensor) -> Tensor:
    return torch.exp2(torch.log2(x).round())


def _open(window_size: tuple[int, int], longest_k: int) -> tuple[int, int]:
    """Sides no shorter than the longest key sequence are no limit."""
    left, right = (-1 if int(side) >= longest_k else int(side) for side in window_size)
    return left, right


def _row(slopes: Tensor | None, index: int) -> Tensor | None:
    return slopes if slopes is None or slopes.dim() == 1 else slopes[index]


def _slab(parts: list[Tensor], dtype: torch.dtype, p: float) -> Tensor:
    if p <= 0:
        return torch.empty(0, dtype=dtype)
    sq, sk = (-(-max(part.shape[axis] for part in parts) // 128) * 128 for axis in (1, 2))
    return torch.stack([F.pad(part, (0, sk - part.shape[2], 0, sq - part.shape[1])) for part in parts]).to(dtype)


correct = Naive()
left_edge_one_too_far, left_edge_one_too_near = Naive(left_edge=1), Naive(left_edge=-1)
right_edge_one_too_far, right_edge_one_too_near = Naive(right_edge=1), Naive(right_edge=-1)
alibi_sign = Naive(alibi_sign=1)
cache_one_row_late = Naive(cache_row_late=1)
# Every mistake that is made or not is a mutant of its name.
globals().update({field.name: Naive(**{field.name: True}) for field in fields(Naive) if field.default is False})


# ---- a tiled attention with a backward of its own (FlashAttention-2, algorithms 1 and 2)


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
