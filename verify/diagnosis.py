"""Name the mistake of a wrong kernel: call it on chosen inputs, and apply rules to its answers.

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

from . import carried, formulas, oracle
from .call import SHORT, Answer, Call, accepted, parts_of, same
from .errors import UsageError
from .judge import Check, Right, against_fp64, right_answer, rounded_to
from .steps import blocks
from .timing import synchronize

# The rules look only at key tiles that should get at least this share of a row's softmax weight.
MATTERS = 0.01
# Verdicts on the softmax weights of the key tiles.
RIGHT = "each key tile gets its right share of the softmax weight"
NORMALISED = "key tiles get wrong shares of the weight, which still sums to 1"
ROW_SUM = "all key tiles of a row are off by the same factor, so only the row sum is wrong"
UNEVEN = "key tiles get wrong shares of the weight, and it does not sum to 1"
NOTHING = "the rows get no weight from any key tile"
NOT_FINITE = "the softmax weights are NaN or infinite"

# For a verdict on the weights: what a kernel carries wrongly from one key tile to the next.
CARRIED = {
    NORMALISED: "the running maximum m of the key tiles before is lost: stored at, or read from, the wrong index",
    ROW_SUM: carried.ROW_SUM,
    UNEVEN: carried.OUTPUT,
}


# Arguments beside q, k and v: passed if the kernel takes them, or if they change the result.
OPTIONS = "causal", "softmax_scale", "window_size", "softcap", "alibi_slopes"


@dataclass(frozen=True)
class Setting:
    """A call of flash_attn_func, with CPU tensors, the device on which kernels run it, and the sizes of their tiles."""

    call: Call
    block_rows: int
    block_columns: int
    device: str

    def of(self, call: Call) -> Setting:
        """Return the setting with another call."""
        return replace(self, call=call)

    def but(self, **args: Any) -> Setting:
        """Return the setting with some arguments replaced."""
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
        """What each key tile adds to a row of the output, and its softmax weight in the last channel, in fp64: (batch,
        nheads, row, key tiles, head_dim + 1). One call finds both, with a v that has channels of its own for each tile.
        """
        v = self.call.args["v"]
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        tile = torch.arange(values.shape[1]) // self.block_columns
        of_tile = torch.nn.functional.one_hot(tile)[:, None, :, None] * values[..., None, :]
        out = oracle.answer(self.call.fn, {**self.call.args, "v": of_tile.flatten(-2)}).out
        return torch.unflatten(out.transpose(1, 2), -1, of_tile.shape[-2:])

    @functools.cached_property
    def probabilities(self) -> Tensor:
        """The softmax weights (batch, nheads, row, key) in fp64: the output for a v with one channel for each key."""
        keys = self.call.args["k"].shape[1]
        v = torch.eye(keys, dtype=torch.float64)[None, :, None].expand(*self.call.args["k"].shape[:-1], keys)
        return oracle.answer(self.call.fn, {**self.call.args, "v": v}).out.transpose(1, 2)

    def judged(self, out: Tensor) -> Check:
        """Check an output against the right one in fp64."""
        return against_fp64(self.right, Answer(out))[0]


@dataclass(frozen=True)
class Kernel:
    """A function by its import path, called as function(q, k, v, causal=...) on (batch, seqlen, heads, head_dim)."""

    name: str
    function: Callable[..., Any]

    def ask(self, setting: Setting) -> tuple[Tensor, list[str]]:
        """Return the output on the CPU, and the names of overwritten inputs. Raises UsageError if it has no output"""
        given, call = setting.call, setting.call.to(setting.device)
        with torch.no_grad():
            out = self.called(call, dict(zip("qkv", call.qkv)))
        return out.cpu(), [name for name in "qkv" if not same(given.args[name], call.args[name].cpu())]

    def called(self, call: Call, qkv: Mapping[str, Tensor]) -> Tensor:
        """Return the output for q, k, v and a call's options. Raises UsageError if the kernel fails"""
        try:
            out, *_ = parts_of(self.function(*qkv.values(), **self.options(call)))
            synchronize(call.q.device.type)
        except Exception as error:  # a user's kernel may raise anything
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in qkv.items())
            first_line = (str(error).splitlines() or [""])[0]
            raise UsageError(f"{self.name} raised {type(error).__name__} for {shapes}: {first_line}") from error
        found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        expected = f"shape {(*qkv['q'].shape[:-1], qkv['v'].shape[-1])}"
        if found != expected or not isinstance(out, Tensor):
            raise UsageError(f"{self.name} returned {found}, expected {expected}: batch, seqlen, heads, head_dim")
        return out

    def options(self, call: Call) -> dict[str, Any]:
        """Return the call's options that the function takes, or that change the result."""
        return accepted(self.function, {name: call.args[name] for name in OPTIONS if name in call.args})

    def is_right(self, setting: Setting) -> bool:
        return setting.judged(self.ask(setting)[0]).ok

    def answered(self, setting: Setting) -> Found:
        """Call the kernel twice and return the first answer with its checks."""
        out, changed = self.ask(setting)
        once, again = (x.nan_to_num(nan=0.0) for x in (out, self.ask(setting)[0]))
        return Found(self, out, setting.judged(out), changed, gap(once, again).max().item())


@dataclass(frozen=True)
class Found:
    """A kernel's answer and its check against fp64. repeats: the largest difference between two equal calls"""

    kernel: Kernel
    out: Tensor
    check: Check
    changed_inputs: Sequence[str]
    repeats: float

    @property
    def remarks(self) -> list[str]:
        """Remarks on the answer, right or wrong."""
        lines = [f"it changed its input {name}" for name in self.changed_inputs]
        return lines + [f"a second call gave another answer, {self.repeats:.1e} off the first"] * (self.repeats > 0)


def gap(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| as (batch, nheads, row, channel) in fp64; 0 for equal infinities, inf where either is NaN."""
    a, b = (x.double().transpose(1, 2) for x in (a, b))
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


# ---- measurements of a wrong kernel ----------------------------------------------------------------------------------


class Diagnosis:
    """Measurements of a wrong kernel, and the mistake that they show.

    wrong: elements off by more than the bound, (batch, nheads, row, channel)
    growth: whether the kernel is wrong on the first 1, 2, ... key tiles; empty if it declines smaller problems
    weights: each key tile's softmax weight in each row, (batch, nheads, row, key tiles), measured through v
    """

    def __init__(self, found: Found, setting: Setting) -> None:
        self.found, self.setting = found, setting
        self.wrong = gap(found.out, setting.right.exact.out) > found.check.widest_bound
        self.growth = self._grown()
        self.weights = torch.stack([*self._weights()], -1).transpose(1, 2)
        causal = setting.call.args["causal"]
        self.right_unmasked = found.kernel.is_right(setting.but(causal=False)) if causal else None
        # The rows that the rules look at.
        rows, eps = self.wrong.any(-1), torch.finfo(found.out.dtype).eps
        self.measured, self.right = self.weights[rows], setting.shares[rows][..., -1]
        self.slack = max(1e-3, 4 * eps)  # allowed error of a weight
        # Whether out equals the sum of the key tiles' right outputs, weighted by the measured weights.
        of_one = torch.where(self.right > 0, self.measured / self.right, 0.0)
        mixed = (of_one[..., None] * setting.shares[rows][..., :-1]).sum(-2)
        apart = (mixed - found.out.double().transpose(1, 2)[rows]).abs()
        self.inside = bool((apart <= max(1e-3, 16 * eps) * max(1.0, mixed.abs().max().item())).all())
        self.weighed = self._weighed()

    def _grown(self) -> list[bool]:
        """Run the problem on its first 1, 2, ... key tiles. A square problem stays square, as many kernels require."""
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
            # The channels are equal unless the kernel mixes them up; hence the median.
            yield self.found.kernel.ask(self.setting.but(v=v))[0].double().median(dim=-1).values

    def _weighed(self) -> str:
        measured, right, slack = self.measured, self.right, self.slack
        if not measured.isfinite().all():
            return NOT_FINITE
        off = (measured - right).abs() > slack
        if not off.any():
            return RIGHT
        # Leave out right rows, and rows with one key tile: they do not show how tiles are combined.
        telling = ((right > MATTERS).sum(-1) > 1) & off.any(-1)
        if telling.any():
            measured, right = measured[telling], right[telling]
        # A row without any weight shows no wrong row sum: its maximum was lost before a fully masked tile.
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
        """The dtype to which the kernel rounds, if this is its only error; else None."""
        out, call = self.found.out, self.setting.call
        near = rounded_to(call, Answer(out), lambda other: Answer(self.found.kernel.ask(self.setting.of(other))[0]))
        return next((dtype for dtype in reversed(near) if holds_all(dtype, out)), next(iter(near), None))

    @property
    def mistake(self) -> str:
        """Name the mistake by the first rule that applies."""
        if self.found.repeats > self.found.check.widest_bound:
            return "two calls differ: a race between threads, or memory read before it is written"
        if self.rounded is not None:
            return self._rounding(self.rounded)
        if not self.wrong.any(-1)[..., ~formulas.unseeing_rows(self.setting.call.args)].any():
            return "only rows that see no key are wrong: flash-attn's output is 0 there"
        if known := self._known():
            return known
        if self.right_unmasked:
            return "the causal mask: its diagonal, the tiles it skips, or rows with few keys"
        if self.weighed == NOT_FINITE:
            return "NaN or infinity: no maximum subtracted before exp, -inf minus -inf in a masked row, or a sum of 0"
        if self.weighed == NOTHING:
            return "rows that are zero: the kernel added up nothing, or wrote the sum elsewhere"
        if self.weighed == RIGHT:
            return "the softmax is right, so the product with V is wrong: its rows or heads, or the output's place"
        if forgotten := self._forgotten():
            return forgotten
        # State is carried wrongly: one key tile is right, two or more are wrong, though each tile by itself is right.
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

    def _known(self) -> str:
        """Return the known mistake whose output, computed in fp64, equals the kernel's, or ""."""
        return formulas.name_mistake(
            self.setting.call, self.setting.block_columns, self.found.out, self.found.check.widest_bound
        )

    def _forgotten(self) -> str:
        """Return which rescaling the online softmax skips, if that explains the measured weights, or ""."""
        probabilities = self.setting.probabilities[self.wrong.any(-1)]
        return carried.name(probabilities, self.measured, self.setting.block_columns, self.slack)

    def _of_one_tile(self) -> str:
        """Return a sentence if one key tile alone is never counted, or is counted twice, else ""."""
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
        """Describe the rounding, and where it happens if visible."""
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
        """Return the lines on a wrong kernel: first where it is wrong, last the name of the mistake."""
        tiles = self.wrong.split(self.setting.block_rows, dim=2)
        lines = [which([bool(tile.any()) for tile in tiles], "query tile")]
        for axis, noun in ((1, "head"), (0, "batch element")):
            wrong = [bool(part.any()) for part in self.wrong.unbind(axis)]
            lines += [] if all(wrong) else [which(wrong, noun)]
        growth = which(self.growth, "key tile") if self.growth else "the kernel declines smaller problems"
        lines += [f"grown key tile by key tile: {growth}", self.weighed]
        if self.right_unmasked is not None:
            lines.append("without the causal mask it is " + ("right" if self.right_unmasked else "wrong, too"))
        return [*lines, *self.found.remarks, f"=> {self.mistake}"]


def holds_all(dtype: torch.dtype, out: Tensor) -> bool:
    return torch.equal(out.to(dtype).to(out.dtype), out)


def _mostly(what: Tensor) -> bool:
    return what.double().mean().item() >= 0.9


def which(wrong: Sequence[bool], noun: str) -> str:
    """Describe the wrong items of a sequence: "query tile 0 is right, every later one is wrong"."""
    count, bad = len(wrong), [index for index, is_wrong in enumerate(wrong) if is_wrong]
    if len(bad) in (0, count):
        return f"{'no' if not bad else 'every'} {noun} is wrong"
    if bad == list(range(bad[0], count)):
        right = f"{noun} 0 is" if bad[0] == 1 else f"{noun}s 0 to {bad[0] - 1} are"
        return f"{right} right, every later one is wrong"
    few = ", ".join(map(str, bad[:6])) + (" and more" if len(bad) > 6 else "")
    return f"of {count} {noun}s only {few} {'are' if len(bad) > 1 else 'is'} wrong"
