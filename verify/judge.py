"""The error of an answer, and its bounds. The criteria are flash-attn's own and live only here.

The judge checks every (sequence, head) by itself, with bounds in proportion to its own numbers: a head a million times
smaller than its neighbour must be as right, and a NaN or infinity may spoil no other sequence or head.

- Against fp64: the error is at most twice (gradients three times) the error of plain PyTorch in the input's dtype, plus
  one rounding (two) of the largest sum of absolute terms, because the plain error of a tiny problem can be 0 by luck.
  For fp64 inputs the right answer is rounded too, so the allowance for rounding doubles.
- Against a recorded official answer: the bounds stated beside the recording.
- The judge skips a (sequence, key head) with a NaN or infinity in its inputs, and results beyond the dtype's range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import oracle
from .call import CACHES, Answer, Call, same
from .oracle import Tokens, Truth

# A bound is a multiple of the plain error, plus a multiple of one rounding of the largest sum of terms.
# Both factors:
OUT, GRADIENT = (2.0, 1.0), (3.0, 2.0)
OFFICIAL_TANH = 2.0**-11  # the error of tanh.approx.f32, which flash-attn uses
CONVERTED = 2.0**-36  # the error of bf16 computed as fp16: probabilities times 2^12 in fp16's steps of 2^-24
OFFICIAL_LSE = 2e-3
# Bounds against recorded answers: (how many roundings of the largest number, plus an absolute error). A gradient's
# absolute error allows what flash-attn's fp32 sums leave where the exact gradient cancels to 0.
OFFICIAL = {"out": (4.0, 0.0), "softmax_lse": (0.0, OFFICIAL_LSE), "k_cache": (1.0, 0.0), "v_cache": (0.0, 0.0)}
OFFICIAL_GRADIENT = 8.0, 64 * torch.finfo(torch.float32).eps

GRADIENTS = "dq", "dk", "dv"
IN_LOG2 = "in log2, 1.4427 times flash-attn's natural logarithm"
NO_GRADIENT = "missing: out has no gradient"


@dataclass(frozen=True)
class Check:
    """The comparison of one quantity with fp64 or a recorded answer ("official"), in its worst (sequence, head)."""

    quantity: str
    against: str
    error: float
    bound: float
    note: str = ""  # the mistake, if any
    widest_bound: float = 0.0  # error and bound are of the worst (sequence, head); this is the largest bound of all
    size: float = 0.0  # the largest sum of absolute terms in that (sequence, head)

    @property
    def ok(self) -> bool:
        return self.ratio <= 1

    @property
    def ratio(self) -> float:
        """The error divided by its bound; infinite if either is NaN."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 and not math.isnan(self.error) else math.inf

    @property
    def share(self) -> float:
        """The error divided by the size of the numbers; infinite if it is NaN."""
        share = self.error / self.size if self.size > 0 else math.inf
        return math.inf if math.isnan(share) else share

    @property
    def gravity(self) -> tuple[bool, float, float]:
        """The key that sorts checks, the worst mistake last. Right checks are sorted by ratio. Wrong checks are sorted
        by share: by ratio, a missing digit of fp64 would be worse than nonsense in fp16. Above a share of 1 the error
        itself counts, since any error is a large share of numbers that should cancel to 0.
        """
        if self.ok:
            return False, self.ratio, 0.0
        if not math.isfinite(self.error):
            return True, math.inf, 0.0
        return True, min(self.share, 1.0), self.error

    @property
    def words(self) -> str:
        """Describe the mistake: the error, absolute and relative, and its bound."""
        if not self.bound:
            return self.note
        if not math.isfinite(self.error):
            return f"NaN or infinite where an error of {self.bound:.2g} is allowed"
        relative = f", {self.share:.2g} times its size," if self.size > self.bound else ""
        return f"off by {self.error:.2g}{relative} where {self.bound:.2g} is allowed"

    def to_json(self) -> dict[str, Any]:
        """Return the fields for JSON, which has no NaN and no infinity: they become text."""
        values = {**asdict(self), "ok": self.ok}
        return {n: str(x) if isinstance(x, float) and not math.isfinite(x) else x for n, x in values.items()}


def broken(quantity: str, note: str, against: str = "fp64") -> Check:
    """Return a failed check that has a note instead of an error and a bound."""
    return Check(quantity, against, math.inf, 0.0, note)


def worst(name: str, x: Tensor, tokens: Tokens) -> Tensor:
    """Return the largest number of a part of an answer, such as "out", in each (sequence, head). A last row is for the
    tokens outside of all sequences. For a cache: in each (cache row, head).
    """
    if name in CACHES:
        return x.amax((1, 3))
    if name == "softmax_lse":  # (B, H, S) or (H, T)
        x = x.mT
    else:  # (B, S, H, d) or (T, H, d)
        x = x.amax(-1) if x.shape[-1] else x.sum(-1)
    x = x.flatten(0, -2)
    sequences = tokens.keys if name in ("dk", "dv") else tokens.rows
    owners = torch.full((len(x), 1), len(sequences), device=x.device)
    for sequence, mine in enumerate(sequences):
        owners[mine.to(x.device)] = sequence
    return x.new_zeros(len(sequences) + 1, x.shape[1]).scatter_reduce(0, owners.expand(x.shape), x, "amax")


@dataclass(frozen=True)
class Right:
    """The right answer to a call, and the bounds of out, dq, dk and dv by (sequence, head)."""

    call: Call
    exact: Truth
    bounds: Mapping[str, Tensor]
    has_tainted: bool


# The coarser dtypes in which a kernel may have computed, the finest first.
COARSER = {
    torch.float64: (torch.float32, torch.float16, torch.bfloat16),
    torch.float32: (torch.float16, torch.bfloat16),
    torch.float16: (torch.bfloat16,),
    torch.bfloat16: (),
}


def right_answer(
    call: Call, keep: Tensor | None = None, converted: bool = False, dtype: torch.dtype | None = None
) -> Right:
    """Return the right answer to a call, with its bounds.

    keep: the dropout keep mask of the judged run, (B, H, >= sq, >= sk) bool, if dropout_p > 0
    converted: the kernel computes bf16 as scaled fp16 (docs/exactness.md)
    dtype: take the bounds of a computation in this dtype instead of the call's
    """
    exact = oracle.answer(call.fn, call.args, call.dout, keep)
    call = call if dtype is None else call.of_dtype(dtype)
    plain = oracle.plain(call.fn, call.args, call.dout, keep).parts
    # The error of exp where its result is subnormal: 0, or a number with few digits.
    lost = torch.finfo(torch.promote_types(call.dtype, torch.float32)).smallest_normal + CONVERTED * converted
    names = ("out", *(f"d{name}" for name in exact.grads))
    found = {name: _bounds(name, plain[name], exact, lost, 1 - call.dropout_p) for name in names}
    return Right(call, exact, found, bool(exact.tainted.any()))


def _bounds(name: str, plain: Tensor, exact: Truth, lost: float, kept: float) -> Tensor:
    """Return a bound for each (sequence, head), in proportion to the sums of that sequence and head.

    lost: the absolute error allowed in each probability; times the largest dP, the error allowed in each dS
    kept: the share of probabilities that dropout keeps: kernels divide rounded probabilities by it
    """
    of, eps = name.removeprefix("d"), torch.finfo(plain.dtype).eps
    # Where the plain computation overflows, its error does not widen the bound.
    plain_errors = _errors(plain, exact.parts[name], plain.dtype).nan_to_num(nan=0.0, posinf=0.0)
    size, spacing = exact.magnitudes[of], exact.spacings[of] / kept
    if plain.dtype in (torch.float32, torch.float64):
        # In fp32 and fp64, scores are rounded in the same dtype, so that large scores make probabilities less exact.
        size = size * (2 + exact.magnitudes["score"].unflatten(1, (size.shape[1], -1)).amax(2))
    largest_dP = exact.magnitudes["dP"].unflatten(1, (size.shape[1], -1)).amax(2) if name in ("dq", "dk") else 1.0
    floor = eps * size + _smallest(plain.dtype) * (1 + spacing) + lost * spacing * largest_dP
    times, floors = OUT if name == "out" else GRADIENT
    if plain.dtype is torch.float64:
        floors *= 2
    return times * worst(name, plain_errors, exact.tokens)[:-1] + floors * floor


def _smallest(dtype: torch.dtype) -> float:
    """Return the spacing of the dtype's subnormal numbers."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def against_fp64(right: Right, got: Answer, device: str = "cpu", approximate: bool = False) -> list[Check]:
    """Check every quantity of an answer against fp64, bounded by the error of the plain computation.

    got: the answer, on the device of the right one; device: the type of device that computed it
    approximate: allow exp and tanh as inexact as flash-attn's
    """
    exact, dtype, parts, checks = right.exact, right.call.dtype, got.parts, []
    softcap = float(right.call.args.get("softcap", 0.0))
    for name, expected in exact.parts.items():
        mine = parts.get(name)
        if mine is None or mine.shape != expected.shape:
            # The call may return no LSE.
            checks += [] if mine is None and name == "softmax_lse" else [_other_form(name, mine, expected, "fp64")]
        elif name in CACHES:
            checks.append(_cache_check(right.call, name, mine, expected))
        elif name == "softmax_lse":
            checks.append(_lse_check(right, mine, expected, device, approximate))
        else:
            errors = worst(name, _errors(mine, expected, dtype), exact.tokens)
            if bool(errors[-1].any()):
                checks.append(broken(name, "not 0 outside of all sequences"))
            allowed, of = right.bounds[name], name.removeprefix("d")
            if approximate and softcap > 0:
                # An error of tanh is an error of each score. Kernels keep dS divided by the cap, which may underflow.
                allowed = allowed + 4 * OFFICIAL_TANH * (1 + softcap) * exact.magnitudes[of]
                allowed = allowed + 2 * softcap * _smallest(dtype) * exact.spacings[of]
            checks.append(_worst(name, "fp64", _untainted(right, errors[:-1]), allowed, exact.magnitudes[of]))
    return checks


LARGER = 1.03  # a factor of several bf16 steps, with which all values round differently


def rounded_to(call: Call, got: Answer, again: Callable[[Call], Answer], device: str = "cpu") -> list[torch.dtype]:
    """Return the dtypes, coarser than the call's, that explain the errors by rounding alone.

    The answer must be within their bounds, and its errors must change if q, k and v grow a little: errors of rounding
    do, errors of a mistake hardly do. again: returns the kernel's answer to another call
    """
    near = [dtype for dtype in COARSER[call.dtype]
            if all(check.ok for check in against_fp64(right_answer(call, dtype=dtype), got, device))]  # fmt: skip
    if not near:
        return []
    larger = call.multiplied(LARGER)
    errors = [
        {name: x.double() - right_answer(of).exact.parts[name] for name, x in found.parts.items() if name not in CACHES}
        for of, found in ((call, got), (larger, again(larger)))
    ]
    pairs = [(x.flatten(), errors[1][name].flatten()) for name, x in errors[0].items()]
    return near if all(abs(a @ b) <= 0.5 * a.norm() * b.norm() for a, b in pairs) else []


def _other_form(quantity: str, mine: Tensor | None, expected: Tensor, against: str) -> Check:
    absent = NO_GRADIENT if quantity in GRADIENTS else "missing"
    note = absent if mine is None else f"shape {tuple(mine.shape)}, expected {tuple(expected.shape)}"
    return broken(quantity, note, against)


def _untainted(right: Right, errors: Tensor) -> Tensor:
    """Return the errors, with 0 for each (sequence, head) that has a NaN or infinity in its inputs."""
    if not right.has_tainted:
        return errors
    tainted = right.exact.tainted
    return errors.masked_fill(tainted.repeat_interleave(errors.shape[1] // tainted.shape[1], 1), 0.0)


def _worst(quantity: str, against: str, errors: Tensor, bounds: Tensor, sizes: Tensor) -> Check:
    """Return the check of the worst (sequence, head). A NaN error counts as infinite. sizes: the size of its numbers"""
    if not errors.numel():
        return Check(quantity, against, 0.0, 0.0)
    ratios = torch.where(errors == 0, 0.0, errors / bounds).nan_to_num(nan=torch.inf)
    worst = int(ratios.argmax())
    sequence, head = divmod(worst, errors.shape[1])
    sizes = sizes.expand(errors.shape)
    error, bound, widest_bound, size = torch.stack(
        [errors.flatten()[worst], bounds.flatten()[worst], bounds.nan_to_num(nan=0.0).max(), sizes.flatten()[worst]]
    ).tolist()
    note = ""
    if not bool((ratios <= 1).all()):
        many = f", {int((ratios > 1).sum())} of {errors.numel()} like this" if errors.numel() > 1 else ""
        note = f"error {error:.3e}, allowed {bound:.3e} in sequence {sequence}, head {head}{many}"
    return Check(quantity, against, error, bound, note, widest_bound, size)


def _lse_check(right: Right, mine: Tensor, exact: Tensor, device: str, approximate: bool) -> Check:
    # A NaN in exact marks an undefined LSE, which is not checked.
    apart = difference(mine, exact).masked_fill(exact.isnan(), 0.0)
    errors = worst("softmax_lse", apart, right.exact.tokens)[:-1]
    # An fp64 call may return an fp32 LSE, which gets fp32's bound.
    dtype = mine.dtype if right.call.dtype == torch.float64 else right.call.dtype
    score = right.exact.magnitudes["score"]
    bounds = lse_allowance(dtype, score, device, approximate)
    check = _worst("softmax_lse", "fp64", _untainted(right, errors), bounds, 1 + score)
    if check.ok:
        return check
    natural = difference(mine.double() * math.log(2), exact).masked_fill(exact.isnan(), 0.0)
    errors, near = worst("softmax_lse", natural, right.exact.tokens)[:-1], bounds + 2.0**-12 * (1 + score)
    of_log2 = _worst("softmax_lse", "fp64", _untainted(right, errors), near, 1 + score)
    return replace(check, note=f"{check.note}: {IN_LOG2}") if of_log2.ok else check


def lse_allowance(dtype: torch.dtype, score: Tensor, device: str, approximate: bool) -> Tensor:
    """Return the LSE's bound. score: for each (sequence, head), the largest sum of absolute terms of a score"""
    if dtype == torch.float64:
        return 1e-12 * (1 + score)
    fp32 = 1e-5 + 8 * torch.finfo(torch.float32).eps * score
    if dtype == torch.float32:
        return fp32
    if approximate:
        return OFFICIAL_LSE + fp32
    if device == "cpu":  # PyTorch's half-precision kernels on a CPU use an exp accurate to 2^-14
        return 1e-4 + fp32
    # Kernels round the scaled q to its dtype before the product.
    return 1e-4 + torch.finfo(dtype).eps / 2 * score


def _cache_check(call: Call, name: str, ours: Tensor, right: Tensor) -> Check:
    """Check a cache. Old rows and values are copies, so they must be equal. A rotated key is the sum of two products,
    each rounded, and up to 1.4 times as large as the key.
    """
    if name == "k_cache" and call.args.get("rotary_cos") is not None:
        new = call.args["k"].double().abs().nan_to_num(posinf=0.0).amax((1, 3)).amax(0)
        apart = difference(ours, right)
        errors = apart.amax((0, 1, 3)) if apart.numel() else apart.new_zeros(len(new))
        return _worst(name, "fp64", errors[None], 2 * torch.finfo(call.dtype).eps * new[None], new[None])
    return Check(name, "fp64", 0.0, 0.0) if same(ours, right) else broken(name, "differs from the right cache")


def _errors(ours: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return |ours - right|; 0 where the right number is beyond the dtype's range."""
    return (ours.double() - right).abs().masked_fill(right.abs() > torch.finfo(dtype).max, 0.0)


def difference(got: Tensor, expected: Tensor) -> Tensor:
    """Return |got - expected| in fp64; 0 for the same infinity or two NaNs, infinite where only one is a number."""
    got, expected = got.double(), expected.double()
    apart = torch.where((got == expected) | (got.isnan() & expected.isnan()), 0.0, (got - expected).abs())
    return apart.nan_to_num(nan=torch.inf, posinf=torch.inf)


# ---- form, and flash-attn's recorded answers -------------------------------------------------------------------------


def of_other_form(call: Call, got: Answer, approximate: bool = False) -> list[Check]:
    """Return failed checks of dtypes and of the shape of S_dmask. approximate: an fp64 call's LSE may be fp32"""
    wide = torch.promote_types(call.dtype, torch.float32)
    parts = got.parts if got.s_dmask is None else {**got.parts, "S_dmask": got.s_dmask}
    wrong = []
    for name, mine in parts.items():
        expected = wide if name == "softmax_lse" else call.args[name].dtype if name in CACHES else call.dtype
        if mine.dtype != expected and not (approximate and name == "softmax_lse" and mine.dtype == torch.float32):
            wrong.append(broken(name, f"{mine.dtype} instead of {expected}"))
    if got.s_dmask is not None and tuple(got.s_dmask.shape) != (shape := _s_dmask_shape(call)):
        wrong.append(broken("S_dmask", f"shape {tuple(got.s_dmask.shape)}, expected {shape}"))
    return wrong


def _s_dmask_shape(call: Call) -> tuple[int, ...]:
    if call.dropout_p <= 0:
        return (0,)
    args, tokens, _ = oracle.one_form(call)
    longest = [args.get(f"max_seqlen_{x}", n) for x, n in (("q", args["q"].shape[1]), ("k", args["capacity"]))]
    return (len(tokens.rows), args["q"].shape[-2], *(-(-int(n) // 128) * 128 for n in longest))


def kept_fraction(call: Call, s_dmask: Tensor) -> Check:
    """Check the share of probabilities that dropout kept. It must be within five standard deviations of flash-attn's,
    which is (floor(255 (1 - p)) + 1) / 256.
    """
    parts = [s_dmask[i, :, : sees.shape[0], : sees.shape[1]][:, sees] for i, sees in enumerate(oracle.visible(call))]
    drawn = torch.cat([part.flatten() for part in parts])
    kept = (drawn[drawn != 0] > 0).double()  # a zero probability has lost its sign
    if not kept.numel():
        return Check("kept", "fp64", 0.0, 0.0) if not drawn.numel() else broken("kept", "S_dmask is zero everywhere")
    expected = (math.floor(255 * (1 - call.dropout_p)) + 1) / 256
    deviation = math.sqrt(expected * (1 - expected) / kept.numel())
    return Check("kept", "fp64", abs(kept.mean().item() - expected), 5 * deviation)


def against_official(call: Call, got: Answer, official: Answer) -> list[Check]:
    """Check every quantity of an answer against flash-attn's answer, both on the CPU."""
    eps, tokens, parts, checks = torch.finfo(call.dtype).eps, oracle.one_form(call)[1], got.parts, []
    for name, expected in official.parts.items():
        mine = parts.get(name)
        if mine is None or mine.shape != expected.shape:
            checks += [] if mine is None and name == "softmax_lse" else [_other_form(name, mine, expected, "official")]
            continue
        sizes = worst(name, expected.double().abs().nan_to_num(nan=0.0, posinf=0.0), tokens)
        errors = worst(name, difference(mine, expected), tokens)
        if name == "softmax_lse":  # undefined outside of all sequences
            errors[-1] = 0.0
        roundings, absolute = OFFICIAL.get(name, OFFICIAL_GRADIENT)
        checks.append(_worst(name, "official", errors, roundings * eps * sizes + absolute, sizes))
    return checks
