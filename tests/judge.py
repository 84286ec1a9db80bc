"""One problem through one backend, judged against the oracle: outputs, LSE, gradients, caches.

The bound is that of flash-attn's own tests: at most twice the error of the plain computation in the input's
dtype (gradients three times), plus a floor of one rounding of the terms that were summed, because the plain
error of a tiny problem can be zero by luck.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import flash_attn_interface
from tests import oracle
from tests.oracle import Answer
from tests.problems import WITH_GRADIENTS, Call, Problem, random_problem

# (times the plain error, times one rounding of the terms)
ALLOWED = {"out": (2.0, 1.0), "q": (3.0, 2.0), "k": (3.0, 2.0), "v": (3.0, 2.0)}


@dataclass
class Verdict:
    """What came of one backend: refused with a reason, or served with the worst error over its bound."""

    refused: str = ""
    ratio: float = 0.0
    failures: list[str] = field(default_factory=list)

    def fail(self, complaint: str) -> None:
        self.ratio = float("inf")
        self.failures.append(complaint)

    def note(self, name: str, errors: Tensor, bounds: Tensor) -> None:
        """Each (sequence, head) on its own: the worst counts. An error that is NaN is one."""
        if not errors.numel():
            return
        ratios = torch.where(errors == 0, 0.0, errors / bounds).nan_to_num(nan=torch.inf)
        worst = int(ratios.argmax())
        self.ratio = max(self.ratio, float(ratios.flatten()[worst]))
        if not bool((ratios <= 1).all()):
            sequence, head = divmod(worst, errors.shape[1])
            error, bound = float(errors[sequence, head]), float(bounds[sequence, head])
            many = f", {int((ratios > 1).sum())} of {errors.numel()} like this" if errors.numel() > 1 else ""
            self.failures.append(
                f"{name}: error {error:.3e}, allowed {bound:.3e} in sequence {sequence}, head {head}{many}"
            )


@dataclass(frozen=True)
class _Result:
    out: Tensor
    lse: Tensor | None
    keep: Tensor | None
    grads: dict[str, Tensor]


# Scores of a whole call beyond which a GPU is faster at the right answers than one core: below it launches cost more.
_SCORES_FOR_A_GPU = 2**18


class Examination:
    """A problem on a device, its tensors and right answers made once for all backends."""

    def __init__(self, problem: Problem, device: torch.device | str = "cpu") -> None:
        self.problem = problem
        self.device = torch.device(device).type
        host = problem.build()
        scores = problem.nheads * sum(q * k for q, k in zip(problem.seqlens_q, problem.seqlens_k, strict=True))
        on_host = self.device == "cpu" or scores < _SCORES_FOR_A_GPU
        # What the oracle reads: never what a backend got, which might write into it.
        self.judges = "cpu" if on_host else device
        self.untouched = host if on_host else host.to(device)
        self.call = host.to(device)
        self.cells = Cells(problem, self.judges)
        self._truth: Truth | None = None

    def judge(self, backend: str) -> Verdict:
        """Never raises for what the backend does wrong: an exception is a failure like any other."""
        caches = [n for n in ("k_cache", "v_cache") if n in self.call.args]
        try:
            with flash_attn_compat.use_backend(backend):
                result, complaints = self._run()
            verdict = Verdict(failures=complaints)
            if not complaints:
                self._compare(result, backend, verdict)
            if self.device == "cpu":
                for name in self.call.args.keys() - caches:
                    if not _identical(self.call.args[name], self.untouched.args[name]):
                        verdict.fail(f"{name} was written to")
            return verdict
        except flash_attn_compat.BackendNotSupported as refusal:
            touched = [n for n in caches if not self._as_it_was(n)]
            return Verdict(refused=str(refusal), failures=[f"{n} was written before the refusal" for n in touched])
        except Exception as error:  # noqa: BLE001 - whatever it is, the report must name the problem
            complaints = [f"{type(error).__name__}: {error}", *self._device_error()]
            return Verdict(ratio=float("inf"), failures=complaints)
        finally:
            with contextlib.suppress(RuntimeError):  # a device that failed; what it did is already in the verdict
                for name in caches:
                    self.call.args[name].copy_(self.untouched.args[name])

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
        complaints = self._form(out, lse, s_dmask, grads)
        return _Result(out.detach(), None if lse is None else lse.detach(), keep, _unpacked(grads)), complaints

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

    def _compare(self, result: _Result, backend: str, verdict: Verdict) -> None:
        p = self.problem
        caches = {n: self.call.args[n] for n in ("k_cache", "v_cache") if n in self.call.args}
        found = {"out": result.out, **result.grads, **caches}
        if result.lse is not None:
            found["softmax_lse"] = result.lse
        dtype = result.out.dtype
        found = fetched(found, self.judges)
        truth = self.truth(None if result.keep is None else result.keep.to(self.judges))
        for name in caches:
            self._compare_cache(name, found.pop(name), truth.exact.caches[name], verdict)
        for name, ours in found.items():
            of_keys = name in ("k", "v")
            if name == "softmax_lse":
                assert truth.exact.softmax_lse is not None
                errors = self.cells.worst_of_lse(_lse_errors(ours, truth.exact.softmax_lse))
                bounds = _lse_allowance(backend, dtype, self.device, truth.exact.magnitudes["score"])
            else:
                right, bounds = truth.exact.out if name == "out" else truth.exact.grads[name], truth.bounds[name]
                errors = self.cells.worst(_errors(ours, right, dtype), of_keys)
                if bool(errors[-1].any()):
                    verdict.fail(f"{name}: not 0 outside of all sequences")
                if name == "out" and self._shows_nan(backend) and bool((right.isnan() & ~ours.isnan()).any()):
                    verdict.fail("out: numbers where a NaN went in")
            errors = errors[:-1]
            if truth.has_tainted:
                errors = errors.masked_fill(
                    truth.tainted if of_keys else truth.tainted.repeat_interleave(p.group, 1), 0.0
                )
            verdict.note(name, errors, bounds)

    def _shows_nan(self, backend: str) -> bool:
        """Whether a NaN among the scores must be a NaN in out. In v it says nothing of rows that give it weight 0."""
        stray = self.problem.stray
        if stray is None or stray[0] == "v" or stray[2] != "nan":
            return False
        # PyTorch's CPU kernel, also where it stands in for another, answers 0 to a row of fewer than 16 NaN scores.
        tensor = self.call.args["qkv" if "qkv" in self.call.args else "q"]
        return tensor.device.type != "cpu" or backend not in ("sdpa", "torch_efficient")

    def truth(self, keep: Tensor | None) -> Truth:
        """The right answers and how near to them one must come; made once, but under dropout for every mask."""
        if keep is None and self._truth is not None:
            return self._truth
        fn, args, dout = self.untouched.fn, self.untouched.args, self.untouched.dout
        exact, plain = oracle.answer(fn, args, dout, keep), oracle.plain(fn, args, dout, keep)
        truth = Truth(exact, _bounds(exact, plain, self.cells))
        if keep is None:
            self._truth = truth
        return truth

    def _compare_cache(self, name: str, ours: Tensor, right: Tensor, verdict: Verdict) -> None:
        if name == "k_cache" and self.problem.rotary_dim:
            # Two products and their sum are rounded, of numbers up to 1.4 times as large: by row and head.
            new = self.untouched.args["k"].double().abs().nan_to_num(posinf=0.0).amax((1, 3))
            allowed = 2 * torch.finfo(ours.dtype).eps * new.amax(0)[:, None]
            apart = ((ours.double() - right.double()).abs() > allowed) & (ours != right)
            wrong = bool((apart | (ours.isnan() != right.isnan())).any())
        else:
            wrong = not same(ours, right)
        if wrong:
            verdict.fail(f"{name} was not left as it must be")


class Cells:
    """A tensor's largest number in each (sequence, head), with a last row for tokens outside of all sequences."""

    def __init__(self, p: Problem, device: torch.device | str) -> None:
        self.owners_q = self.owners_k = None
        if "varlen" in p.kind or p.kind == "paged":
            self.batch = len(p.seqlens_q)
            self.owners_q, self.owners_k = (self._owners(p.gap, x).to(device) for x in (p.seqlens_q, p.seqlens_k))

    def _owners(self, gap: tuple[int, int], lengths: tuple[int, ...]) -> Tensor:
        sequences = torch.tensor([self.batch, *range(self.batch), self.batch])
        return sequences.repeat_interleave(torch.tensor([gap[0], *lengths, gap[1]]))[:, None]

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


class Truth:
    """The fp64 answer and, by (sequence, head), how far an answer may be from it."""

    def __init__(self, exact: Answer, bounds: dict[str, Tensor]) -> None:
        assert exact.tainted is not None
        self.exact, self.bounds, self.tainted = exact, bounds, exact.tainted
        self.has_tainted = bool(exact.tainted.any())


def _bounds(exact: Answer, plain: Answer, cells: Cells) -> dict[str, Tensor]:
    """For out, q, k and v: in proportion to what is summed in that head of that sequence, never in another."""
    dtype = plain.out.dtype
    eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    bounds = {}
    for name in ("out", *exact.grads):
        right, yardstick = (a.out if name == "out" else a.grads[name] for a in (exact, plain))
        # Where the plain computation overflows it says nothing, and the floor has to do.
        plain_errors = _errors(yardstick, right, dtype).nan_to_num(nan=0.0, posinf=0.0)
        size = exact.magnitudes[name]
        if dtype in (torch.float32, torch.float64):
            # Only where scores are computed in the dtype itself does their size add to the error of the probabilities.
            size = size * (2 + exact.magnitudes["score"].unflatten(1, (size.shape[1], -1)).amax(2))
        # Neighbouring numbers below smallest_normal are that far apart, whatever their size.
        spacing = smallest * eps * (1 + exact.spacings[name])
        times, floor = ALLOWED[name]
        bounds[name] = times * cells.worst(plain_errors, name in ("k", "v"))[:-1] + floor * (eps * size + spacing)
    return bounds


def run(call: Call, seed: int = 7) -> tuple[Any, dict[str, Any]]:
    """Makes the call, dropout seeded; returns its result and the arguments, leaves of autograd where one is wanted."""
    args = dict(call.args)
    if call.dout is not None:
        for name in ("q", "k", "v", "kv", "qkv"):
            if name in args:
                args[name] = args[name].detach().requires_grad_()
    on_host = args["qkv" if "qkv" in args else "q"].device.type == "cpu"
    # torch.manual_seed takes a millisecond to note, for every GPU that has not been used yet, who called it.
    (torch.default_generator.manual_seed if on_host else torch.manual_seed)(seed)
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


def fetched(found: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """The tensors on another device, in one copy, because each would wait for its own."""
    if all(x.device.type == torch.device(device).type for x in found.values()):
        return found
    together = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in found.values()]).to(device)
    parts = together.split([x.numel() * x.element_size() for x in found.values()])
    # A copy of each part, which then begins where its dtype may begin.
    return {n: part.clone().view(x.dtype).view(x.shape) for (n, x), part in zip(found.items(), parts, strict=True)}


def _errors(ours: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """|ours - right|; 0 where the right number is beyond the dtype's range, so that nothing could hold it."""
    return (ours.double() - right).abs().masked_fill(right.abs() > torch.finfo(dtype).max, 0.0)


def _amax(x: Tensor, dim: int) -> Tensor:
    return x.amax(dim) if x.shape[dim] else x.sum(dim)


def _lse_errors(ours: Tensor, right: Tensor) -> Tensor:
    """The differences; infinite where only one is. NaN in `right`: nothing is promised there."""
    apart = (ours.double() - right).abs()
    apart = apart.masked_fill((ours == right) | right.isnan(), 0.0)
    return apart.nan_to_num(nan=torch.inf)


def _lse_allowance(backend: str, input_dtype: torch.dtype, device: str, score: Tensor) -> Tensor:
    """`score`: by (sequence, head), the size of the terms behind the largest score."""
    if backend == "official":  # its tanh and exp are approximations
        return torch.full_like(score, 2e-3)
    if input_dtype == torch.float64:
        return 1e-12 * (1 + score)
    fp32 = 1e-5 + 8 * torch.finfo(torch.float32).eps * score
    if input_dtype == torch.float32:
        return fp32
    if device == "cpu":  # where PyTorch's kernels for half precision use an exp good to 2^-14
        return 1e-4 + fp32
    # Matrix products on half precision units take the scaled q, rounded to its dtype.
    return 1e-4 + torch.finfo(input_dtype).eps / 2 * score


def _identical(a: Any, b: Any) -> bool:
    return not isinstance(a, Tensor) or torch.equal(a, b) or same(a, b)


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def must_serve(p: Problem, backend: str, device: str = "cpu") -> bool:
    """What a backend may not refuse: the two general ones nothing, `sdpa` on a CPU no plain attention of any mask."""
    if backend in ("reference", "chunked"):
        return True
    plain = p.kind in WITH_GRADIENTS and not p.dropout_p and p.softcap <= 0 and p.value_dim == p.head_dim
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
