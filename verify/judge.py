"""How far two answers are apart, and how far they may be. The criteria are flash-attn's own and live only here.

- Against fp64: the error is at most twice (gradients three times) that of plain PyTorch in the input's dtype, plus one
  rounding of the largest value, without which a problem that plain PyTorch happens to solve exactly could not be
  passed.
- Against a recorded official answer: the bounds stated beside the recording.
- Gradients get a small absolute floor as well (flash-attn's tests add 1e-5): where they cancel to zero, as with one
  visible key, what is left is the rounding of the terms, and no multiple of zero could bound it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.oracle import visible
from verify.problem import Answer, Problem

OUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
OFFICIAL_OUT_EPSILONS, OFFICIAL_GRADIENT_EPSILONS, OFFICIAL_LSE = 4.0, 8.0, 2e-3
RTOL, ATOL = 1e-3, 1e-5


@dataclass(frozen=True)
class Check:
    """One quantity of one answer held against one yardstick ("official" or "fp64")."""

    quantity: str
    against: str
    error: float
    bound: float
    mean_difference: float
    allclose: bool
    note: str = ""
    counts: bool = True  # towards the verdict; the others are information

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
    """|got - expected| in fp64; 0 where both are the same infinity, NaN where only one is a number."""
    got, expected = got.double(), expected.double()
    return torch.where(got == expected, 0.0, (got - expected).abs())


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude, 0 for an empty tensor."""
    finite = tensor[torch.isfinite(tensor)].double().abs()
    return finite.max().item() if finite.numel() else 0.0


def _measure(quantity: str, against: str, got: Tensor | None, expected: Tensor, bound: float) -> Check:
    if got is None:
        return _broken(quantity, against, "missing")
    if got.shape != expected.shape:
        return _broken(quantity, against, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    difference = _difference(got, expected)
    if not difference.numel():
        return Check(quantity, against, 0.0, bound, 0.0, True)
    return Check(
        quantity,
        against,
        error=difference.max().item(),
        bound=bound,
        mean_difference=difference.mean().item(),
        allclose=torch.allclose(got.double(), expected.double(), rtol=RTOL, atol=ATOL),
    )


def rounding(dtype: torch.dtype, magnitude: float) -> float:
    """The floor under every bound, in units in the last place of the largest value.

    Half a unit for half precision; four for fp32, where the order of summation alone makes that difference; 32 for
    fp64, where the fp64 answer is no better than the one it judges.
    """
    units = {2: 0.5, 4: 4.0, 8: 32.0}[dtype.itemsize]
    return units * torch.finfo(dtype).eps * magnitude


def cancellation(dtype: torch.dtype) -> float:
    """The absolute floor under gradient bounds: 7.6e-6 up to fp32, 1.4e-14 for fp64."""
    return 64 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def recomputation(dtype: torch.dtype, softmax_lse: Tensor, gradient: Tensor) -> float:
    """What a backward pass that recomputes exp(score - softmax_lse) cannot know: both are rounded at their magnitude.

    Matters in fp32 only, for scores in the hundreds or ALiBi's slope * position in the LSE.
    """
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps * largest(softmax_lse) * largest(gradient)


def lse_bound(dtype: torch.dtype, expected: Tensor) -> float:
    """softmax_lse is fp32 whatever the dtype: an absolute bound, and the rounding of large values."""
    absolute = OFFICIAL_LSE if dtype.itemsize == 2 else 2e-5
    return absolute + 4 * torch.finfo(torch.float32).eps * largest(expected)


def against_fp64(problem: Problem, got: Answer, truth: Answer, plain: Answer) -> list[Check]:
    """Every quantity of an answer against the fp64 answer, bounded by the error of the plain computation."""

    def bound(quantity_plain: Tensor, expected: Tensor, factor: float) -> float:
        plain_error = _difference(quantity_plain, expected).max().item() if expected.numel() else 0.0
        return factor * plain_error + rounding(problem.dtype, largest(expected))

    checks = [_measure("out", "fp64", got.out, truth.out, bound(plain.out, truth.out, OUT_FACTOR))]
    if got.softmax_lse is not None:
        bound_of_lse = lse_bound(problem.dtype, truth.softmax_lse)
        if "rotary_cos" in problem.tensors:  # rotated rows are rounded to the dtype before they are multiplied
            bound_of_lse += OUT_FACTOR * largest(_difference(plain.softmax_lse, truth.softmax_lse))
        checks.append(_measure("softmax_lse", "fp64", got.softmax_lse, truth.softmax_lse, bound_of_lse))
    for name, expected in truth.grads.items():
        gradient_bound = bound(plain.grads[name], expected, GRADIENT_FACTOR) + cancellation(problem.dtype)
        gradient_bound += recomputation(problem.dtype, truth.softmax_lse, expected)
        checks.append(_measure(f"d{name}", "fp64", got.grads.get(name), expected, gradient_bound))
    for name, expected in truth.caches.items():
        # Old rows and v are copied, so their rounding is none; rotated keys are rounded once.
        epsilons = 1.0 if name == "k_cache" and "rotary_cos" in problem.tensors else 0.0
        bound_of_cache = epsilons * torch.finfo(problem.dtype).eps * largest(expected)
        checks.append(_measure(name, "fp64", got.caches.get(name), expected, bound_of_cache))
    return checks + _form(problem, got)


def against_official(problem: Problem, got: Answer, official: Answer) -> list[Check]:
    """Every quantity of an answer against what flash-attn itself gave."""
    eps = torch.finfo(problem.dtype).eps
    checks = [_measure("out", "official", got.out, official.out, OFFICIAL_OUT_EPSILONS * eps * largest(official.out))]
    if official.softmax_lse is not None and got.softmax_lse is not None:
        checks.append(_measure("softmax_lse", "official", got.softmax_lse, official.softmax_lse, OFFICIAL_LSE))
    for name, expected in official.grads.items():
        gradient_bound = OFFICIAL_GRADIENT_EPSILONS * eps * largest(expected) + cancellation(problem.dtype)
        checks.append(_measure(f"d{name}", "official", got.grads.get(name), expected, gradient_bound))
    for name, expected in official.caches.items():
        bound_of_cache = eps * largest(expected) if name == "k_cache" else 0.0
        checks.append(_measure(name, "official", got.caches.get(name), expected, bound_of_cache))
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
