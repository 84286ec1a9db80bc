"""What kind of mistake it is, in words: rules over what probe.py found out. No kernel is called here.

Each rule is an observation, and what that points to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from verify.probe import Evidence

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


class Seen:
    """The evidence as the rules look at it: in the rows that are wrong. measured, right: (rows, key tiles)."""

    def __init__(self, evidence: Evidence) -> None:
        rows = evidence.wrong.any(-1)
        shares = evidence.setting.shares[rows]
        self.growth, self.kernel = evidence.growth, evidence.kernel
        self.right_unmasked = evidence.right_unmasked
        self.measured, self.right = evidence.weights[rows], shares[..., -1]
        self.slack = max(1e-3, 4 * torch.finfo(self.kernel.out.dtype).eps)
        self.weights = self._weights()
        self.inside = self._inside(shares[..., :-1], self.kernel.out.double().transpose(1, 2)[rows])

    def _weights(self) -> Weights:
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

    def _inside(self, shares: Tensor, out: Tensor) -> bool:
        """Whether out is what the measured weights make of the right output of each key tile alone."""
        of_one = torch.where(self.right > 0, self.measured / self.right, 0.0)
        mixed = (of_one[..., None] * shares).sum(-2)
        slack = max(1e-3, 16 * torch.finfo(self.kernel.out.dtype).eps) * max(1.0, mixed.abs().max().item())
        return bool(((mixed - out).abs() <= slack).all())

    @property
    def carried_wrongly(self) -> bool:
        """One key tile alone is right, every problem of more tiles is wrong, and each tile is right in itself."""
        return len(self.growth) > 1 and not self.growth[0] and all(self.growth[1:]) and self.inside


def _mostly(what: Tensor) -> bool:
    return what.double().mean().item() >= 0.9


# The first rule that holds names the mistake.
RULES: Sequence[tuple[Callable[[Seen], bool], str]] = (
    (
        lambda seen: seen.kernel.repeats > seen.kernel.check.widest_bound,
        "two calls differ: a race between threads, or memory read before it is written",
    ),
    (lambda seen: seen.right_unmasked is True, "the causal mask: its diagonal, or the tiles it skips"),
    (
        lambda seen: seen.weights is Weights.NONE,
        "NaN or infinity: a maximum not subtracted before exp, -inf minus -inf in a masked row, or a sum of 0",
    ),
    (
        lambda seen: seen.weights is Weights.NOTHING,
        "rows that are zero: nothing was added up, or it was written elsewhere",
    ),
    (
        lambda seen: seen.weights is Weights.RIGHT,
        "the softmax is right, so the product with V is wrong: V's rows, channels or heads, or the output's place",
    ),
    (
        lambda seen: seen.carried_wrongly and bool(seen.measured[:, 0].any()) and not seen.measured[:, 1].any(),
        "key tile 1 is never counted",
    ),
    (
        lambda seen: seen.carried_wrongly and seen.weights is Weights.NORMALISED,
        "the running maximum m of the key tiles before is not what it was: stored at, or read from, the wrong index",
    ),
    (
        lambda seen: seen.carried_wrongly and seen.weights is Weights.ROW_SUM,
        "the row sum l is not brought to the new maximum as the output is (FA2 algorithm 1, line 9)",
    ),
    (
        lambda seen: seen.carried_wrongly,
        "the output O is not brought to the new maximum as the row sum is (FA2 algorithm 1, line 10)",
    ),
    (
        lambda seen: bool(seen.growth) and all(seen.growth),
        "the scores themselves: scale, mask, or rows of Q and K of another head or tile",
    ),
    (
        lambda seen: bool(seen.growth) and seen.growth[-1] and sum(seen.growth) == 1,
        "the last key tile: keys beyond the end counted, or a remainder left out",
    ),
    (
        lambda seen: seen.inside,
        "single key tiles are counted with the wrong weight, twice or not at all: compare the weights",
    ),
    (lambda seen: True, "not one of the mistakes known here; another tile's K or V, or stale memory, looks like this"),
)


def findings(evidence: Evidence) -> list[str]:
    """Sentences, from where it is to what it is called."""
    seen = Seen(evidence)
    tiles = evidence.wrong.split(evidence.setting.block_rows, dim=2)
    lines = [which([bool(tile.any()) for tile in tiles], "query tile")]
    for axis, noun in ((1, "head"), (0, "batch element")):
        wrong = [bool(part.any()) for part in evidence.wrong.unbind(axis)]
        lines += [] if all(wrong) else [which(wrong, noun)]
    growth = which(evidence.growth, "key tile") if evidence.growth else "it does not take smaller problems"
    lines += [f"grown key tile by key tile: {growth}", seen.weights.value]
    if evidence.right_unmasked is not None:
        lines.append("without the causal mask it is " + ("right" if evidence.right_unmasked else "wrong, too"))
    name = next(name for holds, name in RULES if holds(seen))
    return [*lines, *evidence.kernel.remarks, f"=> {name}"]


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
