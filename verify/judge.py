"""How far two answers are apart, and how far they may be. The criteria are flash-attn's own and live only here.

Every (sequence, head) is judged on its own, by bounds in proportion to its own numbers: a head a million times smaller
than its neighbour has to be as right as that one, and a NaN or infinity may spoil no other sequence and no other head.

- Against fp64: the error is at most twice (gradients three times) that of plain PyTorch in the input's dtype, plus one
  rounding (two) of the largest sum of absolute terms, because the plain error of a tiny problem can be zero by luck.
- Against a recorded official answer: the bounds stated beside the recording.
- A (sequence, key head) that was given a NaN or an infinity is left out, and so are results beyond the dtype's range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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


class Cells:
    """A tensor's largest number in each (sequence, head), with a last row for tokens outside of all sequences."""

    def __init__(self, call: Call, device: torch.device | str) -> None:
        """`call` on the CPU, the tensors to come on `device`."""
        args = call.args
        self.owners_q = self.owners_k = None
        if "cu_seqlens" in args or "cu_seqlens_q" in args:
            packed = "cu_seqlens" in args
            cu_q, cu_k = (args["cu_seqlens" if packed else f"cu_seqlens_{x}"].tolist() for x in "qk")
            self.batch = len(cu_q) - 1
            tokens_k = next(args[name].shape[0] for name in ("qkv", "kv", "k") if name in args)
            self.owners_q = self._owners(cu_q, call.q.shape[0]).to(device)
            self.owners_k = self._owners(cu_k, max(tokens_k, cu_k[-1])).to(device)

    def _owners(self, cu: list[int], tokens: int) -> Tensor:
        """(tokens, 1): the sequence of each, the number of sequences for those that belong to none."""
        counts = [cu[0], *(end - start for start, end in itertools.pairwise(cu)), tokens - cu[-1]]
        sequences = torch.tensor([self.batch, *range(self.batch), self.batch])
        return sequences.repeat_interleave(torch.tensor(counts))[:, None]

    def worst(self, x: Tensor, of_keys: bool = False) -> Tensor:
        """(sequences + 1, heads) of (B, S, H, d) or (T, H, d)."""
        return self._by_sequence(_amax(x, -1), self.owners_k if of_keys else self.owners_q)

    def worst_of_lse(self, x: Tensor) -> Tensor:
        """The same of (B, H, S) or (H, T)."""
        return self._by_sequence(x.mT, self.owners_q)

    def _by_sequence(self, x: Tensor, owners: Tensor | None) -> Tensor:
        """x: (B, S, H), or (T, H) with the sequence of each token."""
        if owners is not None:
            return x.new_zeros(self.batch + 1, x.shape[1]).scatter_reduce(0, owners.expand(x.shape), x, "amax")
        x = _amax(x, 1)
        return torch.cat([x, x.new_zeros(1, x.shape[1])])


@dataclass(frozen=True)
class Right:
    """The right answer to a call and, for out, q, k and v by (sequence, head), how far from it one may be."""

    call: Call
    exact: Truth
    bounds: Mapping[str, Tensor]
    cells: Cells
    has_tainted: bool


def right_answer(call: Call, keep: Tensor | None = None, cells: Cells | None = None, converted: bool = False) -> Right:
    """keep: the dropout keep mask of the run that is judged, (B, H, >= sq, >= sk) bool, where dropout_p > 0.

    converted: where bf16 is computed as scaled fp16 (docs/exactness.md)
    """
    cells = cells or Cells(call.to("cpu"), call.q.device)
    exact = oracle.answer(call.fn, call.args, call.dout, keep)
    plain = oracle.plain(call.fn, call.args, call.dout, keep)
    unit = CONVERTED / (1 - call.dropout_p) if converted else 0.0
    return Right(call, exact, bounds(exact, plain, cells, unit), cells, bool(exact.tainted.any()))


def bounds(exact: Truth, plain: Answer, cells: Cells, unit: float = 0.0) -> dict[str, Tensor]:
    """In proportion to what is summed in that head of that sequence, never in another.

    unit: steps of the probabilities, and of dS beside the largest dP, where the dtype's own are smaller
    """
    dtype = plain.out.dtype
    eps = torch.finfo(dtype).eps
    found = {}
    for name in ("out", *exact.grads):
        right, yardstick = (a.out if name == "out" else a.grads[name] for a in (exact, plain))
        # Where the plain computation overflows it says nothing, and the floor has to do.
        plain_errors = _errors(yardstick, right, dtype).nan_to_num(nan=0.0, posinf=0.0)
        size = exact.magnitudes[name]
        if dtype in (torch.float32, torch.float64):
            # Only where scores are computed in the dtype itself does their size add to the error of the probabilities.
            size = size * (2 + exact.magnitudes["score"].unflatten(1, (size.shape[1], -1)).amax(2))
        spacing = _smallest(dtype) * (1 + exact.spacings[name])
        if unit:
            spacing = spacing + unit * exact.spacings[name] * (_largest_dP(exact, name) if name in ("q", "k") else 1.0)
        times, floor = OUT if name == "out" else GRADIENT
        found[name] = times * cells.worst(plain_errors, name in ("k", "v"))[:-1] + floor * (eps * size + spacing)
    return found


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
        of_keys, quantity = name in ("k", "v"), name if name == "out" else f"d{name}"
        mine, expected = (a.out if name == "out" else a.grads.get(name) for a in (got, exact))
        assert expected is not None
        if (wrong := _other_shape(quantity, mine, expected)) or mine is None:
            checks.append(wrong or broken(quantity, "missing"))
            continue
        errors = right.cells.worst(_errors(mine, expected, dtype), of_keys)
        if bool(errors[-1].any()):
            checks.append(broken(quantity, "not 0 outside of all sequences"))
        allowed = right.bounds[name]
        if approximate and (softcap := float(right.call.args.get("softcap", 0.0))) > 0:
            # Each score is off by as much as its tanh, and so is the LSE; dS is kept divided by the cap.
            allowed = allowed + 4 * OFFICIAL_TANH * (1 + softcap) * exact.magnitudes[name]
            allowed = allowed + 2 * softcap * _smallest(dtype) * exact.spacings[name]
        checks.append(_worst(quantity, "fp64", _untainted(right, errors[:-1], of_keys), allowed))
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


def _untainted(right: Right, errors: Tensor, of_keys: bool = False) -> Tensor:
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
    errors = right.cells.worst_of_lse(_difference(mine, exact).masked_fill(exact.isnan(), 0.0))[:-1]
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


def _amax(x: Tensor, dim: int) -> Tensor:
    return x.amax(dim) if x.shape[dim] else x.sum(dim)


# ---- form, and what flash-attn itself answered -----------------------------------------------------------------------


def of_other_form(call: Call, got: Answer, approximate: bool = False) -> list[Check]:
    """Shapes and dtypes, of which nothing needs a number. approximate: the LSE of an fp64 call may be fp32."""
    args, q = call.args, call.q
    q_shape = q.shape if "q" in args else (*q.shape[:-3], *q.shape[-2:])
    nheads = q_shape[-2]
    value_dim = next(args[name].shape[-1] for name in ("v", "v_cache", "kv", "qkv") if name in args)
    found: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype]] = {
        "out": (got.out, (*q_shape[:-1], value_dim), q.dtype)
    }
    if got.softmax_lse is not None:
        shape = (nheads, q_shape[0]) if len(q_shape) == 3 else (q_shape[0], nheads, q_shape[1])
        lse_dtype = (
            torch.float32
            if approximate and got.softmax_lse.dtype == torch.float32
            else torch.promote_types(q.dtype, torch.float32)
        )
        found["softmax_lse"] = got.softmax_lse, shape, lse_dtype
    if got.s_dmask is not None:
        found["S_dmask"] = got.s_dmask, _s_dmask_shape(call, nheads), q.dtype
    for name, grad in got.grads.items():
        given = next(
            (args[packed].select(-3, 0) for packed in ("qkv", "kv") if name in packed and packed in args), None
        )
        found[f"d{name}"] = grad, tuple((args[name] if given is None else given).shape), q.dtype
    return [
        broken(name, f"{tuple(mine.shape)} {mine.dtype} instead of {tuple(shape)} {dtype}")
        for name, (mine, shape, dtype) in found.items()
        if tuple(mine.shape) != tuple(shape) or mine.dtype != dtype
    ]


def _s_dmask_shape(call: Call, nheads: int) -> tuple[int, ...]:
    args = call.args
    if call.dropout_p <= 0:
        return (0,)
    if "cu_seqlens" in args:
        batch, lengths = len(args["cu_seqlens"]) - 1, (args["max_seqlen"],) * 2
    elif "cu_seqlens_q" in args:
        batch, lengths = len(args["cu_seqlens_q"]) - 1, (args["max_seqlen_q"], args["max_seqlen_k"])
    else:
        seqlen_k = next(args[name].shape[1] for name in ("k", "kv", "qkv") if name in args)
        batch, lengths = call.q.shape[0], (call.q.shape[1], seqlen_k)
    return (batch, nheads, *(-(-int(n) // 128) * 128 for n in lengths))


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
    eps, cells = torch.finfo(call.dtype).eps, Cells(call, "cpu")

    def measure(quantity: str, mine: Tensor | None, expected: Tensor, epsilons: float, absolute: float = 0.0) -> Check:
        if (wrong := _other_shape(quantity, mine, expected, "official")) or mine is None:
            return wrong or broken(quantity, "missing", "official")
        of_keys, of_lse = quantity in ("dk", "dv"), quantity == "softmax_lse"

        def worst(x: Tensor) -> Tensor:
            return cells.worst_of_lse(x) if of_lse else cells.worst(x, of_keys)

        sizes = worst(expected.double().abs().nan_to_num(nan=0.0, posinf=0.0))
        errors = worst(_difference(mine, expected))
        if of_lse:  # nothing is defined outside of all sequences
            errors[-1] = 0.0
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
