"""Calls that cover the fused kernels' variants: for the GPU checks, and for a sanitizer to watch.

`python -m tests.fused_coverage` compiles them all into the cache, for Turing and for the GPU at hand or --for another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import ahead, append, backward, forward, loader, trial, variants
from flash_attn_compat.backends.fused.variants import BF16, BF16_AS_FP16, FP16, HEAD_DIMS, Kind
from flash_attn_compat.engine import dropout
from flash_attn_compat.engine.append import Append
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result
from verify.call import Answer, Call
from verify.judge import Right, against_fp64, right_answer

_FEATURES = ("local", "alibi", "softcap", "dropout", "paged")


@dataclass(frozen=True)
class Check:
    """One launch, or the launches that belong together, on a tiny problem.

    run: raises AssertionError where verify's judge finds something wrong
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
            yield Check(f"step {label}", partial(_step, kind, place))
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
    call = problem.call
    result = forward.Attention(call, kind, loader.target(place.index), call.q.get_device()).run(call)
    caches = {} if call.seqused_k is None or not few_rows else {"k_cache": call.k, "v_cache": call.v}
    _must_pass(right_of(problem, kind), Answer(result.out, result.softmax_lse, caches=caches))


def _backward(kind: Kind, place: torch.device) -> None:
    """From a right out and LSE."""
    problem = trial.problem(kind, place, few_rows=False, needs_grad=True)
    call = problem.call
    dout = torch.randn((*call.q.shape[:2], call.v.shape[-1]), generator=torch.Generator().manual_seed(3))
    right = right_of(problem, kind, dout.to(call.q.dtype))
    assert right.exact.softmax_lse is not None and right.call.dout is not None
    given, out = (tensor.to(place, call.q.dtype) for tensor in (right.call.dout, right.exact.out))
    lse = right.exact.softmax_lse.nan_to_num(nan=0.0).to(place, torch.float32).contiguous()
    found = Gradients(*map(torch.empty_like, call[:3]))
    backward.Plan(call, given, out, found, kind, loader.target(place.index), True).run(call, given, out, lse, found)
    _must_pass(right, Answer(out, grads=dict(zip("qkv", found))))


def _must_pass(right: Right, answer: Answer) -> None:
    wrong = [check for check in against_fp64(right, answer.to("cpu"), "cuda") if not check.ok]
    assert not wrong, "; ".join(f"{check.quantity}: {check.note}" for check in wrong)


def right_of(problem: trial.Problem, kind: Kind, dout: Tensor | None = None) -> Right:
    """What verify's oracle says of the problem, as a call of the public function for it."""
    call = problem.on_cpu
    window = tuple(-1 if side is None else side for side in (call.mask.left, call.mask.right))
    args: dict[str, Any] = {"q": call.q, "softmax_scale": call.softmax_scale, "window_size": window}
    args |= {"softcap": call.softcap, "alibi_slopes": call.alibi_slopes, "block_table": call.block_table}
    if call.cu_seqlens_q is None:
        args |= {"k_cache": call.k, "v_cache": call.v, "cache_seqlens": call.seqused_k}
        return right_answer(Call("flash_attn_with_kvcache", args), converted=kind.type == BF16_AS_FP16)
    ends = torch.tensor([0, *(part.shape[0] for part in problem.k)]).cumsum(0)
    args |= {"k": call.k, "v": call.v, "cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": ends}
    args |= {"max_seqlen_q": call.max_seqlen_q, "max_seqlen_k": call.max_seqlen_k, "dropout_p": call.dropout_p}
    keep = None
    if call.dropout_p:
        sequences, heads = torch.arange(len(problem.q)), torch.arange(call.nheads)
        rows, keys = (torch.arange(length)[None] for length in (call.max_seqlen_q, call.max_seqlen_k))
        keep = dropout.keep_tile(call.rng_state, call.dropout_p, sequences, heads, rows, keys)
    return right_answer(Call("flash_attn_varlen_func", args, dout), keep, converted=kind.type == BF16_AS_FP16)


def _append(kind: Kind, place: torch.device) -> None:
    def run(call: AttentionCall, new: Append) -> Tensor:
        return append.Plan(call, new, loader.target(place.index)).run(call, new)

    wrong = trial.of_append(trial.problem(kind, place, few_rows=True, needs_grad=False), run)
    assert wrong is None, wrong


def _step(kind: Kind, place: torch.device) -> None:
    def run(call: AttentionCall, new: Append) -> Result:
        target, device = loader.target(place.index), call.q.get_device()
        return forward.Attention(call, kind, target, device, new).run(call, new)

    wrong = trial.of_step(trial.problem(kind, place, few_rows=True, needs_grad=False), run)
    assert wrong is None, wrong


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
