"""What kind of mistake it is, in words: rules over what difference.py and probe.py found. No kernel is called here.

Each rule says what was observed first and what that points to after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from verify.difference import which
from verify.probe import Judged, TileStatistics

# A key tile of a row matters to these rules if it should get at least this share of the row's weight.
MATTERS = 0.01


class Weights(Enum):
    """What is wrong with the softmax weights that the rows give the key tiles."""

    RIGHT = "each key tile gets its right share of the softmax weight"
    LAST_ONLY = "all weight goes to the last key tile, the tiles before it are forgotten"
    NORMALISED = "key tiles get wrong shares of the weight, which still sums to 1"
    ROW_SUM = "all key tiles of a row are off by the same factor, so only the row sum is wrong"
    UNEVEN = "key tiles get wrong shares of the weight, and it does not sum to 1"
    NOTHING = "the rows get nothing from any key tile"
    NONE = "the softmax weights are NaN or infinite"


@dataclass(frozen=True)
class Evidence:
    """About one wrong candidate. differs: (batch, nheads, row, channel) against fp64.

    growth: for problems of 1, 2, ... key tiles, whether the two candidates differ (nothing known: empty)
    weights: (batch, nheads, row, key tiles) as measured
    """

    judged: Judged
    differs: Tensor
    block_rows: int
    growth: Sequence[bool]
    weights: Tensor
    truth: TileStatistics
    only_causal: bool | None = None

    @property
    def rows(self) -> Tensor:
        """(batch, nheads, row): where anything is wrong."""
        return self.differs.any(-1)

    @property
    def query_tiles(self) -> list[bool]:
        return [bool(tile.any()) for tile in self.differs.split(self.block_rows, dim=2)]

    @property
    def carried_wrongly(self) -> bool:
        """One key tile alone is right, and every problem of more tiles is wrong."""
        return len(self.growth) > 1 and not self.growth[0] and all(self.growth[1:])


def kind_of_weights(evidence: Evidence) -> Weights:
    rows = evidence.rows
    measured, right = evidence.weights[rows], evidence.truth.weight[rows]
    if not measured.isfinite().all():
        return Weights.NONE
    slack = max(1e-3, 4 * torch.finfo(evidence.judged.out.dtype).eps)
    if ((measured - right).abs() <= slack).all():
        return Weights.RIGHT
    # Rows with one key tile, or already right, say nothing.
    telling = ((right > MATTERS).sum(-1) > 1) & ((measured - right).abs() > slack).any(-1)
    if not telling.any():
        return Weights.UNEVEN if _off_one(measured, slack) else Weights.NORMALISED
    measured, right = measured[telling], right[telling]
    # A running maximum lost before a tile that is all masked leaves a row with nothing: no matter of the row sum.
    empty = measured.sum(-1).abs() <= slack
    if empty.all():
        return Weights.NOTHING
    measured, right = measured[~empty], right[~empty]
    if not _off_one(measured, slack):
        last = (right > MATTERS).long().cumsum(-1).argmax(-1, keepdim=True)
        forgotten = measured.gather(-1, last) > 1 - slack
        return Weights.LAST_ONLY if forgotten.double().mean() > 0.9 else Weights.NORMALISED
    factors = torch.where(right > MATTERS, measured / right, torch.nan)
    low, high = factors.nan_to_num(nan=torch.inf).amin(-1), factors.nan_to_num(nan=-torch.inf).amax(-1)
    even = high - low <= 0.05 * high.abs() + slack
    return Weights.ROW_SUM if even.double().mean() > 0.9 else Weights.UNEVEN


def _off_one(weights: Tensor, slack: float) -> bool:
    return ((weights.sum(-1) - 1).abs() > weights.shape[-1] * slack).double().mean().item() > 0.1


def tiles_are_right_inside(evidence: Evidence) -> bool:
    """Whether the output is what the measured weights make of the right output of each key tile alone."""
    mixed = (evidence.weights[..., None] * evidence.truth.out).sum(-2)[evidence.rows]
    out = evidence.judged.out.double().transpose(1, 2)[evidence.rows]
    slack = max(1e-3, 16 * torch.finfo(evidence.judged.out.dtype).eps) * max(1.0, mixed.abs().max().item())
    return bool(((mixed - out).abs() <= slack).all())


def findings(evidence: Evidence) -> list[str]:
    """Sentences, from where it is to what it is called."""
    judged, differs = evidence.judged, evidence.differs
    lines = [which(evidence.query_tiles, "query tile")]
    for axis, noun in ((1, "head"), (0, "batch element")):
        wrong = [bool(part.any()) for part in differs.unbind(axis)]
        if not all(wrong):
            lines.append(which(wrong, noun))
    if evidence.growth:
        lines.append(_about_growth(evidence.growth))
    kind = kind_of_weights(evidence)
    lines.append(kind.value)
    if evidence.only_causal is not None:
        lines.append(
            "without the causal mask it is right" if evidence.only_causal else "it is wrong without the causal mask too"
        )
    return [*lines, *judged.remarks, f"=> {name_of(evidence, kind)}"]


def _about_growth(growth: Sequence[bool]) -> str:
    if not any(growth):
        return "problems cut off after a key tile are all right"
    if growth[0] and all(growth):
        return "one key tile alone is wrong already"
    return "grown key tile by key tile: " + which(growth, "key tile")


def name_of(evidence: Evidence, kind: Weights) -> str:
    """The mistake's name, as far as the evidence goes."""
    if evidence.judged.repeats > evidence.judged.check.widest_bound:
        return "two calls differ: a race between threads, or memory read before it is written"
    if evidence.only_causal:
        return "the causal mask: its diagonal, or the tiles it skips"
    if kind is Weights.NONE:
        return "NaN or infinity: a maximum not subtracted before exp, -inf minus -inf in a masked row, or a sum of 0"
    if kind is Weights.NOTHING:
        return "rows that are zero: nothing was added up, or it was written elsewhere"
    if kind is Weights.RIGHT:
        return (
            "the softmax is right, so the product with V is wrong: V's rows, channels or heads, or the output's place"
        )
    inside = tiles_are_right_inside(evidence)
    if not evidence.carried_wrongly or not inside:
        return _not_carried(evidence, inside)
    if kind is Weights.NORMALISED and (never := tiles_never_read(evidence)):
        return f"key tile{'s' * (len(never) > 1)} {', '.join(map(str, never))}: never counted"
    if kind is Weights.ROW_SUM:
        return "the row sum l is not brought to the new maximum as the output is (FA2 algorithm 1, line 9)"
    if kind is Weights.UNEVEN:
        return "the output O is not brought to the new maximum as the row sum is (FA2 algorithm 1, line 10)"
    name = "the running maximum m of the key tiles before is not what it was: stored at, or read from, the wrong index"
    if kind is Weights.LAST_ONLY:
        name += " (read as -inf, the value it started with)"
    if _only_query_tile_0_is_right(evidence):
        name += ", one that lacks the query tile's offset"
    return name


def _only_query_tile_0_is_right(evidence: Evidence) -> bool:
    """And it has more than one key tile to see, so that being right means something."""
    tiles = evidence.query_tiles
    if len(tiles) == 1 or tiles[0] or not all(tiles[1:]):
        return False
    of_tile_0 = evidence.truth.weight[:, :, : evidence.block_rows]
    return bool(((of_tile_0 > MATTERS).sum(-1) > 1).any())


def _not_carried(evidence: Evidence, inside: bool) -> str:
    growth = evidence.growth
    if growth and growth[0] and all(growth):
        return "the scores themselves: scale, mask, or rows of Q and K of another head or tile"
    if growth and sum(growth) == 1 and growth[-1]:
        return "the last key tile: keys beyond the end counted, or a remainder left out"
    odd = odd_key_tiles(evidence) or [index for index, differs in enumerate(growth) if differs][:1]
    if not odd:
        return "not one of the mistakes known here"
    tiles = f"key tile{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    if inside:
        return f"{tiles}: counted with the wrong weight, twice, or not at all"
    return f"{tiles}: not what it should be, as if K or V of another tile were read, or stale memory"


def odd_key_tiles(evidence: Evidence) -> list[int]:
    """Key tiles off by another factor than most are, in most of the rows; none where there is no such minority."""
    rows = evidence.rows
    measured, right = evidence.weights[rows], evidence.truth.weight[rows]
    factors = torch.where(right > MATTERS, measured / right, torch.nan)
    away = (factors / factors.nanmedian(-1, keepdim=True).values - 1).abs()
    odd = ((away > 0.02) | away.isinf()).double().mean(0) > 0.5
    found = odd.nonzero().flatten().tolist()
    return found if 2 * len(found) <= len(odd) else []


def tiles_never_read(evidence: Evidence) -> list[int]:
    """Odd key tiles that have no weight at all in any row."""
    found = odd_key_tiles(evidence)
    return found if found and (evidence.weights[evidence.rows][:, found] == 0).all() else []
