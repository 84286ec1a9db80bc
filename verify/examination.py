"""Examine implementations on one call and device: run it, compare the answer with the right one, restore inputs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings

from .call import SHORT, Answer, Call, accepted, said, same, solve
from .errors import NotSupported
from .implementations import Backend, Implementation, declines
from .judge import (
    Check,
    Right,
    against_fp64,
    against_official,
    broken,
    kept_fraction,
    of_other_form,
    right_answer,
    rounded_to,
)
from .problems import Problem

# From this many scores on, the right answer is computed on the GPU; below, launches cost more than one CPU core takes.
_SCORES_FOR_A_GPU = 2**18
# An fp16 answer whose error is a larger multiple of its bound is not tested for rounding to bf16, which gives about 8.
_MOST_OF_BF16 = 64.0


@dataclass(frozen=True, repr=False)
class Verdict:
    """The verdict on one implementation. refused: its reason to decline; failures: its mistakes, empty if right"""

    refused: str = ""
    checks: Sequence[Check] = ()
    errors: Sequence[str] = ()  # exceptions, and writes before a refusal; not in checks
    as_near_as: str = ""  # the coarser dtype within whose bound a wrong answer lies
    right_to: str = ""  # "fp32" if a user's kernel answered an fp64 call within fp32's bound, which counts as right
    ungraded: str = ""  # why a user's kernel gave no gradients, if it was judged without them

    def __repr__(self) -> str:
        return f"Verdict(refused={self.refused!r}, ratio={self.ratio:.3g}, failures={self.failures})"

    @property
    def failures(self) -> list[str]:
        return [*self.errors, *(f"{check.quantity}: {check.note}" for check in self.checks if not check.ok)]

    @property
    def ratio(self) -> float:
        """The largest error / bound."""
        return max((check.ratio for check in self.checks), default=float("inf") if self.errors else 0.0)


class Examination:
    """A call on a device, with its tensors and its right answer, which all implementations share."""

    def __init__(self, problem: Problem | Call, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device).type
        if isinstance(problem, Problem) and self.device != "cuda":  # cu_seqlens on a CPU must begin with 0
            problem = replace(problem, gap=(0, sum(problem.gap)))
        self.problem = problem
        self.host = host = problem.build() if isinstance(problem, Problem) else problem
        on_host = self.device != "cuda" or (isinstance(problem, Problem) and problem.scores < _SCORES_FOR_A_GPU)
        # The right answer is computed from a copy, since a kernel might write to its inputs.
        self.judges = "cpu" if on_host else device
        self.untouched = host if on_host else host.to(device)
        self.call = host.to(device)
        no_bf16 = self.device == "cuda" and settings.capability(self.call.q.device) < (8, 0)
        self.converted = no_bf16 and host.dtype == torch.bfloat16
        self._right: Right | None = None

    # ---- asking ------------------------------------------------------------------------------------------------------

    def ask(self, function: Callable[..., Any], may_lack_gradients: bool = False) -> Answer:
        """Return the function's answer, on the device. Raises its errors. `restore` puts back the caches."""
        call, forgives = self.call, declines if may_lack_gradients else None
        answer = solve(function, Call(call.fn, accepted(function, call.args), call.dout), forgives=forgives)
        if call.dropout_p > 0 and answer.s_dmask is None and not call.args.get("return_attn_probs"):
            # A second call with the same seed returns the dropout mask, by which the first is judged.
            again = solve(function, Call(call.fn, {**call.args, "return_attn_probs": True}))
            answer = Answer(answer.out, answer.softmax_lse, again.s_dmask, answer.grads, answer.caches)
        return answer

    def checks(self, answer: Answer, approximate: bool = False, nan_shows: bool = False) -> list[Check]:
        """Check the answer's form, then compare it with fp64. A wrong form ends the checks.

        approximate: allow exp and tanh as inexact as flash-attn's; nan_shows: where out should be NaN, it must be
        """
        if wrong := of_other_form(self.call, answer, approximate):
            return wrong
        here = answer.to(self.judges)
        keep = None if here.s_dmask is None or not self.call.dropout_p else here.s_dmask >= 0
        right = self.right(keep)
        checks = [*against_fp64(right, here, self.device, approximate), *self.written()]
        if nan_shows and bool((right.exact.out.isnan() & ~here.out.isnan()).any()):
            checks.append(broken("out", "numbers where a NaN went in"))
        return checks

    def coarser(self, implementation: Implementation, answer: Answer, checks: Sequence[Check]) -> str:
        """Return the coarser dtype to which the function rounds, if rounding is its only error; else ""."""
        if self.call.dropout_p > 0 or of_other_form(self.call, answer, implementation.approximate) or self.written():
            return ""
        if self.call.dtype.itemsize == 2 and max(check.ratio for check in checks) > _MOST_OF_BF16:
            return ""

        def again(call: Call) -> Answer:
            larger = Examination(call, self.device)
            with implementation.serving(larger.call) as function:
                return larger.ask(function).to(self.judges)

        near = rounded_to(self.untouched, answer.to(self.judges), again, self.device)
        return next((SHORT[dtype] for dtype in near), "")

    def as_of_fp32(self, answer: Answer, checks: Sequence[Check]) -> list[Check]:
        """Check the answer to an fp64 call with the bounds of an fp32 call."""
        here = answer.to(self.judges)
        keep = None if here.s_dmask is None or not self.call.dropout_p else here.s_dmask >= 0
        allowed = right_answer(self.untouched, keep, dtype=torch.float32)
        others = (check for check in checks if check.quantity not in allowed.exact.parts)
        return [*against_fp64(allowed, here, self.device, approximate=True), *others]

    def written(self) -> list[Check]:
        """Return a failed check for each input, other than caches, that the call wrote to."""
        given, left = self.untouched.args, self.call.args
        readable = [n for n in left.keys() - set(self.call.caches) if isinstance(left[n], Tensor)]
        return [broken(n, "was written to") for n in readable if not same(left[n].to(given[n].device), given[n])]

    def right(self, keep: Tensor | None = None) -> Right:
        """Return the right answer, made once; under dropout, once for each mask."""
        if keep is not None:
            return right_answer(self.untouched, keep, self.converted)
        self._right = self._right or right_answer(self.untouched, None, self.converted)
        return self._right

    def restore(self) -> None:
        """Restore the caches, which calls write to."""
        with contextlib.suppress(RuntimeError):  # the device failed; the verdict already says so
            for name in self.call.caches:
                self.call.args[name].copy_(self.untouched.args[name])

    def without_lse(self) -> Examination:
        """Return this examination for the same call without requests for extra results."""
        asked = ("return_attn_probs", "return_softmax_lse")
        args = {name: value for name, value in self.call.args.items() if name not in asked}
        examination = copy.copy(self)
        examination.call = replace(self.call, args=args)
        return examination

    def without_gradients(self) -> Examination:
        """Return this examination for the same call without a backward."""
        examination = copy.copy(self)
        examination.call, examination._right = replace(self.call, dout=None), None
        examination.untouched, examination.host = (replace(each, dout=None) for each in (self.untouched, self.host))
        return examination

    # ---- judging -----------------------------------------------------------------------------------------------------

    def judge(self, backend: str) -> Verdict:
        """Return the verdict on a backend of the package."""
        return self.examine(Backend(backend))

    def examine(
        self,
        implementation: Implementation,
        official: Answer | None = None,
        twice: bool = False,
        may_lack_gradients: bool = False,
    ) -> Verdict:
        """Run the implementation and return the verdict. An exception that it raises is a failure like any other.

        official: flash-attn's answer; twice: under dropout, also check that the same seed gives the same answer;
        may_lack_gradients: judge an answer without gradients as one of a call without dout
        """
        try:
            with implementation.serving(self.call) as function:
                answer = self.ask(function, may_lack_gradients)
                again = self.ask(function) if twice and self.call.dropout_p > 0 else None
            if may_lack_gradients and answer.ungraded:
                official = official and replace(official, grads={})
                return replace(
                    self.without_gradients().examine(implementation, official, twice), ungraded=answer.ungraded
                )
            if twice and self.call.dropout_p > 0 and answer.s_dmask is None:
                return Verdict(refused="returns no S_dmask, so the dropped probabilities are unknown")
            checks = self.checks(answer, implementation.approximate, self._nan_shows(implementation))
            if again is not None and answer.s_dmask is not None:
                checks.append(kept_fraction(self.host, answer.s_dmask.cpu()))
                if not same(answer.out, again.out):
                    checks.append(broken("same seed, same mask", "another answer"))
            if official is not None:
                checks += against_official(self.host, answer.to("cpu"), official)
            if all(check.ok for check in checks):
                return Verdict(checks=checks)
            if self.call.dtype == torch.float64 and not (
                isinstance(implementation, Backend) or of_other_form(self.call, answer, approximate=True)
            ):
                checks = self.as_of_fp32(answer, checks)
                if all(check.ok for check in checks):
                    return Verdict(checks=checks, right_to=SHORT[torch.float32])
            return Verdict(checks=checks, as_near_as=self.coarser(implementation, answer, checks))
        except NotSupported as refusal:
            touched = [n for n in self.call.caches if not self._as_it_was(n)]
            return Verdict(refused=str(refusal), errors=[f"{n} was written before the refusal" for n in touched])
        except Exception as error:  # noqa: BLE001  for any error, the report must name the problem
            return Verdict(errors=[f"{type(error).__name__}: {said(error)}", *self._device_error()])
        finally:
            self.restore()

    def _as_it_was(self, name: str) -> bool:
        return same(self.call.args[name].to(self.judges), self.untouched.args[name])

    def _device_error(self) -> list[str]:
        """Return the error that a failed launch left on the device, now, so that it does not hit the next backend."""
        try:
            if self.device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            return [f"{type(error).__name__}: {error}"]
        return []

    def _nan_shows(self, implementation: Implementation) -> bool:
        """Whether a NaN in q or k must become NaN in out. One in v need not: a row may give it weight 0."""
        stray = self.problem.stray if isinstance(self.problem, Problem) else None
        if stray is None or stray[0] == "v" or stray[2] != "nan" or not isinstance(implementation, Backend):
            return False
        # PyTorch's CPU kernel, which both backends call there, returns 0 for a row of fewer than 16 NaN scores.
        return self.device != "cpu" or implementation.name not in ("sdpa", "torch_efficient")
