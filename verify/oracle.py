"""The right answer to every public call, in fp64, and the same call done plainly in its own dtype.

Written from the documented behaviour alone: one dense boolean mask and one score matrix per sequence, gradients by
autograd. It imports nothing of flash_attn_compat, so its agreement is evidence. `answer(...)` is the right answer;
`plain(...)` shows the rounding error of the dtype itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import CACHES, EIGHT_BITS, PACKED, Answer, Call


@dataclass(frozen=True)
class ScoreOptions:
    """The options of a call that decide its scores, and whether flash-attn returns a shifted LSE."""

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float
    shifts_lse: bool  # causal, no window: flash-attn's ALiBi is slope * j, so its LSE is larger by slope * pos(i)


@dataclass(frozen=True)
class Tokens:
    """For each sequence, the indices of its tokens in q, and in k and v, all flattened to (tokens, heads, dim)."""

    rows: Sequence[Tensor]
    keys: Sequence[Tensor]


@dataclass(frozen=True)
class Truth(Answer):
    """The fp64 answer, the sequence of each token, and the size of the numbers behind the answer.

    magnitudes: of "out", "score", and the gradients of "q", "k" and "v": for each (sequence, head) the largest sum of
        absolute terms of an element, to which rounding errors are proportional. Of "dP": an upper bound before dropout
    spacings: by how much a result changes if every probability, or every score's gradient, changes by 1: the factor of
        the loss if these underflow
    tainted: (sequences, key heads) bool, whether an input is not finite
    """

    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    spacings: Mapping[str, Tensor] = field(default_factory=dict)
    tainted: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    tokens: Tokens = field(default_factory=lambda: Tokens((), ()))

    def magnitude(self, name: str) -> float:
        """Return the largest of ``magnitudes[name]`` over all sequences and heads."""
        return float(self.magnitudes[name].max())


def answer(fn: str, args: Mapping[str, Any], dout: Tensor | None = None, keep: Tensor | None = None) -> Truth:
    """Return the right answer, in fp64. keep: the dropout keep mask, (B, H, >= sq, >= sk) bool, if dropout_p > 0"""
    return _answer(Call(fn, dict(args), dout), keep, exact=True)


def plain(fn: str, args: Mapping[str, Any], dout: Tensor | None = None, keep: Tensor | None = None) -> Truth:
    """Return the answer with every intermediate result rounded to the input's dtype; out, grads and caches only."""
    return _answer(Call(fn, dict(args), dout), keep, exact=False)


def visible(call: Call) -> list[Tensor]:
    """Return the visible keys of each query row: one bool tensor (seqlen_q, seqlen_k) per sequence."""
    args, found, _ = one_form(call)
    mask = _mask(args)
    return [
        keys_visible(len(rows), len(keys), mask.causal, mask.window, call.q.device)
        for rows, keys in zip(found.rows, found.keys)
    ]


def keys_visible(sq: int, sk: int, causal: bool, window: tuple[int, int], device: torch.device | str) -> Tensor:
    """Return (sq, sk) bool, bottom-right aligned: pos(i) - left <= j <= pos(i) + right; a negative side is no bound."""
    left, right = window
    if causal:
        right = 0
    offset = torch.arange(sk, device=device)[None, :] - (torch.arange(sq, device=device)[:, None] + sk - sq)
    visible = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if left >= 0:
        visible &= offset >= -left
    if right >= 0:
        visible &= offset <= right
    return visible


# ---------------------------------------------------------------- one sequence


class Attended(NamedTuple):
    """One sequence's out (sq, H, dv) and, if computed in fp64, its LSE (H, sq) and the fields of Truth by head."""

    out: Tensor
    lse: Tensor = torch.zeros(0)
    magnitudes: Mapping[str, Tensor] = {}
    spacings: Mapping[str, Tensor] = {}
    tainted: Tensor = torch.zeros(0)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, mask: ScoreOptions, slopes: Tensor | None, keep: Tensor | None, dropout_p: float,
    dout: Tensor | None, exact: bool,
) -> Attended:  # fmt: skip
    """Compute attention of one sequence, in fp64 if ``exact``.

    q (sq, H, d), k (sk, Hk, d), v (sk, Hk, dv), slopes (H,), keep (H, sq, sk), dout (sq, H, dv)
    """
    (sq, sk), group, dtype = (q.shape[0], k.shape[0]), q.shape[1] // k.shape[1], q.dtype
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    visible = keys_visible(sq, sk, mask.causal, mask.window, q.device)
    scores = _matmul(q, (k * mask.scale).mT)
    slope_terms: Tensor | float = 1.0
    if mask.softcap > 0:
        capped = torch.tanh(scores / mask.softcap)
        slope_terms = 1 + capped.detach() ** 2
        scores = capped * mask.softcap
    position = torch.arange(sq, device=q.device) + sk - sq
    bias = scores.new_zeros(())
    if slopes is not None:  # the bias stays in fp32, the dtype of the slopes, as in flash-attn's own tests
        wide = torch.promote_types(dtype, torch.float32)
        distance = (position[:, None] - torch.arange(sk, device=q.device)[None, :]).abs()
        bias = slopes.to(wide)[:, None, None] * distance
        scores = scores.to(wide) - bias
    dead = ~visible.any(-1)
    scores = scores.masked_fill(~visible, -torch.inf)
    probs = torch.softmax(scores.masked_fill(dead[:, None], 0.0), -1).to(dtype).masked_fill(dead[:, None], 0.0)
    dropped = probs if keep is None else probs * keep
    kept_by = 1 if keep is None else 1 / (1 - dropout_p)
    out = _matmul(dropped, v * kept_by).transpose(0, 1)
    if not exact:
        return Attended(out)
    with torch.no_grad():
        lse = torch.logsumexp(scores, -1)
        if slopes is not None and mask.shifts_lse:
            lse = lse + slopes.double()[:, None] * position
        given = None if dout is None else dout.transpose(0, 1).abs()
        sizes, weights, scale = (q.abs(), k.abs(), v.abs()), (probs, dropped * kept_by), abs(mask.scale)
        sums, spacings = _sizes(*sizes, given, *weights, visible, bias.abs(), slope_terms, scale, group)
        # A sum is not finite exactly if one of its terms is not, since fp64 does not overflow here.
        per_head = q.sum((1, 2)) + k.sum((1, 2)) + v.sum((1, 2))
        if dout is not None:
            per_head = per_head + dout.sum((0, 2))
        tainted = ~per_head.view(-1, group).sum(1).isfinite()
    return Attended(out, lse.masked_fill(dead, torch.inf), sums, spacings, tainted)


def _sizes(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, probs: Tensor, dropped: Tensor, visible: Tensor, bias: Tensor,
    slope_terms: Tensor | float, scale: float, group: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Return Truth.magnitudes and Truth.spacings of one sequence: the formulas of the results, on absolute values.

    q and dout (H, sq, d), k and v (H, sk, d), probs and dropped (H, sq, sk); slope_terms: 1 + tanh^2 under a softcap;
    group: how many query heads share a key head
    """
    sums = {"out": _amax(dropped @ v), "score": _amax((scale * (q @ k.mT) + bias) * visible)}
    seen = visible.any(0)[:, None]
    spacings = {"out": _amax((v * seen).sum(1))}
    if dout is None:
        return sums, spacings

    def of_key_head(x: Tensor) -> Tensor:
        return torch.unflatten(x, 0, (-1, group)).sum(1)

    sums["dP"] = v.shape[-1] * _amax(v) * _amax(dout)
    dprobs = (dout @ v.mT) * torch.where(probs > 0, dropped / probs, 0.0)
    dscores = scale * probs * (dprobs + (probs * dprobs).sum(-1, keepdim=True)) * slope_terms
    sums["q"] = _amax(dscores @ k)
    sums["k"] = _amax(of_key_head(dscores.mT @ q))
    sums["v"] = _amax(of_key_head(dropped.mT @ dout))
    # The backward reads the returned out, so an underflow in out is missing from every score's gradient.
    of_out = probs * dout.sum(-1, keepdim=True) * slope_terms
    # PyTorch's memory-efficient kernel keeps scores' gradients times the scale.
    step = max(scale, 1.0)
    spacings["q"] = step * _amax((k * seen).sum(1, keepdim=True) + of_out @ k)
    spacings["k"] = step * _amax(of_key_head(q.sum(1, keepdim=True) + of_out.mT @ q))
    spacings["v"] = _amax(of_key_head(dout.sum(1)))
    return sums, spacings


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, accumulated in fp32 and rounded once, as in half precision on a GPU."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


def _amax(x: Tensor) -> Tensor:
    """Return the largest number of each head, 0 for a head without numbers."""
    x = x.flatten(1)
    return x.amax(1) if x.shape[1] else x.new_zeros(x.shape[0])


# ---------------------------------------------------------------- whole calls


def _answer(call: Call, keep: Tensor | None, exact: bool) -> Truth:
    args, found, caches = one_form(call, exact)
    # q, k and v as autograd leaves. Caches are under the names k and v here, and get no gradient.
    wide = torch.float64 if exact else call.dtype
    leaves = {n: args[n].detach().to(wide).requires_grad_(call.dout is not None) for n in ("q", "k", "v")}
    q, k, v = (leaf.flatten(0, -3) for leaf in leaves.values())
    dout = None if call.dout is None else call.dout.to(wide).flatten(0, -3)
    mask, slopes = _mask(args), args.get("alibi_slopes")
    attended = []
    for b, (rows, keys) in enumerate(zip(found.rows, found.keys)):
        mine = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        kept = keep[b, :, : len(rows), : len(keys)] if keep is not None and call.dropout_p > 0 else None
        d = None if dout is None else dout[rows]
        attended.append(_attended(q[rows], k[keys], v[keys], mask, mine, kept, call.dropout_p, d, exact))
    placed = torch.cat([*found.rows])
    out = q.new_zeros(*q.shape[:2], v.shape[-1]).index_copy(0, placed, torch.cat([a.out for a in attended]))
    out = out.view(*leaves["q"].shape[:-1], v.shape[-1])
    grads: dict[str, Tensor] = {}
    if call.dout is not None:
        gradients = torch.autograd.grad(out, list(leaves.values()), call.dout.to(wide), materialize_grads=True)
        grads = dict(zip(leaves, gradients))
    result = Truth(out=out.detach(), grads=grads, caches=caches, tokens=found)
    if not exact:
        return result
    # NaN for tokens outside of every sequence: their LSE is undefined.
    lse = q.new_full((q.shape[1], q.shape[0]), torch.nan).index_copy(1, placed, torch.cat([a.lse for a in attended], 1))
    return replace(
        result,
        softmax_lse=lse if leaves["q"].dim() == 3 else lse.unflatten(1, leaves["q"].shape[:2]).transpose(0, 1),
        magnitudes={n: torch.stack([a.magnitudes[n] for a in attended]) for n in attended[0].magnitudes},
        spacings={n: torch.stack([a.spacings[n] for a in attended]) for n in attended[0].spacings},
        tainted=torch.stack([a.tainted for a in attended]),
    )


def _mask(args: Mapping[str, Any]) -> ScoreOptions:
    left, right = (int(x) for x in args.get("window_size", (-1, -1)))
    if "window_size_left" in args:  # arguments of the private functions
        left, right = int(args["window_size_left"]), int(args["window_size_right"])
    causal, scale = bool(args.get("causal", False)), args.get("softmax_scale")
    # A side at least as long as the keys (the longest sequence, or the cache) counts as unbounded.
    longest = int(args.get("max_seqlen_k", args["capacity"]))
    return ScoreOptions(
        scale=args["q"].shape[-1] ** -0.5 if scale is None else float(scale),
        causal=causal,
        window=(left, right),
        softcap=float(args.get("softcap", 0.0)),
        shifts_lse=(left < 0 or left >= longest) and (causal or right == 0 < longest),
    )


def one_form(call: Call, exact: bool = False) -> tuple[dict[str, Any], Tokens, dict[str, Tensor]]:
    """Return a call's arguments under common names, its tokens, and copies of its caches after the append. Packed
    tensors are split. The argument "capacity" is added: how many keys fit in the cache, or in k.
    """
    args = dict(call.args)
    for packed in PACKED.keys() & args.keys():
        args.update(zip(PACKED[packed], args.pop(packed).unbind(-3), strict=True))
    if "cu_seqlens" in args:
        args["cu_seqlens_q"] = args["cu_seqlens_k"] = args.pop("cu_seqlens")
        args["max_seqlen_q"] = args["max_seqlen_k"] = args.pop("max_seqlen")
    q, device, table = args["q"], call.q.device, args.get("block_table")
    k: Tensor = args["k_cache" if "k_cache" in args else "k"]
    page = k.shape[1] if k.dim() == 4 else k.shape[0]
    args["capacity"] = page if table is None else table.shape[1] * page
    if "cu_seqlens_q" in args:
        starts, firsts = args["cu_seqlens_q"].tolist(), args["cu_seqlens_k"].tolist()
        lengths = [stop - start for start, stop in pairwise(firsts)]
    else:
        starts = [b * q.shape[1] for b in range(len(q) + 1)]
        lengths = [args["capacity"]] * len(q)
        firsts = [row * page for row in _ints(args.get("cache_batch_idx"), len(q), range(len(q)))]
    batch = len(starts) - 1
    lengths = _ints(args.get("seqused_k", args.get("cache_seqlens")), batch, lengths)
    before = _ints(args.get("leftpad_k", args.get("cache_leftpad")), batch, [0] * batch)

    def keys(b: int, start: int, stop: int) -> Tensor:
        """Return the indices of keys start to stop of sequence b among all tokens."""
        at = torch.arange(start, stop, device=device)
        found: Tensor = at + firsts[b] if table is None else table[b].long()[at // page] * page + at % page
        return found

    caches: dict[str, Tensor] = {}
    if "k_cache" in args:
        new = args.get("k")
        caches = {name: args[name].clone(memory_format=torch.contiguous_format) for name in CACHES}
        if args.get("rotary_cos") is not None:
            assert new is not None, "rotary tables without new keys are refused"
            args["q"], new = _rotated(args, new, lengths, exact)
        if new is not None:
            for name, values in zip(CACHES, (new, args["v"])):
                for b in range(batch):
                    places = keys(b, lengths[b], lengths[b] + new.shape[1])
                    _put(caches[name], places, values[b], _descale(args, name[0], b, batch))
            lengths = [length + new.shape[1] for length in lengths]
        args["k"], args["v"] = caches.values()
    found = [keys(b, before[b], lengths[b]) for b in range(batch)]
    if args["k"].dtype in EIGHT_BITS.values():
        wide = torch.float64 if exact else q.dtype
        args["k"], args["v"] = (_dequantized(args, name, found, wide) for name in "kv")
    rows = [torch.arange(start, stop, device=device) for start, stop in pairwise(starts)]
    return args, Tokens(rows, found), caches


def _descale(args: Mapping[str, Any], name: str, b: int, batch: int) -> Tensor:
    """Return the descales (1, heads or 1, 1) fp64 of sequence b's 8-bit keys (name k) or values (v)."""
    given = torch.as_tensor(args.get(f"{name}_descale", 1.0), dtype=torch.float64, device=args["q"].device)
    rows = given.expand(batch, -1) if given.dim() == 2 else given.expand(batch, 1)
    return rows[b][None, :, None]


def _put(cache: Tensor, places: Tensor, values: Tensor, descale: Tensor) -> None:
    """Write values (tokens, heads, dim) to a cache; to an 8-bit cache values / descale, clamped and rounded."""
    if cache.dtype in EIGHT_BITS.values():
        largest = torch.finfo(cache.dtype).max
        quotient = (values.float() / descale.float()).clamp(-largest, largest)
        cache, values = cache.view(torch.uint8), quotient.to(cache.dtype).view(torch.uint8)
    cache.flatten(0, 1)[places] = values


def _dequantized(args: Mapping[str, Any], name: str, tokens: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the 8-bit keys or values in ``dtype``, each token times the descale of the sequence that reads it."""
    wide: Tensor = args[name].to(torch.float64, memory_format=torch.contiguous_format)
    result = wide.clone()
    for b, places in enumerate(tokens):
        result.flatten(0, -3)[places] = wide.flatten(0, -3)[places] * _descale(args, name, b, len(tokens))
    return result.to(dtype)


def _ints(x: Any, batch: int, default: Sequence[int]) -> list[int]:
    """Return an int for each sequence. x: a tensor of them, one int for all, or None for ``default``"""
    return [int(n) for n in (default if x is None else x.tolist() if isinstance(x, Tensor) else [x] * batch)]


def _rotated(args: Mapping[str, Any], new: Tensor, lengths: Sequence[int], exact: bool) -> tuple[Tensor, Tensor]:
    """Return q and the new keys, rotated by their positions, which follow those of the cached keys."""
    math = torch.float64 if exact else torch.float32
    starts = torch.tensor(lengths, device=new.device)[:, None]
    # Without a mask every query row has the same position: all rows see all keys.
    sides = [0 <= int(side) < args["capacity"] for side in args.get("window_size", (-1, -1))]
    moves = bool(args.get("causal", False)) or any(sides)
    q = _rotary(args["q"], starts + torch.arange(args["q"].shape[1], device=new.device) * moves, args, math)
    return q, _rotary(new, starts + torch.arange(new.shape[1], device=new.device), args, math)


def _rotary(x: Tensor, positions: Tensor, args: Mapping[str, Any], math: torch.dtype) -> Tensor:
    """Return x (B, S, H, d) with its first channels rotated by the angles of `positions` (B, S), in x's dtype."""
    cos, sin = (args[name].to(math)[positions][:, :, None] for name in ("rotary_cos", "rotary_sin"))
    half = cos.shape[-1]
    turned = x.to(math)
    head, rest = turned[..., : 2 * half], x[..., 2 * half :]
    if args.get("rotary_interleaved", True):
        a, b = head[..., 0::2], head[..., 1::2]
        head = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = head[..., :half], head[..., half:]
        head = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([head.to(x.dtype), rest], -1)
