"""What kind of mistake it is: what is asked of a kernel that is wrong, from outside, and rules over what it answers.

Attention is linear in v, so v = 1 on the keys of one tile and 0 elsewhere makes the output that tile's softmax weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from .call import SHORT
from .errors import UsageError
from .judge import COARSER, LARGER, at_random
from .probe import Kernel, Setting, ask, gap

# A key tile of a row matters to these rules if it should get at least this share of the row's weight.
MATTERS = 0.01


class Weights(Enum):
    """What is wrong with the softmax weights that the rows give the key tiles."""

    RIGHT = "each key tile gets its right share of the softmax weight"
    NORMALISED = "key tiles get wrong shares of the weight, which still sums to 1"
    ROW_SUM = "all key tiles of a row are off by the same factor, so only the row sum is wrong"
    UNEVEN = "key tiles get wrong shares of the weight, and it does not sum to 1"
    NOTHING = "the rows get nothing from any key tile"
    NONE = "the softmax weights are NaN or infinite"


@dataclass(frozen=True)
class Evidence:
    """What is found out about a kernel that is wrong. wrong: (batch, nheads, row, channel) against fp64.

    growth: for problems of 1, 2, ... key tiles, whether it is wrong; empty if it does not take smaller problems
    weights: (batch, nheads, row, key tiles) as measured
    right_unmasked: whether it is right without its causal mask, None if it has none
    as_near_as: the dtypes coarser than the call's to which it may round, and does nothing else wrong
    """

    kernel: Kernel
    setting: Setting
    wrong: Tensor
    growth: Sequence[bool]
    weights: Tensor
    right_unmasked: bool | None
    as_near_as: Sequence[torch.dtype] = ()

    @property
    def rows(self) -> Tensor:
        """Those that are wrong, which is where the rules look: (batch, nheads, row) bool."""
        return self.wrong.any(-1)

    @cached_property
    def measured(self) -> Tensor:
        """(rows, key tiles), and so is `right`."""
        return self.weights[self.rows]

    @cached_property
    def right(self) -> Tensor:
        return self.setting.shares[self.rows][..., -1]

    @property
    def slack(self) -> float:
        """How far off a weight may be."""
        return max(1e-3, 4 * self._eps)

    @cached_property
    def weighed(self) -> Weights:
        measured, right, slack = self.measured, self.right, self.slack
        if not measured.isfinite().all():
            return Weights.NONE
        off = (measured - right).abs() > slack
        if not off.any():
            return Weights.RIGHT
        # Rows with one key tile, or already right, say nothing.
        telling = ((right > MATTERS).sum(-1) > 1) & off.any(-1)
        if telling.any():
            measured, right = measured[telling], right[telling]
        # A running maximum lost before a tile that is all masked leaves a row with nothing: no matter of the row sum.
        empty = measured.sum(-1).abs() <= slack
        if empty.all():
            return Weights.NOTHING
        measured, right = measured[~empty], right[~empty]
        if _mostly((measured.sum(-1) - 1).abs() <= measured.shape[-1] * slack):
            return Weights.NORMALISED
        factors = torch.where(right > MATTERS, measured / right, torch.nan)
        low, high = factors.nan_to_num(nan=torch.inf).amin(-1), factors.nan_to_num(nan=-torch.inf).amax(-1)
        even = telling.any() and _mostly(high - low <= 0.05 * high.abs() + slack)
        return Weights.ROW_SUM if even else Weights.UNEVEN

    @cached_property
    def inside(self) -> bool:
        """Whether out is what the measured weights make of the right output of each key tile alone."""
        of_one = torch.where(self.right > 0, self.measured / self.right, 0.0)
        mixed = (of_one[..., None] * self.setting.shares[self.rows][..., :-1]).sum(-2)
        out = self.kernel.out.double().transpose(1, 2)[self.rows]
        slack = max(1e-3, 16 * self._eps) * max(1.0, mixed.abs().max().item())
        return bool(((mixed - out).abs() <= slack).all())

    @property
    def rounded(self) -> torch.dtype | None:
        """The dtype to which it rounds something, and does nothing else wrong."""
        written = [dtype for dtype in self.as_near_as if holds_all(dtype, self.kernel.out)]
        return written[-1] if written else next(iter(self.as_near_as), None)

    @property
    def _eps(self) -> float:
        return torch.finfo(self.kernel.out.dtype).eps

    @property
    def carried_wrongly(self) -> bool:
        """One key tile alone is right, every problem of more tiles is wrong, and each tile is right in itself."""
        return len(self.growth) > 1 and not self.growth[0] and all(self.growth[1:]) and self.inside


def evidence(kernel: Kernel, setting: Setting, done: Callable[[str], None]) -> Evidence:
    """Everything there is to find out about a kernel that is wrong. `done` hears what is being asked."""

    def is_right(problem: Setting) -> bool:
        return problem.judged(ask(kernel.name, kernel.function, problem)[0]).ok

    growth: list[bool] = []
    with suppress(UsageError):
        for smaller, tile in zip(setting.grown, setting.key_tiles):
            done(f"{kernel.name}: problem of {tile.stop} keys")
            growth.append(not is_right(smaller))
    growth = growth if len(growth) == len(setting.key_tiles) else []
    done(f"{kernel.name}: weights of key tiles")
    weights = key_weights(kernel, setting)
    wrong = gap(kernel.out, setting.right.exact.out) > kernel.check.widest_bound
    right_unmasked = is_right(setting.but(causal=False)) if setting.call.args["causal"] else None
    near = [dtype for dtype in COARSER[kernel.out.dtype] if setting.as_near_as(kernel.out, dtype)]
    near = near if near and errs_at_random(kernel, setting) else []
    return Evidence(kernel, setting, wrong, growth, weights, right_unmasked, near)


def errs_at_random(kernel: Kernel, setting: Setting) -> bool:
    """Whether its errors are others where q, k and v are a little larger. Those of a mistake are nearly the same."""
    q, k, v = (LARGER * x for x in setting.call.qkv)
    larger = setting.but(q=q, k=k, v=v)
    out, _ = ask(kernel.name, kernel.function, larger)
    return at_random(kernel.out.double() - setting.right.exact.out, out.double() - larger.right.exact.out)


def holds_all(dtype: torch.dtype, out: Tensor) -> bool:
    return torch.equal(out.to(dtype).to(out.dtype), out)


def key_weights(kernel: Kernel, setting: Setting) -> Tensor:
    """(batch, nheads, seqlen_q, key tiles): the softmax weight each row gives each key tile, measured through v."""
    found = []
    for columns in setting.key_tiles:
        v = torch.zeros_like(setting.call.args["v"])
        v[:, columns] = 1
        out, _ = ask(kernel.name, kernel.function, setting.but(v=v))
        # Every channel says the same, unless it is the channels that are mixed up.
        found.append(out.double().median(dim=-1).values)
    return torch.stack(found, dim=-1).transpose(1, 2)


def _mostly(what: Tensor) -> bool:
    return what.double().mean().item() >= 0.9


def mistake(it: Evidence) -> str:
    """What it looks like, by the first rule that holds."""
    if it.kernel.repeats > it.kernel.check.widest_bound:
        return "two calls differ: a race between threads, or memory read before it is written"
    if it.rounded is not None:
        return rounding(it, it.rounded)
    if it.right_unmasked:
        return "the causal mask: its diagonal, or the tiles it skips"
    if it.weighed is Weights.NONE:
        return "NaN or infinity: a maximum not subtracted before exp, -inf minus -inf in a masked row, or a sum of 0"
    if it.weighed is Weights.NOTHING:
        return "rows that are zero: nothing was added up, or it was written elsewhere"
    if it.weighed is Weights.RIGHT:
        return (
            "the softmax is right, so the product with V is wrong: V's rows, channels or heads, or the output's place"
        )
    if it.carried_wrongly:
        if it.measured[:, 0].any() and not it.measured[:, 1].any():
            return "key tile 1 is never counted"
        if it.weighed is Weights.NORMALISED:
            return (
                "the running maximum m of the key tiles before is not what it was: stored at, or read from, "
                "the wrong index"
            )
        if it.weighed is Weights.ROW_SUM:
            return "the row sum l is not brought to the new maximum as the output is (FA2 algorithm 1, line 9)"
        return "the output O is not brought to the new maximum as the row sum is (FA2 algorithm 1, line 10)"
    if it.growth and all(it.growth):
        return "the scores themselves: scale, mask, or rows of Q and K of another head or tile"
    if it.growth and it.growth[-1] and sum(it.growth) == 1:
        return "the last key tile: keys beyond the end counted, or a remainder left out"
    if it.inside:
        return "single key tiles are counted with the wrong weight, twice or not at all: compare the weights"
    return "not one of the mistakes known here; another tile's K or V, or stale memory, looks like this"


def rounding(it: Evidence, dtype: torch.dtype) -> str:
    """What of it is rounded, as far as that shows."""
    q, k, v = (x.to(dtype).to(x.dtype) for x in it.setting.call.qkv)
    notes = []
    if holds_all(dtype, it.kernel.out):
        notes.append("its output holds no other numbers")
    elif it.setting.but(q=q, k=k, v=v).judged(it.kernel.out).ok:
        notes.append("its inputs, and nothing else")
    if dtype == torch.float16:
        notes.append("TF32 has as many digits")
    elif it.kernel.out.dtype == torch.float16:
        notes.append("sums kept in fp16 look like this too")
    short = SHORT[dtype]
    said = f" ({'; '.join(notes)})" if notes else ""
    return f"rounded to {short} somewhere{said}: no other mistake, it is as near to fp64 as {short} comes"


def findings(evidence: Evidence) -> list[str]:
    """Sentences, from where it is to what it is called."""
    tiles = evidence.wrong.split(evidence.setting.block_rows, dim=2)
    lines = [which([bool(tile.any()) for tile in tiles], "query tile")]
    for axis, noun in ((1, "head"), (0, "batch element")):
        wrong = [bool(part.any()) for part in evidence.wrong.unbind(axis)]
        lines += [] if all(wrong) else [which(wrong, noun)]
    growth = which(evidence.growth, "key tile") if evidence.growth else "it does not take smaller problems"
    lines += [f"grown key tile by key tile: {growth}", evidence.weighed.value]
    if evidence.right_unmasked is not None:
        lines.append("without the causal mask it is " + ("right" if evidence.right_unmasked else "wrong, too"))
    return [*lines, *evidence.kernel.remarks, f"=> {mistake(evidence)}"]


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
