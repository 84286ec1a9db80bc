"""One call on one device, put to anybody who claims to answer it: run, held against what is right, put back."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings

from .call import SHORT, Answer, Call, accepted, same, solve
from .errors import NotSupported
from .implementations import Backend, Implementation
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

# Scores of a whole call beyond which a GPU is faster at the right answers than one core: below it launches cost more.
_SCORES_FOR_A_GPU = 2**18


@dataclass(frozen=True, repr=False)
class Verdict:
    """What came of one implementation: refused with a reason, or served. failures: what is wrong, nothing if right."""

    refused: str = ""
    checks: Sequence[Check] = ()
    errors: Sequence[str] = ()  # beside the checks: what was raised, or written before a refusal
    as_near_as: str = ""  # wrong, but no further off than this dtype, which is coarser than the call's, would be
    right_to: str = ""  # not wrong for somebody else's kernel: an fp64 call answered as well as fp32 can

    def __repr__(self) -> str:
        return f"Verdict(refused={self.refused!r}, ratio={self.ratio:.3g}, failures={self.failures})"

    @property
    def failures(self) -> list[str]:
        return [*self.errors, *(f"{check.quantity}: {check.note}" for check in self.checks if not check.ok)]

    @property
    def ratio(self) -> float:
        """The worst error over its bound."""
        return max((check.ratio for check in self.checks), default=float("inf") if self.errors else 0.0)


class Examination:
    """A call on a device, its tensors and right answers made once for all who are asked."""

    def __init__(self, problem: Problem | Call, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device).type
        if isinstance(problem, Problem) and self.device != "cuda":  # starts on a host must begin with 0
            problem = replace(problem, gap=(0, sum(problem.gap)))
        self.problem = problem
        self.host = host = problem.build() if isinstance(problem, Problem) else problem
        on_host = self.device != "cuda" or (isinstance(problem, Problem) and problem.scores < _SCORES_FOR_A_GPU)
        # What the oracle reads: never what is handed out, which might be written to.
        self.judges = "cpu" if on_host else device
        self.untouched = host if on_host else host.to(device)
        self.call = host.to(device)
        no_bf16 = self.device == "cuda" and settings.capability(self.call.q.device) < (8, 0)
        self.converted = no_bf16 and host.dtype == torch.bfloat16
        self._right: Right | None = None

    # ---- asking ------------------------------------------------------------------------------------------------------

    def ask(self, function: Callable[..., Any]) -> Answer:
        """What the function answers, on the device. Raises what it raises; the caches are put back by `restore`."""
        call = self.call
        answer = solve(function, Call(call.fn, accepted(function, call.args), call.dout))
        if call.dropout_p > 0 and answer.s_dmask is None and not call.args.get("return_attn_probs"):
            # The mask comes from the same call repeated with it; what is judged is this one.
            again = solve(function, Call(call.fn, {**call.args, "return_attn_probs": True}))
            answer = Answer(answer.out, answer.softmax_lse, again.s_dmask, answer.grads, answer.caches)
        return answer

    def checks(self, answer: Answer, approximate: bool = False, nan_shows: bool = False) -> list[Check]:
        """The answer held against fp64, after its form: if that is another, nothing else can be said.

        approximate: with an exp and a tanh as flash-attn's; nan_shows: whether a NaN that is right must be one in out
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

    def coarser(self, who: Implementation, answer: Answer) -> str:
        """The dtype, coarser than the call's, to which it rounds, and does nothing else wrong."""
        if (
            self.call.dtype.itemsize == 2
            or self.call.dropout_p > 0
            or of_other_form(self.call, answer)
            or self.written()
        ):
            return ""

        def again(call: Call) -> Answer:
            larger = Examination(call, self.device)
            with who.serving(larger.call) as function:
                return larger.ask(function).to(self.judges)

        near = rounded_to(self.untouched, answer.to(self.judges), again, self.device)
        return next((SHORT[dtype] for dtype in near), "")

    def as_of_fp32(self, answer: Answer, checks: Sequence[Check]) -> list[Check]:
        """The checks of an answer to an fp64 call, with what fp32 may be off by."""
        here = answer.to(self.judges)
        keep = None if here.s_dmask is None or not self.call.dropout_p else here.s_dmask >= 0
        allowed = right_answer(self.untouched, keep, dtype=torch.float32)
        others = (check for check in checks if check.quantity not in allowed.exact.parts)
        return [*against_fp64(allowed, here, self.device, approximate=True), *others]

    def written(self) -> list[Check]:
        """Inputs that the call only had to read, and wrote to."""
        given, left = self.untouched.args, self.call.args
        readable = [n for n in left.keys() - set(self.call.caches) if isinstance(left[n], Tensor)]
        return [broken(n, "was written to") for n in readable if not same(left[n].to(given[n].device), given[n])]

    def right(self, keep: Tensor | None = None) -> Right:
        """Made once, but under dropout for every mask."""
        if keep is not None:
            return right_answer(self.untouched, keep, self.converted)
        self._right = self._right or right_answer(self.untouched, None, self.converted)
        return self._right

    def restore(self) -> None:
        """Puts the caches back as they were."""
        with contextlib.suppress(RuntimeError):  # a device that failed; what it did is already in the verdict
            for name in self.call.caches:
                self.call.args[name].copy_(self.untouched.args[name])

    def without_lse(self) -> Examination:
        """The same call, asking for the output alone."""
        asked = ("return_attn_probs", "return_softmax_lse")
        args = {name: value for name, value in self.call.args.items() if name not in asked}
        examination = copy.copy(self)
        examination.call = replace(self.call, args=args)
        return examination

    # ---- judging -----------------------------------------------------------------------------------------------------

    def judge(self, backend: str) -> Verdict:
        """Of one of the package's backends."""
        return self.examine(Backend(backend))

    def examine(self, who: Implementation, official: Answer | None = None, twice: bool = False) -> Verdict:
        """Never raises for what it does wrong: an exception is a failure like any other.

        official: what flash-attn itself answered; twice: under dropout, whether the same seed gives the same again
        """
        try:
            with who.serving(self.call) as function:
                answer = self.ask(function)
                again = self.ask(function) if twice and self.call.dropout_p > 0 else None
            if twice and self.call.dropout_p > 0 and answer.s_dmask is None:
                return Verdict(refused="returns no S_dmask, so what it dropped is not known")
            checks = self.checks(answer, who.approximate, self._nan_shows(who))
            if again is not None and answer.s_dmask is not None:
                checks.append(kept_fraction(self.host, answer.s_dmask.cpu()))
                if not same(answer.out, again.out):
                    checks.append(broken("same seed, same mask", "another answer"))
            if official is not None:
                checks += against_official(self.host, answer.to("cpu"), official)
            if all(check.ok for check in checks):
                return Verdict(checks=checks)
            if self.call.dtype == torch.float64 and not (isinstance(who, Backend) or of_other_form(self.call, answer)):
                checks = self.as_of_fp32(answer, checks)
                if all(check.ok for check in checks):
                    return Verdict(checks=checks, right_to=SHORT[torch.float32])
            return Verdict(checks=checks, as_near_as=self.coarser(who, answer))
        except NotSupported as refusal:
            touched = [n for n in self.call.caches if not self._as_it_was(n)]
            return Verdict(refused=str(refusal), errors=[f"{n} was written before the refusal" for n in touched])
        except Exception as error:  # noqa: BLE001  whatever it is, the report must name the problem
            return Verdict(errors=[f"{type(error).__name__}: {error}", *self._device_error()])
        finally:
            self.restore()

    def _as_it_was(self, name: str) -> bool:
        return same(self.call.args[name].to(self.judges), self.untouched.args[name])

    def _device_error(self) -> list[str]:
        """What a failed launch left behind on the device, lest it be blamed on the next backend."""
        try:
            if self.device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            return [f"{type(error).__name__}: {error}"]
        return []

    def _nan_shows(self, who: Implementation) -> bool:
        """Whether a NaN among the scores must be a NaN in out. In v it says nothing of rows that give it weight 0."""
        stray = self.problem.stray if isinstance(self.problem, Problem) else None
        if stray is None or stray[0] == "v" or stray[2] != "nan" or not isinstance(who, Backend):
            return False
        # PyTorch's CPU kernel, also where it stands in for another, answers 0 to a row of fewer than 16 NaN scores.
        return self.device != "cpu" or who.name not in ("sdpa", "torch_efficient")
