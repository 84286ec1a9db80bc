"""How far two answers are apart, and how far they may be. The criteria are flash-attn's own and live only here.

Every (sequence, head) is judged on its own, by bounds in proportion to its own numbers: a head a million times smaller
than its neighbour has to be as right as that one, and a NaN or infinity may spoil no other sequence and no other head.

- Against fp64: the error is at most twice (gradients three times) that of plain PyTorch in the input's dtype, plus one
  rounding (two) of the largest sum of absolute terms, because the plain error of a tiny problem can be zero by luck.
- Against a recorded official answer: the bounds stated beside the recording.
- A (sequence, key head) that was given a NaN or an infinity is left out, and so are results beyond the dtype's range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verify import oracle
from verify.call import Answer, Call, same
from verify.oracle import Truth

# (times the plain error, times one rounding of the terms)
OUT, GRADIENT = (2.0, 1.0), (3.0, 2.0)
OFFICIAL_OUT_EPSILONS, OFFICIAL_GRADIENT_EPSILONS, OFFICIAL_LSE = 4.0, 8.0, 2e-3
OFFICIAL_TANH = 2.0**-11  # tanh.approx.f32
CONVERTED = 2.0**-36  # probabilities times 2^12, and dS below 2^15, in steps of fp16's 2^-24
CANCELLATION = 64 * torch.finfo(torch.float32).eps  # what flash-attn's fp32 sums leave of a gradient that cancels to 0


@dataclass(frozen=True)
class Check:
    """One quantity of one answer held against one yardstick ("official" or "fp64"), where it is nearest to its bound
    or furthest beyond it.
    """

    quantity: str
    against: str
    error: float
    bound: float
    note: str = ""  # what is wrong, if anything is
    widest_bound: float = 0.0  # error and bound are of the worst (sequence, head); this is the largest bound of all

    @property
    def ok(self) -> bool:
        return self.ratio <= 1

    @property
    def ratio(self) -> float:
        """The error as a multiple of its bound; infinite where one of them is no number."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 and not math.isnan(self.error) else math.inf

    def to_json(self) -> dict[str, Any]:
        """JSON knows no NaN and no infinity: they become text."""
        values = {**asdict(self), "ok": self.ok}
        return {n: str(x) if isinstance(x, float) and not math.isfinite(x) else x for n, x in values.items()}


def broken(quantity: str, note: str, against: str = "fp64") -> Check:
    """What no number says."""
    return Check(quantity, against, math.inf, 0.0, note)


def worst(x: Tensor, tokens: Sequence[Tensor]) -> Tensor:
    """(sequences + 1, heads) of (B, S, H, d) or (T, H, d): the largest number in each (sequence, head), by the tokens
    of each sequence; in the last row that of tokens outside of all sequences.
    """
    return _by_sequence(x.amax(-1) if x.shape[-1] else x.sum(-1), tokens)


def _by_sequence(x: Tensor, tokens: Sequence[Tensor]) -> Tensor:
    """The same of (B, S, H) or (T, H)."""
    x = x.flatten(0, -2)
    owners = torch.full((len(x), 1), len(tokens), device=x.device)
    for sequence, mine in enumerate(tokens):
        owners[mine.to(x.device)] = sequence
    return x.new_zeros(len(tokens) + 1, x.shape[1]).scatter_reduce(0, owners.expand(x.shape), x, "amax")


@dataclass(frozen=True)
class Right:
    """The right answer to a call and, for out, q, k and v by (sequence, head), how far from it one may be."""

    call: Call
    exact: Truth
    bounds: Mapping[str, Tensor]
    has_tainted: bool

    def tokens(self, name: str) -> Sequence[Tensor]:
        return self.exact.tokens.keys if name in ("k", "v") else self.exact.tokens.rows


def right_answer(call: Call, keep: Tensor | None = None, converted: bool = False) -> Right:
    """keep: the dropout keep mask of the run that is judged, (B, H, >= sq, >= sk) bool, where dropout_p > 0.

    converted: where bf16 is computed as scaled fp16 (docs/exactness.md)
    """
    exact = oracle.answer(call.fn, call.args, call.dout, keep)
    plain = oracle.plain(call.fn, call.args, call.dout, keep)
    right = Right(call, exact, {}, bool(exact.tainted.any()))
    unit = CONVERTED / (1 - call.dropout_p) if converted else 0.0
    return replace(right, bounds={name: _bounds(right, plain, name, unit) for name in ("out", *exact.grads)})


def _bounds(right: Right, plain: Answer, name: str, unit: float) -> Tensor:
    """In proportion to what is summed in that head of that sequence, never in another.

    unit: steps of the probabilities, and of dS beside the largest dP, where the dtype's own are smaller
    """
    exact, dtype = right.exact, right.call.dtype
    eps = torch.finfo(dtype).eps
    expected, yardstick = (a.out if name == "out" else a.grads[name] for a in (exact, plain))
    # Where the plain computation overflows it says nothing, and the floor has to do.
    plain_errors = _errors(yardstick, expected, dtype).nan_to_num(nan=0.0, posinf=0.0)
    size = exact.magnitudes[name]
    if dtype in (torch.float32, torch.float64):
        # Only where scores are computed in the dtype itself does their size add to the error of the probabilities.
        size = size * (2 + exact.magnitudes["score"].unflatten(1, (size.shape[1], -1)).amax(2))
    spacing = _smallest(dtype) * (1 + exact.spacings[name])
    if unit:
        spacing = spacing + unit * exact.spacings[name] * (_largest_dP(exact, name) if name in ("q", "k") else 1.0)
    times, floor = OUT if name == "out" else GRADIENT
    return times * worst(plain_errors, right.tokens(name))[:-1] + floor * (eps * size + spacing)


def _smallest(dtype: torch.dtype) -> float:
    """How far neighbouring numbers below smallest_normal are apart, whatever their size."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _largest_dP(exact: Truth, name: str) -> Tensor:
    """By (sequence, head), key heads for k."""
    heads = exact.spacings[name].shape[1]
    largest: Tensor = exact.magnitudes["dP"].unflatten(1, (heads, -1)).amax(2)
    return largest


def against_fp64(right: Right, got: Answer, device: str = "cpu", approximate: bool = False) -> list[Check]:
    """Every quantity of an answer against the fp64 answer, bounded by the error of the plain computation.

    `got` lies where the right answer does. device: the kind that computed it; approximate: with an exp and a tanh that
    are approximations, as flash-attn's are
    """
    exact, dtype = right.exact, right.call.dtype
    checks = []
    for name in ("out", *exact.grads):
        quantity = name if name == "out" else f"d{name}"
        mine, expected = (a.out if name == "out" else a.grads.get(name) for a in (got, exact))
        assert expected is not None
        if (wrong := _other_shape(quantity, mine, expected)) or mine is None:
            checks.append(wrong or broken(quantity, "missing"))
            continue
        errors = worst(_errors(mine, expected, dtype), right.tokens(name))
        if bool(errors[-1].any()):
            checks.append(broken(quantity, "not 0 outside of all sequences"))
        allowed = right.bounds[name]
        if approximate and (softcap := float(right.call.args.get("softcap", 0.0))) > 0:
            # Each score is off by as much as its tanh, and so is the LSE; dS is kept divided by the cap.
            allowed = allowed + 4 * OFFICIAL_TANH * (1 + softcap) * exact.magnitudes[name]
            allowed = allowed + 2 * softcap * _smallest(dtype) * exact.spacings[name]
        checks.append(_worst(quantity, "fp64", _untainted(right, errors[:-1]), allowed))
    if got.softmax_lse is not None and exact.softmax_lse is not None:
        checks.append(
            _other_shape("softmax_lse", got.softmax_lse, exact.softmax_lse)
            or _lse_check(right, got.softmax_lse, device, approximate)
        )
    return checks + [
        _cache_check(right.call, name, got.caches[name], expected) for name, expected in exact.caches.items()
    ]


def _other_shape(quantity: str, mine: Tensor | None, expected: Tensor, against: str = "fp64") -> Check | None:
    if mine is None or mine.shape == expected.shape:
        return None
    return broken(quantity, f"shape {tuple(mine.shape)}, expected {tuple(expected.shape)}", against)


def _untainted(right: Right, errors: Tensor) -> Tensor:
    """The errors, 0 in a (sequence, head) that was given a NaN or an infinity."""
    if not right.has_tainted:
        return errors
    tainted = right.exact.tainted
    return errors.masked_fill(tainted.repeat_interleave(errors.shape[1] // tainted.shape[1], 1), 0.0)


def _worst(quantity: str, against: str, errors: Tensor, bounds: Tensor) -> Check:
    """Each (sequence, head) on its own: the worst counts. An error that is NaN is one."""
    if not errors.numel():
        return Check(quantity, against, 0.0, 0.0)
    ratios = torch.where(errors == 0, 0.0, errors / bounds).nan_to_num(nan=torch.inf)
    worst = int(ratios.argmax())
    sequence, head = divmod(worst, errors.shape[1])
    error, bound, widest_bound = torch.stack(
        [errors.flatten()[worst], bounds.flatten()[worst], bounds.nan_to_num(nan=0.0).max()]
    ).tolist()
    note = ""
    if not bool((ratios <= 1).all()):
        many = f", {int((ratios > 1).sum())} of {errors.numel()} like this" if errors.numel() > 1 else ""
        note = f"error {error:.3e}, allowed {bound:.3e} in sequence {sequence}, head {head}{many}"
    return Check(quantity, against, error, bound, note, widest_bound=widest_bound)


def _lse_check(right: Right, mine: Tensor, device: str, approximate: bool) -> Check:
    assert right.exact.softmax_lse is not None
    exact = right.exact.softmax_lse
    # NaN: nothing is promised there.
    apart = _difference(mine, exact).masked_fill(exact.isnan(), 0.0)
    errors = _by_sequence(apart.mT, right.exact.tokens.rows)[:-1]
    # An fp32 LSE of an fp64 call is no more than that.
    dtype = mine.dtype if right.call.dtype == torch.float64 else right.call.dtype
    bounds = lse_allowance(dtype, right.exact.magnitudes["score"], device, approximate)
    return _worst("softmax_lse", "fp64", _untainted(right, errors), bounds)


def lse_allowance(dtype: torch.dtype, score: Tensor, device: str, approximate: bool) -> Tensor:
    """`score`: by (sequence, head), the size of the terms behind the largest score."""
    if dtype == torch.float64:
        return 1e-12 * (1 + score)
    fp32 = 1e-5 + 8 * torch.finfo(torch.float32).eps * score
    if dtype == torch.float32:
        return fp32
    if approximate:
        return OFFICIAL_LSE + fp32
    if device == "cpu":  # where PyTorch's kernels for half precision use an exp good to 2^-14
        return 1e-4 + fp32
    # Matrix products on half precision units take the scaled q, rounded to its dtype.
    return 1e-4 + torch.finfo(dtype).eps / 2 * score


def _cache_check(call: Call, name: str, ours: Tensor, right: Tensor) -> Check:
    """Old rows and v are copied, so they are the same. Rotated keys are two products and their sum, each rounded, of
    numbers up to 1.4 times as large: by row and head.
    """
    if name == "k_cache" and call.args.get("rotary_cos") is not None:
        new = call.args["k"].double().abs().nan_to_num(posinf=0.0).amax((1, 3)).amax(0)
        apart = _difference(ours, right)
        errors = apart.amax((0, 1, 3)) if apart.numel() else apart.new_zeros(len(new))
        return _worst(name, "fp64", errors[None], 2 * torch.finfo(ours.dtype).eps * new[None])
    return Check(name, "fp64", 0.0, 0.0) if same(ours, right) else broken(name, "not left as it must be")


def _errors(ours: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """|ours - right|; 0 where the right number is beyond the dtype's range, so that nothing could hold it."""
    return (ours.double() - right).abs().masked_fill(right.abs() > torch.finfo(dtype).max, 0.0)


def _difference(got: Tensor, expected: Tensor) -> Tensor:
    """|got - expected| in fp64; 0 where both are the same infinity or both NaN, infinite where only one is a number."""
    got, expected = got.double(), expected.double()
    apart = torch.where((got == expected) | (got.isnan() & expected.isnan()), 0.0, (got - expected).abs())
    return apart.nan_to_num(nan=torch.inf)


# ---- form, and what flash-attn itself answered -----------------------------------------------------------------------


def of_other_form(call: Call, got: Answer, approximate: bool = False) -> list[Check]:
    """dtypes, and S_dmask's shape, without which nothing can be said. approximate: an fp64 call's LSE may be fp32."""
    q = call.dtype
    found = {"out": got.out, "S_dmask": got.s_dmask, **{f"d{name}": grad for name, grad in got.grads.items()}}
    wrong = [broken(n, f"{x.dtype} instead of {q}") for n, x in found.items() if x is not None and x.dtype != q]
    allowed = {torch.promote_types(q, torch.float32)} | ({torch.float32} if approximate else set())
    if got.softmax_lse is not None and got.softmax_lse.dtype not in allowed:
        wrong.append(broken("softmax_lse", f"{got.softmax_lse.dtype} instead of {max(allowed, key=str)}"))
    if got.s_dmask is not None and tuple(got.s_dmask.shape) != (shape := _s_dmask_shape(call)):
        wrong.append(broken("S_dmask", f"shape {tuple(got.s_dmask.shape)}, expected {shape}"))
    return wrong


def _s_dmask_shape(call: Call) -> tuple[int, ...]:
    if call.dropout_p <= 0:
        return (0,)
    args, tokens, _ = oracle.one_form(call)
    longest = [args.get(f"max_seqlen_{x}", n) for x, n in (("q", args["q"].shape[1]), ("k", args["capacity"]))]
    return (len(tokens.rows), args["q"].shape[-2], *(-(-int(n) // 128) * 128 for n in longest))


def kept_fraction(call: Call, s_dmask: Tensor, slack: float = 0.0) -> Check:
    """The share of kept probabilities against flash-attn's own, (floor(255 (1 - p)) + 1) / 256, within five standard
    deviations and `slack`.
    """
    parts = [s_dmask[i, :, : sees.shape[0], : sees.shape[1]][:, sees] for i, sees in enumerate(oracle.visible(call))]
    drawn = torch.cat([part.flatten() for part in parts])
    kept = (drawn[drawn != 0] > 0).double()  # a probability that underflowed to zero lost its sign
    if not kept.numel():
        return Check("kept", "fp64", 0.0, 0.0) if not drawn.numel() else broken("kept", "S_dmask is zero everywhere")
    expected = (math.floor(255 * (1 - call.dropout_p)) + 1) / 256
    deviation = math.sqrt(expected * (1 - expected) / kept.numel())
    return Check("kept", "fp64", abs(kept.mean().item() - expected), 5 * deviation + slack)


def against_official(call: Call, got: Answer, official: Answer) -> list[Check]:
    """Every quantity of an answer against what flash-attn itself gave, all of it on the CPU."""
    eps, tokens = torch.finfo(call.dtype).eps, oracle.one_form(call)[1]

    def measure(quantity: str, mine: Tensor | None, expected: Tensor, epsilons: float, absolute: float = 0.0) -> Check:
        if (wrong := _other_shape(quantity, mine, expected, "official")) or mine is None:
            return wrong or broken(quantity, "missing", "official")
        sizes, errors = expected.double().abs().nan_to_num(nan=0.0, posinf=0.0), _difference(mine, expected)
        if quantity == "softmax_lse":  # nothing is defined outside of all sequences
            sizes, errors = (_by_sequence(x.mT, tokens.rows)[:-1] for x in (sizes, errors))
        elif quantity in call.caches:
            sizes, errors = (x.amax((1, 3)) for x in (sizes, errors))
        else:
            sizes, errors = (
                worst(x, tokens.keys if quantity in ("dk", "dv") else tokens.rows) for x in (sizes, errors)
            )
        return _worst(quantity, "official", errors, epsilons * eps * sizes + absolute)

    checks = [measure("out", got.out, official.out, OFFICIAL_OUT_EPSILONS)]
    if official.softmax_lse is not None and got.softmax_lse is not None:
        checks.append(measure("softmax_lse", got.softmax_lse, official.softmax_lse, 0.0, OFFICIAL_LSE))
    for name, expected in official.grads.items():
        mine = got.grads.get(name)
        checks.append(measure(f"d{name}", mine, expected, OFFICIAL_GRADIENT_EPSILONS, CANCELLATION))
    for name, expected in official.caches.items():
        checks.append(measure(name, got.caches.get(name), expected, 1.0 if name == "k_cache" else 0.0))
    return checks
