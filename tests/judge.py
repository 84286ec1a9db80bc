"""One problem through one backend, judged against the oracle: outputs, LSE, gradients, caches.

The bound is that of flash-attn's own tests: at most twice the error of the plain computation in the input's
dtype (gradients three times), plus a floor of one rounding of the terms that were summed, because the plain
error of a tiny problem can be zero by luck.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import flash_attn_interface
from tests import oracle
from tests.oracle import Answer
from tests.problems import Call, Problem, random_problem

# (times the plain error, times one rounding of the terms)
ALLOWED = {"out": (2.0, 1.0), "q": (3.0, 2.0), "k": (3.0, 2.0), "v": (3.0, 2.0)}


@dataclass
class Verdict:
    """What came of one backend: refused with a reason, or served with the worst error over its bound."""

    refused: str = ""
    ratio: float = 0.0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Result:
    out: Tensor
    lse: Tensor | None
    keep: Tensor | None
    grads: dict[str, Tensor]


class Examination:
    """A problem on a device, its tensors and right answers made once for all backends."""

    def __init__(self, problem: Problem, device: torch.device | str = "cpu") -> None:
        self.problem, self.call = problem, problem.build(device)
        self.device = torch.device(device).type
        self._answers: tuple[Answer, Answer] | None = None

    def judge(self, backend: str) -> Verdict:
        """Never raises for what the backend does wrong: an exception is a failure like any other."""
        saved = {n: self.call.args[n].clone() for n in ("k_cache", "v_cache") if n in self.call.args}
        try:
            with flash_attn_compat.use_backend(backend):
                result, complaints = self._run()
            verdict = Verdict(failures=complaints)
            if not complaints:
                self._compare(result, saved, backend, verdict)
            return verdict
        except flash_attn_compat.BackendNotSupported as refusal:
            touched = [n for n in saved if not _same(self.call.args[n], saved[n])]
            return Verdict(refused=str(refusal), failures=[f"{n} was written before the refusal" for n in touched])
        except Exception as error:  # noqa: BLE001 - whatever it is, the report must name the problem
            complaints = [f"{type(error).__name__}: {error}", *self._device_error()]
            return Verdict(ratio=float("inf"), failures=complaints)
        finally:
            with contextlib.suppress(RuntimeError):  # a device that failed; what it did is already in the verdict
                for name, values in saved.items():
                    self.call.args[name].copy_(values)

    def _device_error(self) -> list[str]:
        """What a failed launch left behind on the device, lest it be blamed on the next backend."""
        try:
            if self.device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            return [f"{type(error).__name__}: {error}"]
        return []

    # ---------------------------------------------------------------- running

    def _run(self) -> tuple[_Result, list[str]]:
        p = self.problem
        returned, args = run(self.call)
        out, lse, s_dmask = _taken_apart(p, returned)
        keep = None
        if p.dropout_p > 0:
            if s_dmask is None:  # the mask comes from the same call repeated with it; what is judged is this one
                again = {**self.call.args, "return_attn_probs": True}
                s_dmask = run(Call(self.call.fn, again, None))[0][2]
            keep = s_dmask >= 0
        grads = {}
        if p.has_gradients:
            names = [n for n in ("q", "k", "v", "kv", "qkv") if n in args]
            found = torch.autograd.grad(out, [args[n] for n in names], self.call.dout)
            grads = dict(zip(names, found, strict=True))
        return _Result(out.detach(), lse, keep, _unpacked(grads)), self._form(out, lse, s_dmask, grads)

    def _form(self, out: Tensor, lse: Tensor | None, s_dmask: Tensor | None, grads: dict[str, Tensor]) -> list[str]:
        """Shapes and dtypes, of which nothing needs a number."""
        p, args = self.problem, self.call.args
        source = args.get("q", args.get("qkv"))
        q_shape = source.shape if "q" in args else (*source.shape[:-3], *source.shape[-2:])
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"out": ((*q_shape[:-1], p.value_dim), source.dtype)}
        got = {"out": out}
        if lse is not None:
            shape = (p.nheads, q_shape[0]) if len(q_shape) == 3 else (q_shape[0], p.nheads, q_shape[1])
            exact_dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
            wanted["softmax_lse"], got["softmax_lse"] = (shape, exact_dtype), lse
        if s_dmask is not None:
            wanted["S_dmask"], got["S_dmask"] = (self._s_dmask_shape(), source.dtype), s_dmask
        for name, grad in grads.items():
            wanted[f"d{name}"], got[f"d{name}"] = (tuple(args[name].shape), source.dtype), grad
        return [
            f"{n}: {tuple(got[n].shape)} {got[n].dtype} instead of {tuple(shape)} {dtype}"
            for n, (shape, dtype) in wanted.items()
            if tuple(got[n].shape) != tuple(shape) or got[n].dtype != dtype
        ]

    def _s_dmask_shape(self) -> tuple[int, ...]:
        p, args = self.problem, self.call.args
        if p.dropout_p <= 0:
            return (0,)
        longest_q = args.get("max_seqlen_q", args.get("max_seqlen", p.seqlens_q[0]))
        longest_k = args.get("max_seqlen_k", args.get("max_seqlen", p.seqlens_k[0]))
        return (len(p.seqlens_q), p.nheads, *(-(-int(n) // 128) * 128 for n in (longest_q, longest_k)))

    # ---------------------------------------------------------------- comparing

    def _compare(self, result: _Result, saved: dict[str, Tensor], backend: str, verdict: Verdict) -> None:
        left_behind = {n: self.call.args[n].clone() for n in saved}
        for name, values in saved.items():
            self.call.args[name].copy_(values)
        exact, plain = self.right_answers(result.keep)
        for name, cache in left_behind.items():
            self._compare_cache(name, cache, exact.caches[name], verdict)
        dtype, eps = result.out.dtype, torch.finfo(result.out.dtype).eps
        names, rows = [], []
        score = exact.magnitudes["score"]
        # Scores are computed in fp32 at least, so only there does their size add to the error of the probabilities.
        terms = 2 + score if dtype in (torch.float32, torch.float64) else torch.ones_like(score)
        for name, ours in {"out": result.out, **result.grads}.items():
            right, yardstick = (a.out if name == "out" else a.grads[name] for a in (exact, plain))
            names.append(name)
            rows += [_error(ours, right), _error(yardstick, right), exact.magnitudes[name] * terms]
        if result.lse is not None:
            rows += [_lse_error(result.lse, exact.softmax_lse), score]
        numbers = torch.stack(rows).tolist()  # the one point that waits for the device
        tiny = torch.finfo(dtype).smallest_normal * eps
        for name in names:
            error, plain_error, size = numbers[:3]
            del numbers[:3]
            times, floor = ALLOWED[name]
            self._note(verdict, name, error, times * plain_error + floor * (eps * size + tiny))
        if result.lse is not None:
            error, size = numbers
            self._note(verdict, "softmax_lse", error, _lse_allowance(backend, dtype, self.device, size))

    def right_answers(self, keep: Tensor | None) -> tuple[Answer, Answer]:
        if keep is None and self._answers is not None:
            return self._answers
        fn, args, dout = self.call.fn, self.call.args, self.call.dout
        answers = oracle.answer(fn, args, dout, keep), oracle.plain(fn, args, dout, keep)
        if keep is None:
            self._answers = answers
        return answers

    def _compare_cache(self, name: str, ours: Tensor, right: Tensor, verdict: Verdict) -> None:
        if name == "k_cache" and self.problem.rotary_dim:
            # Two products and their sum are rounded, of numbers up to 1.4 times as large.
            allowed = 2 * torch.finfo(ours.dtype).eps * self.call.args["k"].double().abs().max()
            apart = (ours.double() - right.double()).abs() > allowed
            wrong = bool((apart | (ours.isnan() != right.isnan())).any())
        else:
            wrong = not _same(ours, right)
        if wrong:
            verdict.ratio = float("inf")
            verdict.failures.append(f"{name} was not left as it must be")

    @staticmethod
    def _note(verdict: Verdict, name: str, error: float, bound: float) -> None:
        ratio = error / bound if bound else (0.0 if error == 0 else float("inf"))
        verdict.ratio = max(verdict.ratio, float("inf") if math.isnan(ratio) else ratio)
        if not error <= bound:
            verdict.failures.append(f"{name}: error {error:.3e}, allowed {bound:.3e}")


def run(call: Call, seed: int = 7) -> tuple[Any, dict[str, Any]]:
    """Makes the call, dropout seeded; returns its result and the arguments, leaves of autograd where one is wanted."""
    args = dict(call.args)
    if call.dout is not None:
        for name in ("q", "k", "v", "kv", "qkv"):
            if name in args:
                args[name] = args[name].detach().requires_grad_()
    torch.manual_seed(seed)
    fn = getattr(flash_attn_interface, call.fn)
    return fn(**args), args


def _taken_apart(p: Problem, returned: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out, softmax_lse, S_dmask) of whatever the function returns."""
    if p.kind == "private_varlen":
        return returned[:3]
    if not p.return_attn_probs:
        return returned, None, None
    return (*returned, None) if p.kind == "kvcache" else returned


def _unpacked(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, grad in grads.items():
        parts = oracle.PACKED.get(name)
        found |= {name: grad} if parts is None else dict(zip(parts, grad.unbind(-3), strict=True))
    return found


def _error(ours: Tensor, right: Tensor) -> Tensor:
    return (ours.double() - right).abs().amax() if ours.numel() else right.new_zeros((), dtype=torch.float64)


def _lse_error(ours: Tensor, right: Tensor) -> Tensor:
    """Largest difference; infinite where only one of them is. NaN in `right`: nothing is promised there."""
    if not ours.numel():
        return right.new_zeros(())
    apart = (ours.double() - right).abs()
    apart = apart.masked_fill((ours == right) | right.isnan(), 0.0)
    return apart.nan_to_num(nan=torch.inf).amax()


def _lse_allowance(backend: str, input_dtype: torch.dtype, device: str, score: float) -> float:
    """`score` is the size of the terms behind the largest score."""
    if backend == "official":  # its tanh and exp are approximations
        return 2e-3
    if input_dtype == torch.float64:
        return 1e-12 * (1 + score)
    fp32 = 1e-5 + 8 * torch.finfo(torch.float32).eps * score
    if input_dtype == torch.float32:
        return fp32
    if device == "cpu":  # where PyTorch's kernels for half precision use an exp good to 2^-14
        return 1e-4 + fp32
    # Matrix products on half precision units take the scaled q, rounded to its dtype.
    return 1e-4 + torch.finfo(input_dtype).eps / 2 * score


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def must_serve(p: Problem, backend: str, device: str = "cpu") -> bool:
    """What a backend may not refuse: the two general ones nothing, `sdpa` on a CPU no plain attention of any mask."""
    if backend in ("reference", "chunked"):
        return True
    plain = p.has_gradients and not p.dropout_p and p.softcap <= 0 and p.value_dim == p.head_dim
    return backend == "sdpa" and device == "cpu" and plain


def judge_first_served(backend: str, kind: str, enough: int = 20) -> tuple[int, list[str]]:
    """Half-precision problems of one kind until a flash backend has served enough: how many, and what was wrong."""
    served, complaints = 0, []
    for seed in range(400):
        problem = random_problem(seed, (kind,), ("float16", "bfloat16"))
        if problem.dropout_p:  # which only the kernel that drew a mask can repeat
            continue
        verdict = Examination(problem).judge(backend)
        complaints += [f"{problem}: {failure}" for failure in verdict.failures]
        served += not verdict.refused
        if served == enough:
            break
    return served, complaints
