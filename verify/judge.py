"""How far two answers are apart, and how far they may be. The criteria are flash-attn's own and live only here.

Every (sequence, head) is judged on its own, by bounds in proportion to its own numbers: a head a million times smaller
than its neighbour has to be as right as that one, and a NaN or infinity may spoil no other sequence and no other head.

- Against fp64: the error is at most twice (gradients three times) that of plain PyTorch in the input's dtype, plus one
  rounding of the largest sum of absolute terms, without which a problem that plain PyTorch happens to solve exactly
  could not be passed. Gradients may cancel to zero, as with one visible key: what is left is the rounding of the terms.
- Against a recorded official answer: the bounds stated beside the recording.
- A (sequence, key head) that was given a NaN or an infinity is left out, and so are results beyond the dtype's range.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.oracle import visible
from verify.problem import Answer, Problem

OUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
OFFICIAL_OUT_EPSILONS, OFFICIAL_GRADIENT_EPSILONS, OFFICIAL_LSE = 4.0, 8.0, 2e-3
RTOL, ATOL = 1e-3, 1e-5
CANCELLATION = 64.0  # roundings, of fp32 sums, that a gradient may be off where it cancels to zero


@dataclass(frozen=True)
class Check:
    """One quantity of one answer held against one yardstick ("official" or "fp64"), where it is nearest to its bound
    or furthest beyond it.
    """

    quantity: str
    against: str
    error: float
    bound: float
    mean_difference: float
    allclose: bool
    note: str = ""
    counts: bool = True  # towards the verdict; the others are information
    widest_bound: float = 0.0  # error and bound are of the worst (sequence, head); this is the largest bound of all

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # False for NaN

    @property
    def ratio(self) -> float:
        """The error as a multiple of its bound."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 and not math.isnan(self.error) else math.inf


def _broken(quantity: str, against: str, note: str) -> Check:
    return Check(quantity, against, math.inf, 0.0, math.inf, False, note)


def _difference(got: Tensor, expected: Tensor) -> Tensor:
    """|got - expected| in fp64; 0 where both are the same infinity or both NaN, NaN where only one is a number."""
    got, expected = got.double(), expected.double()
    return torch.where((got == expected) | (got.isnan() & expected.isnan()), 0.0, (got - expected).abs())


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude, 0 for an empty tensor."""
    finite = tensor[torch.isfinite(tensor)].double().abs()
    return finite.max().item() if finite.numel() else 0.0


class _Cells:
    """Finds the largest number in each (sequence, head) of a problem's results, packed parts one after another."""

    def __init__(self, problem: Problem) -> None:
        tensors = problem.tensors
        both = tensors.get("cu_seqlens")
        self.bounds_q, self.bounds_k = tensors.get("cu_seqlens_q", both), tensors.get("cu_seqlens_k", both)

    def worst(self, quantity: str, values: Tensor) -> Tensor:
        """(sequences + 1, heads), the last row for tokens outside of all sequences; 0 where there is nothing."""
        if quantity == "softmax_lse":
            values = values.transpose(-1, -2)[..., None]
        of_cache = quantity in ("k_cache", "v_cache")
        bounds = None if of_cache else self.bounds_k if quantity in ("dk", "dv", "dkv") else self.bounds_q
        if bounds is None:
            rows = [_largest_of_heads(row) for row in values]
            return torch.stack([*rows, torch.zeros_like(rows[0])])
        starts = bounds.tolist()
        rows = [_largest_of_heads(values[start:end]) for start, end in itertools.pairwise(starts)]
        outside = torch.cat([values[: starts[0]], values[starts[-1] :]])
        return torch.stack([*rows, _largest_of_heads(outside)])


def _largest_of_heads(values: Tensor) -> Tensor:
    """(heads,) of (tokens, heads, head_dim) or (tokens, parts, heads, head_dim)."""
    values = values.flatten(1, -2).transpose(0, 1).flatten(1)
    return values.amax(1) if values.shape[1] else values.new_zeros(len(values))


def _finite(values: Tensor) -> Tensor:
    """Magnitudes, 0 for what is not finite."""
    return values.double().abs().nan_to_num(nan=0.0, posinf=0.0)


def _measure(
    quantity: str, against: str, got: Tensor | None, expected: Tensor, bounds: Tensor, cells: _Cells,
    spoilt: Tensor | None = None,
) -> Check:  # fmt: skip
    """bounds: (sequences, heads), or one number for all. spoilt: which of them have nothing to be held against."""
    if got is None:
        return _broken(quantity, against, "missing")
    if got.shape != expected.shape:
        return _broken(quantity, against, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    difference = _difference(got, expected)
    if not difference.numel():
        return Check(quantity, against, 0.0, bounds.max().item() if bounds.numel() else 0.0, 0.0, True)
    errors = cells.worst(quantity, difference.nan_to_num(nan=math.inf))
    bounds = bounds.expand(len(errors) - 1, errors.shape[1])
    if spoilt is not None:
        errors[:-1].masked_fill_(spoilt, 0.0)
    if quantity == "softmax_lse":  # which nothing defines outside of all sequences
        errors[-1] = 0.0
    bounds = torch.cat([bounds, bounds.new_zeros(1, errors.shape[1])])
    ratios = torch.where(errors == 0, 0.0, errors / bounds)
    sequence, head = divmod(int(ratios.argmax()), errors.shape[1])
    finite = difference[difference.isfinite()]
    place = "outside of all sequences" if sequence == len(errors) - 1 else f"in sequence {sequence}, head {head}"
    return Check(
        quantity,
        against,
        error=errors[sequence, head].item(),
        bound=bounds[sequence, head].item(),
        mean_difference=finite.mean().item() if finite.numel() else math.inf,
        allclose=torch.allclose(got.double(), expected.double(), rtol=RTOL, atol=ATOL, equal_nan=True),
        note="" if (ratios <= 1).all() else f"wrong {place}",
        widest_bound=bounds.max().item(),
    )


def rounding(dtype: torch.dtype, magnitude: float) -> float:
    """The floor under every bound, in units in the last place of the largest value.

    Half a unit for half precision; four for fp32, where the order of summation alone makes that difference; 32 for
    fp64, where the fp64 answer is no better than the one it judges.
    """
    units = {2: 0.5, 4: 4.0, 8: 32.0}[dtype.itemsize]
    return units * torch.finfo(dtype).eps * magnitude


def _rounding(dtype: torch.dtype, terms: Tensor) -> Tensor:
    """The same of every (sequence, head), for the largest sum of terms. In half precision probabilities and results are
    rounded, each by half a unit.
    """
    return max(1.0, rounding(dtype, 1.0) / torch.finfo(dtype).eps) * torch.finfo(dtype).eps * terms


def cancellation(dtype: torch.dtype) -> float:
    """The absolute floor under gradients of numbers around 1: 7.6e-6 up to fp32, 1.4e-14 for fp64."""
    return CANCELLATION * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def recomputation(dtype: torch.dtype, softmax_lse: Tensor, gradient: Tensor) -> float:
    """What a backward pass that recomputes exp(score - softmax_lse) cannot know: both are rounded at their magnitude.

    Matters in fp32 only, for scores in the hundreds or ALiBi's slope * position in the LSE.
    """
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps * largest(softmax_lse) * largest(gradient)


def lse_bound(dtype: torch.dtype, expected: Tensor) -> Tensor:
    """softmax_lse is fp32 whatever the dtype: an absolute bound, and the rounding of large values."""
    absolute = OFFICIAL_LSE if dtype.itemsize == 2 else 2e-5
    return absolute + 4 * torch.finfo(torch.float32).eps * expected


def against_fp64(problem: Problem, got: Answer, truth: Answer, plain: Answer) -> list[Check]:
    """Every quantity of an answer against the fp64 answer, bounded by the error of the plain computation."""
    cells, dtype = _Cells(problem), problem.dtype
    assert truth.softmax_lse is not None and plain.softmax_lse is not None, "the oracle always knows them"
    largest_lse = cells.worst("softmax_lse", _finite(truth.softmax_lse))[:-1]

    def measure(quantity: str, mine: Tensor | None, expected: Tensor, rough: Tensor, factor: float) -> Check:
        terms = truth.terms[quantity]
        # Where plain PyTorch overflows it says nothing, and the rounding of the terms has to do.
        bounds = factor * cells.worst(quantity, _finite(_difference(rough, expected)))[:-1] + _rounding(dtype, terms)
        # exp(score) is off by as much as the score, and a backward pass computes it anew from softmax_lse, rounded at
        # its own magnitude: what such fp32 numbers cannot know. For fp32 calls it matters.
        lse = largest_lse.amax(1, keepdim=True)
        cancelled = 0.0 if quantity == "out" else CANCELLATION
        bounds = bounds + (cancelled + lse) * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * terms
        beyond = expected.abs() > torch.finfo(dtype).max
        if mine is not None and mine.shape == expected.shape:
            mine = torch.where(beyond, expected, mine.double())
        return _measure(quantity, "fp64", mine, expected, bounds, cells, truth.spoilt.get(quantity))

    checks = [measure("out", got.out, truth.out, plain.out, OUT_FACTOR)]
    if got.softmax_lse is not None:
        bounds = lse_bound(dtype, largest_lse)
        if "rotary_cos" in problem.tensors:  # rotated rows are rounded to the dtype before they are multiplied
            rough = _finite(_difference(plain.softmax_lse, truth.softmax_lse))
            bounds = bounds + OUT_FACTOR * cells.worst("softmax_lse", rough)[:-1]
        spoilt = truth.spoilt.get("out")
        checks.append(_measure("softmax_lse", "fp64", got.softmax_lse, truth.softmax_lse, bounds, cells, spoilt))
    for name, expected in truth.grads.items():
        checks.append(measure(f"d{name}", got.grads.get(name), expected, plain.grads[name], GRADIENT_FACTOR))
    for name, expected in truth.caches.items():
        # Old rows and v are copied, so their rounding is none; rotated keys are rounded once.
        epsilons = 1.0 if name == "k_cache" and "rotary_cos" in problem.tensors else 0.0
        bounds = epsilons * torch.finfo(dtype).eps * cells.worst(name, _finite(expected))[:-1]
        checks.append(_measure(name, "fp64", got.caches.get(name), expected, bounds, cells))
    return checks + _form(problem, got)


def against_official(problem: Problem, got: Answer, official: Answer) -> list[Check]:
    """Every quantity of an answer against what flash-attn itself gave."""
    eps, cells = torch.finfo(problem.dtype).eps, _Cells(problem)

    def measure(quantity: str, mine: Tensor | None, expected: Tensor, epsilons: float, absolute: float = 0.0) -> Check:
        bounds = epsilons * eps * cells.worst(quantity, _finite(expected))[:-1] + absolute
        return _measure(quantity, "official", mine, expected, bounds, cells)

    checks = [measure("out", got.out, official.out, OFFICIAL_OUT_EPSILONS)]
    if official.softmax_lse is not None and got.softmax_lse is not None:
        checks.append(measure("softmax_lse", got.softmax_lse, official.softmax_lse, 0.0, OFFICIAL_LSE))
    for name, expected in official.grads.items():
        absolute = cancellation(problem.dtype)
        checks.append(measure(f"d{name}", got.grads.get(name), expected, OFFICIAL_GRADIENT_EPSILONS, absolute))
    for name, expected in official.caches.items():
        checks.append(measure(name, got.caches.get(name), expected, 1.0 if name == "k_cache" else 0.0))
    return checks


def _form(problem: Problem, got: Answer) -> list[Check]:
    """Dtypes and the dropout mask's form: what a number cannot show."""
    checks = []
    if got.out.dtype != problem.dtype:
        checks.append(_broken("out", "fp64", f"dtype {got.out.dtype}, expected {problem.dtype}"))
    if got.softmax_lse is not None and got.softmax_lse.dtype not in (
        torch.float32,
        torch.promote_types(problem.dtype, torch.float32),
    ):
        checks.append(_broken("softmax_lse", "fp64", f"dtype {got.softmax_lse.dtype}, expected torch.float32"))
    for name, gradient in got.grads.items():
        if gradient.dtype != problem.tensors[name].dtype:
            checks.append(
                _broken(f"d{name}", "fp64", f"dtype {gradient.dtype}, expected {problem.tensors[name].dtype}")
            )
    if problem.dropout_p > 0 and got.dmask is not None:
        checks.append(_kept_fraction(problem, got.dmask))
    return checks


def _kept_fraction(problem: Problem, dmask: Tensor) -> Check:
    """The share of kept probabilities against flash-attn's own, (floor(255 (1 - p)) + 1) / 256, within five standard
    deviations.
    """
    drawn = torch.cat(
        [dmask[i, :, : sees.shape[0], : sees.shape[1]][:, sees].flatten() for i, sees in enumerate(visible(problem))]
    )
    kept = (drawn[drawn != 0] > 0).double()  # a probability that underflowed to zero lost its sign
    if not kept.numel():
        return _broken("kept", "fp64", "S_dmask is zero everywhere")
    expected = (math.floor(255 * (1 - problem.dropout_p)) + 1) / 256
    error = abs(kept.mean().item() - expected)
    deviation = math.sqrt(expected * (1 - expected) / kept.numel())
    return Check("kept", "fp64", error, 5 * deviation, error, error <= ATOL)
