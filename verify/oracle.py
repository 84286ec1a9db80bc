"""The right answer to every public call, in fp64, and the same call done plainly in its own dtype.

Written from the documented behaviour alone: one dense boolean mask and one materialised score matrix per
sequence, gradients by autograd. Nothing of flash_attn_compat is imported here, so agreement means something.
`answer(...)` is the truth, `plain(...)` the yardstick that says how much rounding the dtype itself costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verify.call import CACHES, PACKED, Answer, Call


@dataclass(frozen=True)
class Mask:
    """What shapes the scores of a call, the same for each of its sequences."""

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float
    shifts_lse: bool  # pure causal: flash-attn adds slope * j, so its LSE is the true one plus slope * pos(i)


@dataclass(frozen=True)
class Sequence:
    """One sequence of a call: q (sq, H, d), k (sk, Hk, d), v (sk, Hk, dv), with what belongs to it alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor | None
    keep: Tensor | None  # (H, sq, sk) bool
    dout: Tensor | None  # (sq, H, dv)


@dataclass(frozen=True)
class Truth(Answer):
    """The fp64 answer, and how large the numbers behind it are.

    magnitudes: for out, the scores, q, k and v by (sequence, head), key heads for k and v: the largest sum of absolute
        terms behind an element of that head. Rounding is proportional to it. For dP, by (sequence, head), more than it
        can be before dropout.
    spacings: the same for a change by 1 of every probability, or of every score's gradient: what is lost where those
        underflow
    tainted: (sequences, key heads) bool, something that went in is not finite
    """

    magnitudes: Mapping[str, Tensor] = field(default_factory=dict)
    spacings: Mapping[str, Tensor] = field(default_factory=dict)
    tainted: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))

    def magnitude(self, name: str) -> float:
        """The largest of all heads."""
        return float(self.magnitudes[name].max())


def answer(fn: str, args: Mapping[str, Any], dout: Tensor | None = None, keep: Tensor | None = None) -> Truth:
    """The fp64 answer. `keep` is the dropout keep mask, (B, H, >= sq, >= sk) bool, where dropout_p > 0."""
    return _answer(fn, args, dout, keep, torch.float64, _exact)


def plain(fn: str, args: Mapping[str, Any], dout: Tensor | None = None, keep: Tensor | None = None) -> Truth:
    """The same computation with every intermediate result rounded to the input's dtype; out, grads and caches only."""
    return _answer(fn, args, dout, keep, None, _plainly)


def visible(call: Call) -> list[Tensor]:
    """Which keys each query row sees: one bool tensor (seqlen_q, seqlen_k) per sequence."""
    args, _ = _one_form(call.fn, call.args, exact=True)
    mask = _mask(args)
    lengths = [(rows[-1].stop - rows[-1].start, len(_keys_of(args["k"], keys))) for rows, keys in _slices(args)]
    return [keys_visible(sq, sk, mask.causal, mask.window, call.q.device) for sq, sk in lengths]


def keys_visible(sq: int, sk: int, causal: bool, window: tuple[int, int], device: torch.device | str) -> Tensor:
    """(sq, sk) bool, bottom-right aligned: pos(i) - left <= j <= pos(i) + right, a negative side unbounded."""
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
    """One sequence's out (sq, H, dv) and, from the exact computation, its LSE (H, sq) and what Truth says of heads."""

    out: Tensor
    lse: Tensor = torch.zeros(0)
    magnitudes: Mapping[str, Tensor] = {}
    spacings: Mapping[str, Tensor] = {}
    tainted: Tensor = torch.zeros(0)


Attend = Callable[[Sequence, Mask, float], Attended]


def _exact(s: Sequence, mask: Mask, dropout_p: float) -> Attended:
    sq, sk = s.q.shape[0], s.k.shape[0]
    group = s.q.shape[1] // s.k.shape[1]
    q, k, v = _heads_first(s, group)
    visible = keys_visible(sq, sk, mask.causal, mask.window, q.device)
    if sk == 0:  # one invisible key stands for none, so that every reduction below has something to reduce
        k, v = k.new_zeros(k.shape[0], 1, k.shape[2]), v.new_zeros(v.shape[0], 1, v.shape[2])
        visible = visible.new_zeros(sq, 1)
    scores = mask.scale * (q @ k.mT)
    slope_terms: Tensor | float = 1.0  # of 1 - tanh^2
    if mask.softcap > 0:
        capped = torch.tanh(scores / mask.softcap)
        slope_terms = 1 + capped.detach() ** 2
        scores = mask.softcap * capped
    pos = torch.arange(sq, device=q.device) + sk - sq
    bias = None
    if s.slopes is not None:
        distance = (pos[:, None] - torch.arange(k.shape[1], device=q.device)[None, :]).abs()
        bias = s.slopes.double()[:, None, None] * distance
        scores = scores - bias
    scores = scores.masked_fill(~visible, -torch.inf)
    dead = ~visible.any(-1)
    top = scores.detach().amax(-1, keepdim=True).masked_fill(dead[:, None], 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True).masked_fill(dead[:, None], 1.0)
    probs = weights / total
    dropped = probs
    if s.keep is not None:
        keep = s.keep if sk else s.keep.new_zeros(s.keep.shape[0], sq, 1)
        dropped = probs * keep / (1 - dropout_p)
    out = (dropped @ v).transpose(0, 1)
    lse = (top + total.log()).squeeze(-1)
    if s.slopes is not None and mask.shifts_lse:
        lse = lse + s.slopes.double()[:, None] * pos
    lse = lse.detach().masked_fill(dead, torch.inf)
    with torch.no_grad():
        terms = _Terms(q.abs(), k.abs(), v.abs(), probs, dropped, visible, bias, slope_terms, abs(mask.scale), group)
        sums, spacings = _sizes(terms, None if s.dout is None else s.dout.transpose(0, 1).abs())
        # Of anything not finite the sum is not finite either: fp64 is far from overflowing here.
        per_head = q.sum((1, 2)) + k.sum((1, 2)) + v.sum((1, 2))
        if s.dout is not None:
            per_head = per_head + s.dout.sum((0, 2))
        tainted = ~per_head.view(-1, group).sum(1).isfinite()
    return Attended(out, lse, sums, spacings, tainted)


def _heads_first(s: Sequence, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as (H, seqlen, dim), a key head repeated for each of its query heads."""
    k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (s.k, s.v))
    return s.q.transpose(0, 1), k, v


class _Terms(NamedTuple):
    """What a sequence's results are sums of, in absolute values."""

    q: Tensor  # (H, sq, d)
    k: Tensor  # (H, sk, d)
    v: Tensor  # (H, sk, dv)
    probs: Tensor  # (H, sq, sk)
    dropped: Tensor
    visible: Tensor
    bias: Tensor | None
    slope_terms: Tensor | float
    scale: float
    group: int


def _sizes(t: _Terms, dout: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Answer.magnitudes and Answer.spacings of one sequence: each result's formula with absolute values in it."""
    scores = t.scale * (t.q @ t.k.mT)
    if t.bias is not None:
        scores = scores + t.bias.abs()
    sums = {"out": _amax(t.dropped @ t.v), "score": _amax(scores * t.visible)}
    seen = t.visible.any(0)[:, None]
    spacings = {"out": _amax((t.v * seen).sum(1))}
    if dout is None:
        return sums, spacings

    def of_key_head(x: Tensor) -> Tensor:
        return x.view(len(x) // t.group, t.group, *x.shape[1:]).sum(1)

    sums["dP"] = t.v.shape[-1] * _amax(t.v) * _amax(dout)
    ratio = torch.where(t.probs > 0, t.dropped / t.probs, 0.0)
    dprobs = (dout @ t.v.mT) * ratio
    dscores = t.scale * t.probs * (dprobs + (t.probs * dprobs).sum(-1, keepdim=True)) * t.slope_terms
    sums["q"] = _amax(dscores @ t.k)
    sums["k"] = _amax(of_key_head(dscores.mT @ t.q))
    sums["v"] = _amax(of_key_head(t.dropped.mT @ dout))
    # The backward reads the out that was given out, so what underflowed in it is missing from every score's gradient.
    of_out = t.probs * dout.sum(-1, keepdim=True) * t.slope_terms
    # PyTorch's memory-efficient kernel keeps scores' gradients multiplied by the scale already.
    step = max(t.scale, 1.0)
    spacings["q"] = step * _amax((t.k * seen).sum(1, keepdim=True) + of_out @ t.k)
    spacings["k"] = step * _amax(of_key_head(t.q.sum(1, keepdim=True) + of_out.mT @ t.q))
    spacings["v"] = _amax(of_key_head(dout.sum(1)))
    return sums, spacings


def _plainly(s: Sequence, mask: Mask, dropout_p: float) -> Attended:
    sq, sk, dtype = s.q.shape[0], s.k.shape[0], s.q.dtype
    q, k, v = _heads_first(s, s.q.shape[1] // s.k.shape[1])
    visible = keys_visible(sq, sk, mask.causal, mask.window, q.device)
    scores = _rounded_matmul(q, (k * mask.scale).mT)
    if mask.softcap > 0:
        scores = torch.tanh(scores / mask.softcap) * mask.softcap
    if s.slopes is not None:  # the bias stays in fp32, the dtype of the slopes, as in flash-attn's own tests
        wide = torch.promote_types(dtype, torch.float32)
        pos = torch.arange(sq, device=q.device) + sk - sq
        distance = (pos[:, None] - torch.arange(sk, device=q.device)[None, :]).abs()
        scores = scores.to(wide) - s.slopes.to(wide)[:, None, None] * distance
    dead = ~visible.any(-1)[:, None]
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(dead, 0.0)
    probs = torch.softmax(scores, -1).to(dtype).masked_fill(dead, 0.0)
    if s.keep is not None:
        probs, v = probs * s.keep, v * (1 / (1 - dropout_p))
    return Attended(_rounded_matmul(probs, v).transpose(0, 1))


def _rounded_matmul(a: Tensor, b: Tensor) -> Tensor:
    """A matmul that accumulates in fp32 and rounds once, which is what half precision means on a GPU."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


def _amax(x: Tensor) -> Tensor:
    """The largest number of each head, 0 where it has none."""
    x = x.flatten(1)
    return x.amax(1) if x.shape[1] else x.new_zeros(x.shape[0])


# ---------------------------------------------------------------- whole calls


def _one_form(fn: str, args: Mapping[str, Any], exact: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Every function's arguments under the same names, packed ones taken apart, and the caches after an append."""
    args = dict(args)
    for packed in PACKED.keys() & args.keys():
        args.update(zip(PACKED[packed], args.pop(packed).unbind(-3), strict=True))
    if "cu_seqlens" in args:
        args["cu_seqlens_q"] = args["cu_seqlens_k"] = args.pop("cu_seqlens")
        args["max_seqlen_q"] = args["max_seqlen_k"] = args.pop("max_seqlen")
    return _append(args, exact) if fn == "flash_attn_with_kvcache" else (args, {})


def _answer(
    fn: str,
    args: Mapping[str, Any],
    dout: Tensor | None,
    keep: Tensor | None,
    dtype: torch.dtype | None,
    attend: Attend,
) -> Truth:
    args, caches = _one_form(fn, args, exact=attend is _exact)
    # The names that a gradient exists for; the caches stand under k and v here and get none.
    wide = dtype or args["q"].dtype
    leaves = {n: args[n].detach().to(wide).requires_grad_(dout is not None) for n in ("q", "k", "v")}
    dropout_p = max(float(args.get("dropout_p", 0.0)), 0.0)
    mask = _mask(args)
    attended = [
        attend(sequence, mask, dropout_p)
        for sequence in _sequences(args, leaves, dout, keep if dropout_p > 0 else None, wide)
    ]
    out = _assemble(args, [a.out for a in attended], leaves["q"])
    grads: dict[str, Tensor] = {}
    if dout is not None:
        found = torch.autograd.grad(out, list(leaves.values()), dout.to(wide), materialize_grads=True)
        grads = dict(zip(leaves, found, strict=True))
    result = Truth(out=out.detach(), grads=grads, caches=caches)
    if attend is not _exact:
        return result
    return replace(
        result,
        softmax_lse=_assemble_lse(args, [a.lse for a in attended]),
        magnitudes={n: torch.stack([a.magnitudes[n] for a in attended]) for n in attended[0].magnitudes},
        spacings={n: torch.stack([a.spacings[n] for a in attended]) for n in attended[0].spacings},
        tainted=torch.stack([a.tainted for a in attended]),
    )


def _mask(args: Mapping[str, Any]) -> Mask:
    left, right = (int(x) for x in args.get("window_size", (-1, -1)))
    if "window_size_left" in args:  # the private functions
        left, right = int(args["window_size_left"]), int(args["window_size_right"])
    causal = bool(args.get("causal", False))
    scale = args.get("softmax_scale")
    normal_left, normal_right = _normalised_window(args, causal, (left, right))
    return Mask(
        scale=args["q"].shape[-1] ** -0.5 if scale is None else float(scale),
        causal=causal,
        window=(left, right),
        softcap=float(args.get("softcap", 0.0)),
        shifts_lse=normal_left < 0 and normal_right == 0,
    )


def _normalised_window(args: Mapping[str, Any], causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    """A side at least as long as the keys (the longest sequence, or the cache) counts as unbounded."""
    left, right = (-1 if side >= _key_capacity(args) else side for side in window)
    return left, 0 if causal else right


def _key_capacity(args: Mapping[str, Any]) -> int:
    if "max_seqlen_k" in args:
        return int(args["max_seqlen_k"])
    if "cache_capacity" in args:
        return int(args["cache_capacity"])
    return int(args["k"].shape[1])


def _sequences(
    args: Mapping[str, Any], leaves: Mapping[str, Tensor], dout: Tensor | None, keep: Tensor | None, wide: torch.dtype
) -> Iterator[Sequence]:
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    slopes = args.get("alibi_slopes")
    for b, (rows, keys) in enumerate(_slices(args)):
        sq = rows[-1].stop - rows[-1].start
        k_b, v_b = _keys_of(k, keys), _keys_of(v, keys)
        yield Sequence(
            q=q[rows],
            k=k_b,
            v=v_b,
            slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b],
            keep=None if keep is None else keep[b, :, :sq, : k_b.shape[0]],
            dout=None if dout is None else dout[rows].to(wide),
        )


def _slices(args: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """Per sequence the index of its query rows and the index of its keys."""
    if "cu_seqlens_q" in args:
        cu_q, cu_k = args["cu_seqlens_q"].tolist(), args["cu_seqlens_k"].tolist()
        batch = len(cu_q) - 1
        leftpad, used = _ints(args.get("leftpad_k"), [0] * batch), _ints(args.get("seqused_k"), None)
        slices = []
        for b in range(batch):
            length = cu_k[b + 1] - cu_k[b] if used is None else used[b]
            keys: Any = slice(cu_k[b] + leftpad[b], cu_k[b] + length)
            if args.get("block_table") is not None:
                keys = (args["block_table"][b], 0, length)
            slices.append(((slice(cu_q[b], cu_q[b + 1]),), keys))
        return slices
    rows = slice(0, args["q"].shape[1])
    if "key_ranges" in args:  # a cache
        return [((b, rows), keys) for b, keys in enumerate(args["key_ranges"])]
    return [((b, rows), (b, slice(0, args["k"].shape[1]))) for b in range(args["q"].shape[0])]


def _keys_of(x: Tensor, keys: Any) -> Tensor:
    if not isinstance(keys, tuple) or len(keys) == 2:
        return x[keys]
    table, start, stop = keys
    pages = table[: -(-stop // x.shape[1])].long()
    return x[pages].flatten(0, 1)[start:stop]


def _ints(x: Tensor | None, default: Any) -> Any:
    return default if x is None else x.tolist()


def _assemble(args: Mapping[str, Any], outs: list[Tensor], q: Tensor) -> Tensor:
    if "cu_seqlens_q" not in args:
        return torch.stack(outs)
    before, after = _outside(args)
    blank = outs[0].new_zeros
    return torch.cat([blank(before, *outs[0].shape[1:]), *outs, blank(after, *outs[0].shape[1:])])


def _assemble_lse(args: Mapping[str, Any], lses: list[Tensor]) -> Tensor:
    """(B, H, sq), or (H, total_q) with NaN for tokens outside every sequence, whose LSE nothing defines."""
    if "cu_seqlens_q" not in args:
        return torch.stack(lses)
    before, after = _outside(args)
    heads = lses[0].shape[0]
    return torch.cat(
        [lses[0].new_full((heads, before), torch.nan), *lses, lses[0].new_full((heads, after), torch.nan)], 1
    )


def _outside(args: Mapping[str, Any]) -> tuple[int, int]:
    cu = args["cu_seqlens_q"].tolist()
    return cu[0], args["q"].shape[0] - cu[-1]


# ---------------------------------------------------------------- the cache


def _append(args: dict[str, Any], exact: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Rotates, appends to copies of the caches, and turns the call into one over ranges of cache rows."""
    q, k_cache, v_cache = args["q"], args["k_cache"].clone(), args["v_cache"].clone()
    k, table = args.get("k"), args.get("block_table")
    batch, sq = q.shape[:2]
    page = k_cache.shape[1]
    capacity = page if table is None else table.shape[1] * page
    lengths = args.get("cache_seqlens")
    lengths = capacity if lengths is None else lengths
    lengths = lengths.tolist() if isinstance(lengths, Tensor) else [int(lengths)] * batch
    rows = _ints(args.get("cache_batch_idx"), list(range(batch)))
    leftpad = _ints(args.get("cache_leftpad"), [0] * batch)
    args = {**args, "cache_capacity": capacity}
    causal = bool(args.get("causal", False))
    if args.get("rotary_cos") is not None:
        left, right = (int(x) for x in args.get("window_size", (-1, -1)))
        # Without any mask every query row stands at the same position: all of them see all the keys alike.
        moves = max(_normalised_window(args, causal, (left, right))) >= 0
        math = torch.float64 if exact else torch.float32
        starts = torch.tensor(lengths, device=q.device)[:, None]
        q = _rotary(q, starts + torch.arange(sq, device=q.device) * moves, args, math)
        assert k is not None, "rotary tables without new keys are refused"
        k = _rotary(k, starts + torch.arange(k.shape[1], device=q.device), args, math)
    new = 0 if k is None else k.shape[1]
    for b in range(batch):
        for t in range(new):
            at = lengths[b] + t
            where = (rows[b], at) if table is None else (int(table[b, at // page]), at % page)
            k_cache[where], v_cache[where] = k[b, t], args["v"][b, t]  # type: ignore[index]  # new > 0 says so
    if table is None:
        ranges: list[Any] = [(rows[b], slice(leftpad[b], lengths[b] + new)) for b in range(batch)]
    else:
        ranges = [(table[b], leftpad[b], lengths[b] + new) for b in range(batch)]
    args.update(q=q, k=k_cache, v=v_cache, key_ranges=ranges, block_table=None)
    return args, dict(zip(CACHES, (k_cache, v_cache)))


def _rotary(x: Tensor, positions: Tensor, args: Mapping[str, Any], math: torch.dtype) -> Tensor:
    """x (B, S, H, d) with its first channels turned by the angle of `positions` (B, S), back in x's dtype."""
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
