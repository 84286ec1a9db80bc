"""Calls that cover the fused kernels' variants: for the GPU checks, and for a sanitizer to watch.

`python -m tests.fused_coverage` compiles them all into the cache, for Turing and for the GPU at hand or --for another.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import ahead, append, backward, forward, loader, trial, variants
from flash_attn_compat.backends.fused.variants import BF16, BF16_AS_FP16, FP16, HEAD_DIMS, Kind
from flash_attn_compat.engine import alibi, dropout
from flash_attn_compat.engine.append import Append
from flash_attn_compat.engine.call import AttentionCall, Gradients
from flash_attn_compat.engine.mask import Range

_FEATURES = ("local", "alibi", "softcap", "dropout", "paged")


@dataclass(frozen=True)
class Check:
    """One launch, or the launches that belong together, on a tiny problem.

    run: raises AssertionError where a sequence's head is off by more than twice what plain arithmetic in that dtype is
    """

    name: str
    run: Callable[[], None]


def checks(place: torch.device, every: bool = False) -> Iterator[Check]:
    """For the architecture that kernels are compiled for on ``place``; every: each variant, which takes long."""
    for kind in kinds(loader.target(place.index).number, every):
        names = "".join(f" {name}" for name in _FEATURES if getattr(kind, name))
        label = f"d{kind.D} type {kind.type} vec {kind.vec}{names}{' narrow' if (kind.window or 256) < 256 else ''}"
        yield Check(f"forward {label}", partial(_forward, kind, place, few_rows=False))
        if not kind.dropout:
            yield Check(f"decode {label}", partial(_forward, kind, place, few_rows=True))
            yield Check(f"append {label}", partial(_append, kind, place))
        if not kind.paged:
            yield Check(f"backward {label}", partial(_backward, kind, place))


def kinds(number: int, every: bool = False) -> Iterator[Kind]:
    """Each feature alone and all together, at each head dim and dtype; every: all combinations."""
    if every:
        yield from variants.kinds(number)
        return
    for D in HEAD_DIMS:
        for type in (FP16, BF16 if number >= 80 else BF16_AS_FP16):
            plain = Kind(number, type, D)
            yield plain
            yield plain._replace(vec=1)
            for name in _FEATURES:
                yield plain._replace(**{name: True}, window=1000 if name == "local" else None)
            yield plain._replace(local=True, window=34)
            yield plain._replace(local=True, alibi=True, softcap=True, dropout=True, window=104)
            yield plain._replace(local=True, alibi=True, softcap=True, paged=True, vec=1, window=104)


def _forward(kind: Kind, place: torch.device, few_rows: bool) -> None:
    problem = trial.problem(kind, place, few_rows, needs_grad=False)
    target, device = loader.target(place.index), problem.call.q.get_device()
    result = forward.Attention(problem.call, kind, target, device).run(problem.call)
    assert result.softmax_lse is not None
    exact, plain = expected(problem), expected(problem, dtype=problem.call.q.dtype)
    outs = result.out if few_rows else _split(result.out, problem.call.cu_seqlens_q)
    for index, (got, right, rough) in enumerate(zip(outs, exact[0], plain[0])):
        _compare(f"out of sequence {index}", got, right, rough, 1)
    lses = result.softmax_lse if few_rows else _split(result.softmax_lse.t(), problem.call.cu_seqlens_q)
    for index, (got, right) in enumerate(zip(lses, exact[1])):
        got = got if few_rows else got.t()
        error = (got.cpu().double() - right).abs().max()
        assert error < 1e-4 * max(1.0, float(right.abs().max())), (
            f"softmax_lse of sequence {index} is off by {error:.2g}"
        )
    if not few_rows:
        assert not result.out[-3:].any(), "tokens outside of all sequences are not 0"


def _backward(kind: Kind, place: torch.device) -> None:
    problem = trial.problem(kind, place, few_rows=False, needs_grad=True)
    call, target = problem.call, loader.target(place.index)
    generator = torch.Generator().manual_seed(3)
    dout = [
        torch.randn((*part.shape[:2], call.v.shape[-1]), generator=generator).to(call.q.dtype) for part in problem.q
    ]
    exact = expected(problem, dout)
    plain = expected(problem, dout, call.q.dtype)
    behind = torch.zeros(3, call.nheads, call.v.shape[-1])
    out = torch.cat([*exact[0], behind]).to(place, call.q.dtype)
    lse = torch.cat([*exact[1], torch.zeros(call.nheads, 3)], dim=1).to(place, torch.float32).contiguous()
    given = torch.cat([*dout, behind.to(call.q.dtype)]).to(place)
    found = Gradients(*map(torch.empty_like, call[:3]))
    backward.Plan(call, given, out, found, kind, target, True).run(call, given, out, lse, found)
    starts = (call.cu_seqlens_q, call.cu_seqlens_k, call.cu_seqlens_k)
    for name, gradient, rights, roughs, cu_seqlens in zip("qkv", found, exact[2:], plain[2:], starts):
        assert not gradient[-3:].any(), f"d{name} outside of all sequences is not 0"
        for index, (got, right, rough) in enumerate(zip(_split(gradient, cu_seqlens), rights, roughs)):
            _compare(f"d{name} of sequence {index}", got, right, rough, 2)


def _append(kind: Kind, place: torch.device) -> None:
    def run(call: AttentionCall, new: Append) -> Tensor:
        return append.Plan(call, new, loader.target(place.index)).run(call, new)

    wrong = trial.of_append(trial.problem(kind, place, few_rows=True, needs_grad=False), run)
    assert wrong is None, wrong


def expected(
    problem: trial.Problem, dout: list[Tensor] | None = None, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], ...]:
    """out (rows, heads, head_dim_v) and the true LSE (heads, rows) of each sequence; then dq, dk, dv for ``dout``.

    dtype: that of the whole computation
    """
    call = problem.on_cpu
    found: tuple[list[Tensor], ...] = ([], [], [], [], [])
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for index, parts in enumerate(zip(problem.q, problem.k, problem.v)):
            leaves = [part.to(dtype).requires_grad_() for part in parts]
            out, lse = _attention(call, index, *leaves)
            found[0].append(out.detach())
            found[1].append(lse.detach())
            if dout is None:
                continue
            for gradients, gradient in zip(found[2:], torch.autograd.grad(out, leaves, dout[index].to(dtype))):
                gradients.append(gradient)
    return found


def _attention(call: AttentionCall, index: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rows, keys, offset = Range(0, q.shape[0]), Range(0, k.shape[0]), k.shape[0] - q.shape[0]
    cpu = torch.device("cpu")
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * call.softmax_scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes[index].to(q.dtype)[:, None, None] * alibi.gap(
            rows, keys, offset, cpu, q.dtype
        )
    hidden = call.mask.hidden(rows, keys, offset, cpu)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    probabilities = torch.exp(scores - lse[..., None])
    if call.dropout_p:
        counted = [torch.arange(size, device=cpu) for size in (q.shape[1], rows.stop, keys.stop)]
        sequence = torch.tensor([index], dtype=torch.int64, device=cpu)
        keep = dropout.keep_tile(
            call.rng_state, call.dropout_p, sequence, counted[0], counted[1][None], counted[2][None]
        )[0]
        probabilities = probabilities * keep.to(q.dtype) / (1.0 - call.dropout_p)
    return torch.einsum("hij,jhd->ihd", probabilities, v), lse


def _compare(what: str, got: Tensor, right: Tensor, plain: Tensor, roundings: float) -> None:
    """Each head by itself: at most twice the plain error, and some roundings of what was summed."""
    for head in range(right.shape[1]):
        mine, exact, rough = got[:, head].cpu().double(), right[:, head], plain[:, head].double()
        allowed = 2 * float((rough - exact).abs().max()) + roundings * torch.finfo(got.dtype).eps * float(
            exact.abs().max()
        )
        error = float((mine - exact).abs().max())
        assert error <= allowed, f"{what}, head {head}: off by {error:.2g}, allowed {allowed:.2g}"


def _split(tensor: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    assert cu_seqlens is not None
    bounds = cu_seqlens.tolist()
    return [tensor[start:stop] for start, stop in itertools.pairwise(bounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", dest="architecture", help="sm_90, say; the GPU's by default")
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args()
    architecture = options.architecture or loader.target(torch.cuda.current_device()).architecture
    wanted = [
        (variant, name)
        for name in dict.fromkeys((architecture, "compute_75"))
        for variant in variants.made_for(kinds(ahead.number(name)))
    ]
    made, errors = ahead.compile_all(wanted, options.jobs)
    print(f"{made} kernels compiled, {len(wanted) - made - len(errors)} were there", *errors, sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
