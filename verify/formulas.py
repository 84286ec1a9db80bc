"""The outputs of a forward with known mistakes, in fp64. A kernel whose output equals one of them has that mistake."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import oracle
from .call import Call

TILES = 16, 32, 48, 64, 96, 128, 256  # usual sizes of key tiles, for a kernel that does not state its own
MOST_SCORES = 2**23  # larger problems are not tried, since each formula computes all scores
CLOSE = 1e-2  # relative tolerance within which a factor is recognised
SMALLEST, LARGEST, STEPS = 2.0**-10, 2.0**10, 80  # factors of the scores that are tried


class Forward:
    """Computes attention in fp64, (batch, nheads, row, channel). A caller can replace each part by a wrong one."""

    def __init__(self, call: Call, tile: int) -> None:
        args = call.args
        self.args, self.tile = args, tile
        self.group = args["q"].shape[2] // args["k"].shape[2]
        self.q, k, v = (x.double().transpose(1, 2) for x in call.qkv)
        self.k, self.v = (x.repeat_interleave(self.group, 1) for x in (k, v))
        (self.rows, self.keys), scale = (self.q.shape[2], k.shape[2]), args.get("softmax_scale")
        self.scale: float = self.q.shape[-1] ** -0.5 if scale is None else float(scale)
        self.softcap: float = float(args.get("softcap") or 0.0)
        self.causal = bool(args.get("causal"))
        left, right = (int(side) for side in args.get("window_size", (-1, -1)))
        self.window = left, right
        self.visible = oracle.keys_visible(self.rows, self.keys, self.causal, self.window, "cpu")
        self.row, self.key = torch.arange(self.rows)[:, None], torch.arange(self.keys)
        slopes = args.get("alibi_slopes")
        self.slopes: Tensor | None = None if slopes is None else slopes.double()[..., None, None]

    def scores(
        self, factor: float = 1.0, softcap: float | None = None, alibi: int = -1, k: Tensor | None = None
    ) -> Tensor:
        """Return the scores, without a mask. factor: of the products; alibi: the sign of the bias"""
        products = factor * self.scale * self.q @ (self.k if k is None else k).mT
        cap = self.softcap if softcap is None else softcap
        capped = cap * torch.tanh(products / cap) if cap else products
        return capped if self.slopes is None else capped + alibi * self.slopes * self._distance(self.keys - self.rows)

    def _distance(self, offset: int) -> Tensor:
        return (self.row + offset - self.key).abs().double()

    def out(self, scores: Tensor | None = None, visible: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """Return the output for given scores, mask (rows, keys) and v, or the right ones; 0 in rows that see no key."""
        return self.weights(scores, visible) @ (self.v if v is None else v)

    def weights(self, scores: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        visible = self.visible if visible is None else visible
        scores = (self.scores() if scores is None else scores).masked_fill(~visible, -math.inf)
        return torch.softmax(scores, -1).nan_to_num(nan=0.0)

    def seen(self, left: int, right: int, offset: int | None = None) -> Tensor:
        """Return the mask of a window. left, right: -1 or less for no bound; offset: the key at which row 0 stands"""
        place = self.key - self.row - (self.keys - self.rows if offset is None else offset)
        return ((place >= -left) | (left < 0)) & (place <= right)

    # ---- mistakes ----------------------------------------------------------------------------------------------------

    def mistakes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each known mistake with the output of a forward that makes it."""
        yield from self._of_masks()
        yield from self._of_options()
        yield from self._of_edges()
        yield from self._of_heads()
        highest = self.scores().masked_fill(~self.visible, -math.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        unsummed = torch.exp(self.scores() - highest).masked_fill(~self.visible, 0.0)
        yield "the output is not divided by the row sum l (FA2 algorithm 1, line 12)", unsummed @ self.v
        if self.k.shape == self.v.shape:
            yield "K and V are swapped", self.out(self.scores(k=self.v), v=self.k)
        yield from self._of_stale_tiles()

    def _of_masks(self) -> Iterator[tuple[str, Tensor]]:
        left, right = self.window
        if self.causal:
            yield "the causal mask is missing", self.out(visible=self.seen(left, self.keys))
            if self.rows != self.keys:
                aligned = (
                    "the causal mask is aligned to the top left: row i must see keys up to i + seqlen_k - seqlen_q"
                )
                yield aligned, self.out(visible=self.seen(left, 0, offset=0))
            yield "the causal mask shows each row one key too many", self.out(visible=self.seen(left, 1))
            hidden = self.visible & (self.key != self.row + self.keys - self.rows)
            yield "the causal mask hides the key on the diagonal", self.out(visible=hidden)
            everywhere = torch.softmax(self.scores(), -1).masked_fill(~self.visible, 0.0)
            yield "the causal mask comes after the row sum, which counts hidden keys", everywhere @ self.v
        elif left >= 0 or right >= 0:
            shown = self.keys if right < 0 else right
            yield "the window is missing", self.out(visible=torch.ones_like(self.visible))
            for name, change in (("one key too many", 1), ("one key too few", -1)):
                if left >= 0:
                    yield f"the window's left side shows {name}", self.out(visible=self.seen(left + change, shown))
                if right >= 0:
                    yield f"the window's right side shows {name}", self.out(visible=self.seen(left, right + change))
        if not self.visible.all():
            zeros = self.scores().masked_fill(~self.visible, 0.0)
            words = "hidden keys get the score 0 instead of -inf"
            yield words, self.out(zeros, torch.ones_like(self.visible))
            for size in self.sizes:  # the same in a kernel that skips hidden tiles
                reached = self.visible.new_zeros(-(-self.rows // size), -(-self.keys // size))
                rows, keys = self.visible.nonzero(as_tuple=True)
                reached[rows // size, keys // size] = True
                yield words, self.out(zeros, reached[self.row // size, self.key // size])

    def _of_options(self) -> Iterator[tuple[str, Tensor]]:
        if self.softcap:
            yield "the softcap is missing", self.out(self.scores(softcap=0.0))
            outside = self.softcap * torch.tanh(self.q @ self.k.mT / self.softcap) * self.scale
            yield "the softcap comes before the softmax scale", self.out(outside + self.scores() - self._unbiased())
        if self.slopes is not None:
            yield "the ALiBi bias is missing", self.out(self._unbiased())
            yield "the sign of the ALiBi bias is wrong", self.out(self.scores(alibi=1))
            if self.rows != self.keys:
                top_left = self._unbiased() - self.slopes * self._distance(0)
                yield "the ALiBi bias counts rows from the top left", self.out(top_left)

    def _unbiased(self) -> Tensor:
        return self.scores(alibi=0)

    @property
    def sizes(self) -> list[int]:
        return [*dict.fromkeys((self.tile, *TILES))]

    def _of_edges(self) -> Iterator[tuple[str, Tensor]]:
        for size in self.sizes:
            rest = self.keys % size
            if not rest:
                continue
            if size < self.keys:
                seen = self.visible & (self.key < self.keys - rest)
                yield (
                    f"the last {rest} keys, behind the last whole key tile of {size}, are left out",
                    self.out(visible=seen),
                )
            scores = self.scores().masked_fill(~self.visible, -math.inf)
            padded = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], size - rest)], -1)
            weights = torch.softmax(padded, -1)[..., : self.keys]
            yield (
                f"the last key tile of {size} counts {size - rest} keys beyond the end, with score 0",
                weights @ self.v,
            )

    def _of_heads(self) -> Iterator[tuple[str, Tensor]]:
        heads = self.q.shape[1]
        heads_k = heads // self.group
        if self.group > 1 and heads_k > 1:
            other = torch.arange(heads) % heads_k * self.group
            yield (
                "query head h reads key head h % nheads_k instead of h // (nheads // nheads_k)",
                self.out(self.scores(k=self.k[:, other]), v=self.v[:, other]),
            )
            of_one = "query head h reads {} of key head h % nheads_k, not h // (nheads // nheads_k); its {} is right"
            yield of_one.format("V", "K"), self.out(v=self.v[:, other])
            yield of_one.format("K", "V"), self.out(self.scores(k=self.k[:, other]))
        if self.group == 1 and self.slopes is None and self.q.shape[:3] != self.q.transpose(1, 2).shape[:3]:
            turned = {name: self.args[name].transpose(1, 2) for name in "qkv"}
            if self.rows == self.keys:
                out = oracle.answer("flash_attn_func", {**self.args, **turned}).out
                yield (
                    "it reads (batch, heads, seqlen, head_dim): flash-attn's order is (batch, seqlen, heads, head_dim)",
                    out,
                )

    def _of_stale_tiles(self) -> Iterator[tuple[str, Tensor]]:
        for size in self.sizes:
            if size >= self.keys:
                continue
            before = torch.where(self.key < size, self.key, self.key - size)
            words = "of the key tile before: a buffer read before it is filled, or an index off by one tile"
            told = f" (key tiles of {size})" if size != self.tile else ""
            yield f"each key tile gets the V {words}{told}", self.out(v=self.v[:, :, before])
            yield f"each key tile gets the K {words}{told}", self.out(self.scores(k=self.k[:, :, before]))

    # ---- a wrong factor ----------------------------------------------------------------------------------------------

    def name_factor(self, factor: float) -> str:
        """Return the mistake that multiplies all q @ k by this factor, in words."""
        head_dim, scale = self.q.shape[-1], self.scale
        known = {
            1 / scale: "the softmax scale is missing",
            scale: "the softmax scale is applied twice, or is 1 / head_dim",
            1 / math.log(2): "log2(e) is in the scores, but exp takes them, not exp2",
            math.log(2): "exp2 takes the scores, which lack log2(e)",
            head_dim**-0.5 / scale: "softmax_scale is ignored",
        }
        known |= {
            (head_dim / padded) ** 0.5: f"the softmax scale is of a head_dim padded to {padded}"
            for padded in sorted({-(-head_dim // size) * size for size in (8, 16, 32, 64, 128)})
            if padded != head_dim
        }
        near = next((words for value, words in known.items() if abs(factor / value - 1) < CLOSE and value != 1), "")
        return f"the scores are {factor:.3g} times the right ones" + (f": {near}" if near else "")


def factor_of(call: Call, got: Tensor) -> float:
    """Return the factor of Q K^T that makes an output nearest to ``got``, judged by the last rows of the first head."""
    few = {"q": call.args["q"][:1, -32:, :1], **{name: call.args[name][:1, :, :1] for name in "kv"}}
    slopes = call.args.get("alibi_slopes")
    small = Forward(replace(call, args={**call.args, **few, "alibi_slopes": None if slopes is None else slopes[:1]}), 1)
    wanted = got[:1, :1, -32:]

    def distance(exponent: float) -> float:
        return (small.out(small.scores(math.exp(exponent))) - wanted).square().sum().item()

    low, width = math.log(SMALLEST), (math.log(LARGEST) - math.log(SMALLEST)) / STEPS
    middle = min((low + step * width for step in range(STEPS + 1)), key=distance)
    for _ in range(STEPS // 2):
        width *= 0.7
        middle = min((middle - width, middle, middle + width), key=distance)
    return math.exp(middle)


def name_mistake(call: Call, tile: int, got: Tensor, bound: float) -> str:
    """Return the name of the known mistake that gives the output ``got``, or "" if none does.

    call: on the CPU, of flash_attn_func; tile: keys of a tile; got: (batch, seqlen, heads, channel) as the kernel gave
    it; bound: allowed error
    """
    if got.shape[1] * call.args["k"].shape[1] * got.shape[0] * got.shape[2] > MOST_SCORES or not got.isfinite().all():
        return ""
    forward, got = Forward(call, tile), got.double().transpose(1, 2)
    right = forward.out()

    def is_like(gives: Tensor) -> bool:
        """Whether the output equals ``gives``, a mistake's output, which is far from the right one."""
        apart, wrong = (got - gives).abs().max().item(), (right - gives).abs().max().item()
        return apart <= 2 * bound and apart <= 0.05 * wrong

    for words, gives in forward.mistakes():
        if is_like(gives):
            return words
    size = ((got * right).sum() / (right * right).sum()).item()
    if abs(size) > CLOSE and is_like(size * right):
        return f"all of the output is {size:.4g} times the right one"
    if forward.scale and is_like(forward.out(forward.scores(factor := factor_of(call, got)))):
        return forward.name_factor(factor)
    return moved_heads(got, right, bound) or moved_values(forward, got, bound)


def moved_heads(got: Tensor, right: Tensor, bound: float) -> str:
    """Name the heads that hold the right output of other heads, or "". got, right: (batch, heads, row, channel)"""
    if got.shape != right.shape:
        return ""
    flat_got, flat_right = got.flatten(0, 1), right.flatten(0, 1)
    heads = got.shape[1]
    pairs: Mapping[int, int] = {}
    for index, mine in enumerate(flat_got):
        apart = (flat_right - mine).abs().flatten(1).amax(1)
        if apart.min() > 2 * bound:
            return ""
        pairs = {**pairs, index: int(apart.argmin())}
    moved = {index: other for index, other in pairs.items() if index != other}
    told = [
        f"head {i % heads} of batch element {i // heads} those of head {j % heads} of batch element {j // heads}"
        for i, j in moved.items()
    ]
    more = f", and {len(told) - 3} more" if len(told) > 3 else ""
    return f"heads hold the right values of others: {', '.join(told[:3])}{more}" if told else ""


def moved_values(forward: Forward, got: Tensor, bound: float) -> str:
    """Name the heads whose right weights were multiplied with the V of another head of the batch element, or ""."""
    weights, moved = forward.weights(), {}
    for b, h in itertools.product(range(got.shape[0]), range(got.shape[1])):
        apart = (weights[b, h] @ forward.v[b] - got[b, h]).abs().flatten(1).amax(1)
        if apart.min() > 2 * bound:
            return ""
        if apart[h] > 2 * bound:
            moved[h] = int(apart.argmin()) // forward.group
    told = [f"head {h} that of key head {other}" for h, other in moved.items()]
    more = f", and {len(told) - 3} more" if len(told) > 3 else ""
    return f"the weights are right, but heads read the V of others: {', '.join(told[:3])}{more}" if told else ""


def unseeing_rows(args: Mapping[str, Any]) -> Tensor:
    """Return the rows of a call of flash_attn_func that see no key, (seqlen_q,) bool."""
    window = tuple(int(side) for side in args.get("window_size", (-1, -1)))
    rows, keys = args["q"].shape[1], args["k"].shape[1]
    return ~oracle.keys_visible(rows, keys, bool(args.get("causal")), (window[0], window[1]), "cpu").any(-1)
