"""What kind of mistake a kernel makes: it is asked from outside, and rules say what its answers look like.

Attention is linear in v, so v = 1 on the keys of one tile and 0 elsewhere makes the output that tile's softmax weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import carried, oracle
from .call import SHORT, Answer, Call, accepted, parts_of, same
from .errors import UsageError
from .judge import Check, Right, against_fp64, right_answer, rounded_to
from .steps import blocks
from .timing import synchronize

# A key tile of a row matters to these rules if it should get at least this share of the row's weight.
MATTERS = 0.01
# What is wrong with the softmax weights that the rows give the key tiles.
RIGHT = "each key tile gets its right share of the softmax weight"
NORMALISED = "key tiles get wrong shares of the weight, which still sums to 1"
ROW_SUM = "all key tiles of a row are off by the same factor, so only the row sum is wrong"
UNEVEN = "key tiles get wrong shares of the weight, and it does not sum to 1"
NOTHING = "the rows get nothing from any key tile"
NOT_FINITE = "the softmax weights are NaN or infinite"

# What is carried from key tile to key tile wrongly, by what the weights are then.
CARRIED = {
    NORMALISED: "the running maximum m of the key tiles before is not what it was: stored at, or read from, the wrong "
    "index",
    ROW_SUM: carried.ROW_SUM,
    UNEVEN: carried.OUTPUT,
}


# Arguments beside q, k and v, for a kernel that takes them or where they change something.
OPTIONS = "causal", "softmax_scale", "window_size", "softcap", "alibi_slopes"


@dataclass(frozen=True)
class Setting:
    """A call of flash_attn_func on the CPU, the device to make it on, and the rows and keys of a kernel's tiles."""

    call: Call
    block_rows: int
    block_columns: int
    device: str

    def of(self, call: Call) -> Setting:
        """With another call."""
        return replace(self, call=call)

    def but(self, **args: Any) -> Setting:
        """With other arguments."""
        return self.of(replace(self.call, args={**self.call.args, **args}))

    @functools.cached_property
    def right(self) -> Right:
        return right_answer(self.call)

    @property
    def key_tiles(self) -> list[slice]:
        return blocks(self.call.args["k"].shape[1], self.block_columns)

    @property
    def query_tiles(self) -> list[slice]:
        return blocks(self.call.q.shape[1], self.block_rows)

    @functools.cached_property
    def shares(self) -> Tensor:
        """(batch, nheads, row, key tiles, head_dim + 1) in fp64: what each key tile adds to each row of the output, and
        behind it the tile's softmax weight. Each tile has channels of its own in v.
        """
        v = self.call.args["v"]
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        tile = torch.arange(values.shape[1]) // self.block_columns
        of_tile = torch.nn.functional.one_hot(tile)[:, None, :, None] * values[..., None, :]
        out = oracle.answer(self.call.fn, {**self.call.args, "v": of_tile.flatten(-2)}).out
        return torch.unflatten(out.transpose(1, 2), -1, of_tile.shape[-2:])

    @functools.cached_property
    def probabilities(self) -> Tensor:
        """(batch, nheads, row, key) in fp64: with one channel for each key in v the output is the softmax weights."""
        keys = self.call.args["k"].shape[1]
        v = torch.eye(keys, dtype=torch.float64)[None, :, None].expand(*self.call.args["k"].shape[:-1], keys)
        return oracle.answer(self.call.fn, {**self.call.args, "v": v}).out.transpose(1, 2)

    def judged(self, out: Tensor) -> Check:
        """An output held against fp64."""
        return against_fp64(self.right, Answer(out))[0]


@dataclass(frozen=True)
class Kernel:
    """A function by its import path, called as function(q, k, v, causal=...) on (batch, seqlen, heads, head_dim)."""

    name: str
    function: Callable[..., Any]

    def ask(self, setting: Setting) -> tuple[Tensor, list[str]]:
        """The output on the CPU, and the inputs that were written to; UsageError if it raises or answers no output."""
        given, call = setting.call, setting.call.to(setting.device)
        with torch.no_grad():
            out = self.called(call, dict(zip("qkv", call.qkv)))
        return out.cpu(), [name for name in "qkv" if not same(given.args[name], call.args[name].cpu())]

    def called(self, call: Call, qkv: Mapping[str, Tensor]) -> Tensor:
        """Its output for q, k and v with the options of a call; UsageError if it raises or answers no output."""
        try:
            out, *_ = parts_of(self.function(*qkv.values(), **self.options(call)))
            synchronize(call.q.device.type)
        except Exception as error:  # whatever someone's kernel raises
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in qkv.items())
            first_line = (str(error).splitlines() or [""])[0]
            raise UsageError(f"{self.name} raised {type(error).__name__} for {shapes}: {first_line}") from error
        found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        expected = f"shape {(*qkv['q'].shape[:-1], qkv['v'].shape[-1])}"
        if found != expected or not isinstance(out, Tensor):
            raise UsageError(f"{self.name} returned {found}, expected {expected}: batch, seqlen, heads, head_dim")
        return out

    def options(self, call: Call) -> dict[str, Any]:
        """Of a call, as far as this function takes them or must."""
        return accepted(self.function, {name: call.args[name] for name in OPTIONS if name in call.args})

    def is_right(self, setting: Setting) -> bool:
        return setting.judged(self.ask(setting)[0]).ok

    def answered(self, setting: Setting) -> Found:
        """Its answer, asked for twice."""
        out, changed = self.ask(setting)
        once, again = (x.nan_to_num(nan=0.0) for x in (out, self.ask(setting)[0]))
        return Found(self, out, setting.judged(out), changed, gap(once, again).max().item())


@dataclass(frozen=True)
class Found:
    """A kernel's answer held against fp64. repeats: how far a second call was from the first."""

    kernel: Kernel
    out: Tensor
    check: Check
    changed_inputs: Sequence[str]
    repeats: float

    @property
    def remarks(self) -> list[str]:
        """What is worth knowing of a right answer too."""
        lines = [f"it changed its input {name}" for name in self.changed_inputs]
        return lines + [f"a second call gave another answer, {self.repeats:.1e} off the first"] * (self.repeats > 0)


def gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| as (batch, nheads, row, channel) in fp64; 0 for equal infinities, inf where one of them is no number."""
    a, b = (x.double().transpose(1, 2) for x in (a, b))
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


# ---- what is found out about a kernel that is wrong -----------------------------------------------------------------


class Diagnosis:
    """wrong: (batch, nheads, row, channel) against fp64.

    growth: for problems of 1, 2, ... key tiles, whether it is wrong; empty if it does not take smaller problems
    weights: the softmax weight each row gives each key tile, (batch, nheads, row, key tiles), measured through v
    """

    def __init__(self, found: Found, setting: Setting) -> None:
        self.found, self.setting = found, setting
        self.wrong = gap(found.out, setting.right.exact.out) > found.check.widest_bound
        self.growth = self._grown()
        self.weights = torch.stack([*self._weights()], -1).transpose(1, 2)
        causal = setting.call.args["causal"]
        self.right_unmasked = found.kernel.is_right(setting.but(causal=False)) if causal else None
        # Where the rules look.
        rows, eps = self.wrong.any(-1), torch.finfo(found.out.dtype).eps
        self.measured, self.right = self.weights[rows], setting.shares[rows][..., -1]
        self.slack = max(1e-3, 4 * eps)  # how far off a weight may be
        # Whether out is what the measured weights make of the right output of each key tile alone.
        of_one = torch.where(self.right > 0, self.measured / self.right, 0.0)
        mixed = (of_one[..., None] * setting.shares[rows][..., :-1]).sum(-2)
        apart = (mixed - found.out.double().transpose(1, 2)[rows]).abs()
        self.inside = bool((apart <= max(1e-3, 16 * eps) * max(1.0, mixed.abs().max().item())).all())
        self.weighed = self._weighed()

    def _grown(self) -> list[bool]:
        """The same problem with its first key tiles; a square one stays so, since many kernels need that."""
        q, k, v = self.setting.call.qkv
        wrong = []
        with suppress(UsageError):
            for tile in self.setting.key_tiles:
                rows = slice(tile.stop if q.shape[1] == k.shape[1] else None)
                smaller = self.setting.but(q=q[:, rows], k=k[:, : tile.stop], v=v[:, : tile.stop])
                wrong.append(not self.found.kernel.is_right(smaller))
        return wrong if len(wrong) == len(self.setting.key_tiles) else []

    def _weights(self) -> Iterator[Tensor]:
        for columns in self.setting.key_tiles:
            v = torch.zeros_like(self.setting.call.args["v"])
            v[:, columns] = 1
            # Every channel says the same, unless it is the channels that are mixed up.
            yield self.found.kernel.ask(self.setting.but(v=v))[0].double().median(dim=-1).values

    def _weighed(self) -> str:
        measured, right, slack = self.measured, self.right, self.slack
        if not measured.isfinite().all():
            return NOT_FINITE
        off = (measured - right).abs() > slack
        if not off.any():
            return RIGHT
        # Rows with one key tile, or already right, say nothing.
        telling = ((right > MATTERS).sum(-1) > 1) & off.any(-1)
        if telling.any():
            measured, right = measured[telling], right[telling]
        # A running maximum lost before a tile that is all masked leaves a row with nothing: no matter of the row sum.
        empty = measured.sum(-1).abs() <= slack
        if empty.all():
            return NOTHING
        measured, right = measured[~empty], right[~empty]
        if _mostly((measured.sum(-1) - 1).abs() <= measured.shape[-1] * slack):
            return NORMALISED
        factors = torch.where(right > MATTERS, measured / right, torch.nan)
        low, high = factors.nan_to_num(nan=torch.inf).amin(-1), factors.nan_to_num(nan=-torch.inf).amax(-1)
        return ROW_SUM if telling.any() and _mostly(high - low <= 0.05 * high.abs() + slack) else UNEVEN

    @functools.cached_property
    def rounded(self) -> torch.dtype | None:
        """The dtype to which it rounds something, and does nothing else wrong."""
        out, call = self.found.out, self.setting.call
        near = rounded_to(call, Answer(out), lambda other: Answer(self.found.kernel.ask(self.setting.of(other))[0]))
        return next((dtype for dtype in reversed(near) if holds_all(dtype, out)), next(iter(near), None))

    @property
    def mistake(self) -> str:
        """What it looks like, by the first rule that holds."""
        if self.found.repeats > self.found.check.widest_bound:
            return "two calls differ: a race between threads, or memory read before it is written"
        if self.rounded is not None:
            return self._rounding(self.rounded)
        if self.right_unmasked:
            return "the causal mask: its diagonal, or the tiles it skips"
        if self.weighed == NOT_FINITE:
            return "NaN or infinity: no maximum subtracted before exp, -inf minus -inf in a masked row, or a sum of 0"
        if self.weighed == NOTHING:
            return "rows that are zero: nothing was added up, or it was written elsewhere"
        if self.weighed == RIGHT:
            return "the softmax is right, so the product with V is wrong: its rows or heads, or the output's place"
        if forgotten := self._forgotten():
            return forgotten
        # Carried wrongly: one key tile alone is right, every problem of more is wrong, each tile is right in itself.
        if len(self.growth) > 1 and not self.growth[0] and all(self.growth[1:]) and self.inside:
            return self._of_one_tile() or CARRIED.get(self.weighed, CARRIED[UNEVEN])
        if self.growth and all(self.growth):
            return "the scores themselves: scale, mask, or rows of Q and K of another head or tile"
        if self.growth and self.growth[-1] and sum(self.growth) == 1:
            return "the last key tile: keys beyond the end counted, or a remainder left out"
        if self.inside:
            return (
                self._of_one_tile()
                or "single key tiles are counted with the wrong weight, twice or not at all: compare the weights"
            )
        return "not one of the mistakes known here; another tile's K or V, or stale memory, looks like this"

    def _forgotten(self) -> str:
        """What an online softmax forgot, if that gives the weights that were measured."""
        probabilities = self.setting.probabilities[self.wrong.any(-1)]
        return carried.name(probabilities, self.measured, self.setting.block_columns, self.slack)

    def _of_one_tile(self) -> str:
        """Of a single key tile that counts for nothing, or twice, beside all others."""
        matters = self.right > MATTERS
        share = torch.where(matters, self.measured / self.right, torch.nan)
        share = share / share.nanmedian(-1, keepdim=True).values if self.weighed == NORMALISED else share
        for tile in range(share.shape[-1]):
            rows = share[matters[:, tile] & (matters.sum(-1) > 2)]
            others = torch.cat([rows[:, :tile], rows[:, tile + 1 :]], -1)
            if not len(rows) or not _mostly(((others - 1).abs() <= 0.05) | others.isnan()):
                continue
            for factor, words in ((0, "never counted"), (2, "counted twice")):
                if _mostly((rows[:, tile] - factor).abs() <= 0.05):
                    return f"key tile {tile} is {words}"
        return ""

    def _rounding(self, dtype: torch.dtype) -> str:
        """What of it is rounded, as far as that shows."""
        inputs = {name: self.setting.call.args[name].to(dtype).to(self.found.out.dtype) for name in "qkv"}
        notes = []
        if holds_all(dtype, self.found.out):
            notes.append("its output holds no other numbers")
        elif self.setting.but(**inputs).judged(self.found.out).ok:
            notes.append("its inputs, and nothing else")
        if dtype == torch.float16:
            notes.append("TF32 has as many digits")
        elif self.found.out.dtype == torch.float16:
            notes.append("sums kept in fp16 look like this too")
        said = f" ({'; '.join(notes)})" if notes else ""
        short = SHORT[dtype]
        return f"rounded to {short} somewhere{said}: no other mistake, it is as near to fp64 as {short} comes"

    @property
    def sentences(self) -> list[str]:
        """From where it is to what it is called."""
        tiles = self.wrong.split(self.setting.block_rows, dim=2)
        lines = [which([bool(tile.any()) for tile in tiles], "query tile")]
        for axis, noun in ((1, "head"), (0, "batch element")):
            wrong = [bool(part.any()) for part in self.wrong.unbind(axis)]
            lines += [] if all(wrong) else [which(wrong, noun)]
        growth = which(self.growth, "key tile") if self.growth else "it does not take smaller problems"
        lines += [f"grown key tile by key tile: {growth}", self.weighed]
        if self.right_unmasked is not None:
            lines.append("without the causal mask it is " + ("right" if self.right_unmasked else "wrong, too"))
        return [*lines, *self.found.remarks, f"=> {self.mistake}"]


def holds_all(dtype: torch.dtype, out: Tensor) -> bool:
    return torch.equal(out.to(dtype).to(out.dtype), out)


def _mostly(what: Tensor) -> bool:
    return what.double().mean().item() >= 0.9


def which(wrong: Sequence[bool], noun: str) -> str:
    """The wrong ones of a sequence in words: "query tile 0 is right, every later one is wrong"."""
    count, bad = len(wrong), [index for index, is_wrong in enumerate(wrong) if is_wrong]
    if len(bad) in (0, count):
        return f"{'no' if not bad else 'every'} {noun} is wrong"
    if bad == list(range(bad[0], count)):
        right = f"{noun} 0 is" if bad[0] == 1 else f"{noun}s 0 to {bad[0] - 1} are"
        return f"{right} right, every later one is wrong"
    few = ", ".join(map(str, bad[:6])) + (" and more" if len(bad) > 6 else "")
    return f"of {count} {noun}s only {few} {'are' if len(bad) > 1 else 'is'} wrong"
