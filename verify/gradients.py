"""Name the mistake of a backward: compare dq, dk and dv with fp64 and with the results of known mistakes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .call import SHORT, Answer, taken_apart
from .diagnosis import Kernel, Setting, gap, holds_all, which
from .errors import UsageError
from .formulas import moved_heads
from .judge import GRADIENTS, Check, against_fp64, rounded_to

# Relative tolerance within which a factor is recognised.
CLOSE = 1e-3
# A gradient is due to a known mistake if it is this near to the mistake's, relative to that mistake's own error.
LIKE = 2e-2


@dataclass(frozen=True)
class Graded:
    """A kernel's answer, and the checks of its gradients. repeats: each gradient's largest change in a second call"""

    kernel: Kernel
    answer: Answer
    checks: Mapping[str, Check]
    repeats: Mapping[str, float]

    @property
    def grads(self) -> Mapping[str, Tensor]:
        return {name: self.answer.parts[name] for name in GRADIENTS}

    @property
    def wrong(self) -> list[str]:
        return [name for name, check in self.checks.items() if not check.ok]


def graded(kernel: Kernel, setting: Setting) -> Graded:
    """Return the kernel's gradients, checked. Raises UsageError if the kernel raises or gives no gradients"""
    answer, again = _asked(kernel, setting), _asked(kernel, setting)
    found = {check.quantity: check for check in against_fp64(setting.right, answer) if check.quantity in GRADIENTS}
    pairs = {name: (answer.parts[name].nan_to_num(), again.parts[name].nan_to_num()) for name in GRADIENTS}
    return Graded(kernel, answer, found, {name: gap(*pair).max().item() for name, pair in pairs.items()})


def _asked(kernel: Kernel, setting: Setting) -> Answer:
    call = setting.call.to(setting.device)
    assert call.dout is not None
    leaves = dict(zip("qkv", (x.requires_grad_() for x in call.qkv)))
    with torch.enable_grad():
        out = kernel.called(call, leaves)
    if not out.requires_grad:
        raise UsageError(f"{kernel.name} gives no gradients: its output does not depend on q, k and v for autograd")
    try:
        grads = torch.autograd.grad(out, [*leaves.values()], call.dout, allow_unused=True)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise UsageError(f"{kernel.name}'s backward raised {type(error).__name__}: {first_line}") from error
    found = {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), grads)}
    return Answer(out.detach(), grads=taken_apart(found)).to("cpu")


# ---- the results of known mistakes -----------------------------------------------------------------------------------


class Formula:
    """Computes FlashAttention's backward in fp64. A caller can replace each line by a wrong one."""

    def __init__(self, setting: Setting) -> None:
        args, dout = setting.call.args, setting.call.dout
        assert dout is not None
        self.group = args["q"].shape[2] // args["k"].shape[2]
        q, k, v, dout = (x.double().transpose(1, 2) for x in (*setting.call.qkv, dout))
        self.q, self.dout = q, dout
        self.k, self.v = (x.repeat_interleave(self.group, 1) for x in (k, v))
        scale = args.get("softmax_scale")
        self.scale: float = q.shape[-1] ** -0.5 if scale is None else scale
        scores = self.scale * q @ self.k.mT
        self.softcap: float = args.get("softcap") or 0.0
        tanh = torch.tanh(scores / self.softcap) if self.softcap else scores * 0
        self.scores, self.slope = (tanh * self.softcap if self.softcap else scores), 1 - tanh**2
        if (slopes := args.get("alibi_slopes")) is not None:
            row = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
            self.scores = self.scores - slopes.double()[:, None, None] * (row - torch.arange(k.shape[2])).abs()
        self.p = setting.probabilities
        self.dP = dout @ self.v.mT
        self.delta = (self.p * self.dP).sum(-1, keepdim=True)
        self.causal = bool(args.get("causal"))

    def gradients(
        self, p: Tensor | None = None, delta: Tensor | None = None, dS: Tensor | None = None, head: int | None = None
    ) -> dict[str, Tensor]:
        """Return dq, dk, dv as (batch, heads, row, channel). head: the query head of a group that dk, dv count"""
        p = self.p if p is None else p
        if dS is None:
            dS = p * (self.dP - (self.delta if delta is None else delta)) * self.slope
        of_heads = {"dk": self.scale * dS.mT @ self.q, "dv": p.mT @ self.dout}
        grouped = {name: x.unflatten(1, (-1, self.group)) for name, x in of_heads.items()}
        summed = {name: x.sum(2) if head is None else x[:, :, head] for name, x in grouped.items()}
        return {"dq": self.scale * dS @ self.k} | summed

    def mistakes(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the name of each known mistake with the gradients of a backward that makes it."""
        zero = torch.zeros_like(self.delta)
        yield "rowsum(dout * out) is not subtracted from dP (FA2 algorithm 2, line 4)", self.gradients(delta=zero)
        yield "rowsum(dout * out) is added to dP, not subtracted", self.gradients(delta=-self.delta)
        mean = self.dP.mean(-1, keepdim=True)
        yield "the mean of dP is subtracted from dP, not rowsum(dout * out)", self.gradients(delta=mean)
        yield "dP is not multiplied by P (FA2 algorithm 2, line 14)", self.gradients(dS=self.dP - self.delta)
        highest = self.p.amax(-1, keepdim=True)
        unsummed = torch.where(highest > 0, self.p / highest, 0.0)
        yield "P is exp(S - m) and lacks the row sum: the LSE has to be subtracted", self.gradients(p=unsummed)
        undivided = torch.where(highest > 0, self.delta / highest, 0.0)
        yield "rowsum(dout * out) is of an out that is not divided by the row sum", self.gradients(delta=undivided)
        for p in (self.p ** math.log(2), (self.p / highest).nan_to_num() ** math.log(2) * highest):
            yield "exp2 takes scores that lack log2(e), or an LSE that does", self.gradients(p=p)
        if self.softcap:
            yield "the softcap's derivative, 1 - tanh^2, is missing", self.gradients(dS=self.p * (self.dP - self.delta))
        if self.group > 1:
            for head in range(self.group):
                words = "only one query head of each group counts: dk and dv are sums over all of them"
                yield words, self.gradients(head=head)
        if self.causal:
            # The LSE comes from the forward, which had the mask.
            lse = torch.logsumexp(self.scores.masked_fill(self.p == 0, -math.inf), -1, keepdim=True)
            everywhere = torch.exp((self.scores - lse).clamp(max=80.0))
            yield "the backward has no causal mask", self.gradients(p=everywhere)
            top_left = everywhere.tril()
            if self.p.shape[-1] != self.p.shape[-2]:
                yield "the backward's causal mask is aligned to the top left", self.gradients(p=top_left)
            for off in (-1, 1):
                moved = everywhere.tril(self.p.shape[-1] - self.p.shape[-2] + off)
                side = "one key too few" if off < 0 else "one key too many"
                yield f"the backward's causal mask shows {side}", self.gradients(p=moved)

    def parts(self, name: str, tiles: Sequence[slice]) -> list[Tensor]:
        """Return what each key tile adds to dq, or each query tile to dk or dv, as (batch, heads, row, channel)."""
        dS = self.p * (self.dP - self.delta) * self.slope
        if name == "dq":
            return [self.scale * dS[..., tile] @ self.k[:, :, tile] for tile in tiles]
        left, right = (dS * self.scale, self.q) if name == "dk" else (self.p, self.dout)
        added = (left[:, :, tile].mT @ right[:, :, tile] for tile in tiles)
        return [each.unflatten(1, (-1, self.group)).sum(2) for each in added]


# ---- the likely mistake ----------------------------------------------------------------------------------------------


class GradientDiagnosis:
    """Names the mistakes in the gradients of a kernel whose output is right."""

    def __init__(self, found: Graded, setting: Setting) -> None:
        self.found, self.setting = found, setting
        self.formula = Formula(setting)
        self.right = {name: setting.right.exact.parts[name].transpose(1, 2) for name in GRADIENTS}
        self.got = {name: grad.double().transpose(1, 2) for name, grad in found.grads.items()}

    def wrong_places(self, name: str) -> Tensor:
        """Elements off by more than the bound, (batch, heads, row, channel) bool."""
        apart = gap(self.found.grads[name], self.setting.right.exact.parts[name])
        return apart > self.found.checks[name].widest_bound

    def mistake(self, name: str) -> str:
        """Return the mistake in the gradient ``name``, by the first rule that applies."""
        got, right = self.got[name], self.right[name]
        if self.found.repeats[name] > self.found.checks[name].widest_bound:
            return "two calls differ: a race between blocks that add to the same rows, or memory that was not zeroed"
        if self.rounded is not None:
            return f"rounded to {SHORT[self.rounded]} somewhere, and no other mistake"
        if not got.isfinite().all():
            return "NaN or infinity: exp of a masked score, or -inf minus -inf"
        if not got.any():
            return "it is 0 everywhere: never written, or written elsewhere"
        if factor := self._factor(name):
            return factor
        for words, gives in self._mistakes:
            if self._is_like(name, gives[name]):
                return words
        if part := self._of_delta(name):
            return part
        if moved := moved_heads(got, right, self.found.checks[name].widest_bound):
            return moved
        for other in GRADIENTS:
            if other != name and self.right[other].shape == right.shape and self._is_like(name, self.right[other]):
                return f"it has the right values of {other}"
        return self._tile(name) or self._shift(name) or self._place(name)

    def _of_delta(self, name: str) -> str:
        """Name the factor by which rowsum(dout * out) is wrong, if nothing else is wrong; else ""."""
        if name == "dv":
            return ""
        without = self.formula.gradients(delta=torch.zeros_like(self.formula.delta))[name]
        part = without - self.right[name]
        factor = (((without - self.got[name]) * part).sum() / (part * part).sum()).item()
        if not self._is_like(name, without - factor * part):
            return ""
        return f"rowsum(dout * out) is subtracted {factor:.3g} times from dP (FA2 algorithm 2, line 4)"

    def _shift(self, name: str) -> str:
        """Say by how many rows the gradient is moved, if nothing else is wrong; else ""."""
        rows = self.setting.block_rows if name == "dq" else self.setting.block_columns
        for by in (1, -1, rows, -rows):
            moved = self.right[name].roll(by, 2)
            kept = slice(max(by, 0), moved.shape[2] + min(by, 0))
            if moved[:, :, kept].numel() and self._is_like(name, torch.cat(
                [self.got[name][:, :, : kept.start], moved[:, :, kept], self.got[name][:, :, kept.stop :]], 2
            )):  # fmt: skip
                far = "1 row" if abs(by) == 1 else f"{abs(by)} rows"
                return f"each row is written {far} too {'late' if by > 0 else 'early'}"
        return ""

    def _is_like(self, name: str, gives: Tensor) -> bool:
        """Whether the gradient equals ``gives``, a mistake's gradient, which is far from the right one."""
        got, bound = self.got[name], 2 * self.found.checks[name].widest_bound
        largest = max(gives.abs().max().item(), self.right[name].abs().max().item())
        slack = max(bound, 16 * torch.finfo(self.found.grads[name].dtype).eps * largest)
        apart, wrong = (got - gives).abs().max().item(), (self.right[name] - gives).abs().max().item()
        return apart <= slack and apart <= LIKE * wrong

    def _factor(self, name: str) -> str:
        """Name the constant factor of the whole gradient, or ""."""
        got, right = self.got[name], self.right[name]
        factor = ((got * right).sum() / (right * right).sum()).item()
        if abs(factor - 1) < CLOSE or not self._is_like(name, factor * right):
            return ""
        scale, group = self.formula.scale, self.formula.group
        known = {
            scale: "the softmax scale is applied twice",
            1 / scale: "the softmax scale is missing",
            math.log(2): "ln 2 too many: exp2 takes scores times log2(e), gradients do not",
            1 / math.log(2): "ln 2 is missing: the scores are in units of log2(e)",
            -1.0: "the sign is wrong",
            float(group): "it is counted once for each query head of a group",
            1.0 / group: "it is the mean over the query heads of a group, not their sum",
        }
        near = next((words for value, words in known.items() if abs(factor / value - 1) < CLOSE), "")
        return f"all of it is {factor:.4g} times the right value" + (f": {near}" if near else "")

    @functools.cached_property
    def _mistakes(self) -> list[tuple[str, dict[str, Tensor]]]:
        return [*self.formula.mistakes()]

    def _tile(self, name: str) -> str:
        """Name the tiles with a wrong weight, if the gradient is a weighted sum of what the tiles add; else ""."""
        noun, tiles = ("key tile", self.setting.key_tiles) if name == "dq" else ("query tile", self.setting.query_tiles)
        parts = torch.stack([part.flatten() for part in self.formula.parts(name, tiles)])
        products = parts @ parts.mT
        weights = torch.linalg.lstsq(products, parts @ self.got[name].flatten()).solution
        if not self._is_like(name, (weights @ parts).view_as(self.got[name])):
            return ""
        off = [index for index, weight in enumerate(weights.tolist()) if abs(weight - 1) > 10 * CLOSE]
        if not 0 < len(off) < len(tiles):
            return ""
        counted = {0: "is lost", 2: "is counted twice"}
        told = {next((w for value, w in counted.items() if abs(weights[i] - value) < 0.05), "is weighted wrongly")
                for i in off}  # fmt: skip
        which_ones = f"{noun} {off[0]}" if len(off) == 1 else f"{noun}s {', '.join(map(str, off))}"
        return f"the share of {which_ones} {told.pop() if len(told) == 1 else 'is weighted wrongly'}"

    def _place(self, name: str) -> str:
        rows, noun = (
            (self.setting.block_rows, "query tile") if name == "dq" else (self.setting.block_columns, "key tile")
        )
        wrong = [bool(tile.any()) for tile in self.wrong_places(name).split(rows, dim=2)]
        if wrong[-1] and sum(wrong) == 1 and len(wrong) > 1:
            return f"the last {noun}: rows beyond the end counted, or a remainder left out"
        heads = [bool(head.any()) for head in self.wrong_places(name).unbind(1)]
        if not all(wrong):
            return f"not one of the mistakes known here; {which(wrong, noun)}"
        return "not one of the mistakes known here" + ("" if all(heads) else f"; {which(heads, 'head')}")

    @functools.cached_property
    def rounded(self) -> torch.dtype | None:
        """The dtype to which the kernel rounds, if this is its only error; else None."""
        asked = functools.partial(_asked, self.found.kernel)
        near = rounded_to(self.setting.call, self.found.answer, lambda call: asked(self.setting.of(call)))
        wrong = [self.found.grads[name] for name in self.found.wrong]
        held = (dtype for dtype in reversed(near) if all(holds_all(dtype, grad) for grad in wrong))
        return next(held, next(iter(near), None))

    @property
    def sentences(self) -> list[str]:
        """Return a line for each mistake, with the gradients that have it."""
        found: dict[str, list[str]] = {}
        for name in self.found.wrong:
            found.setdefault(self.mistake(name), []).append(name)
        return [f"=> {' and '.join(names)}: {words}" for words, names in found.items()]
