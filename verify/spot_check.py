"""Is a timed answer right? The longest and the shortest sequence of a call, one key head of each, against fp64.

Attention is aligned to the bottom right, so the last rows of a sequence are a call of their own: the check takes as
many rows as fp64 has room for. dout is 0 outside of these rows, so dk and dv are of these rows, too. The oracle and the
judge are compare's. The check runs a call with dropout without its dropout; compare judges dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import oracle
from .call import Answer, Call
from .contestants import Prepared
from .judge import Check, Right, against_fp64, broken, right_answer

MOST_SCORES = 16 * 2**20  # scores of a piece, for all its query heads: 128 MiB in fp64


@dataclass(frozen=True)
class Piece:
    """The last rows of one sequence, with one key head and its query heads, as a dense call.

    rows, keys: their indices among all tokens of q, and of k
    """

    call: Call
    rows: Tensor
    keys: Tensor
    heads: slice
    head: slice
    right: Right

    def of_rows(self, x: Tensor) -> Tensor:
        """Return the rows and heads of this spot check from a tensor like q, as (1, rows, group, head_dim)."""
        return _tokens(x)[self.rows, self.heads][None]

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the keys and head of this spot check from a tensor like k, as (1, seqlen_k, 1, head_dim)."""
        return _tokens(x)[self.keys, self.head][None]


def _tokens(x: Tensor) -> Tensor:
    """Return x as (tokens, heads, head_dim), packed or not."""
    return x.flatten(0, -3)


def pieces(given: Call) -> list[Piece]:
    """Yield the pieces of the longest and the shortest sequence, with their right answers. New keys are already rotated
    and appended.
    """
    # MPS has no fp64.
    call = given if given.q.device.type in ("cpu", "cuda") else given.to("cpu")
    args, tokens, _ = oracle.one_form(call, exact=True)
    order = sorted(range(len(tokens.keys)), key=lambda index: len(tokens.keys[index]))
    heads_k = args["k"].shape[-2]
    both = dict.fromkeys([(order[-1], heads_k - 1), (order[0], 0)])
    return [_piece(args, call.dout, tokens.rows[index], tokens.keys[index], head) for index, head in both]


def _piece(args: dict[str, Any], dout: Tensor | None, rows: Tensor, keys: Tensor, head: int) -> Piece:
    q, k, v = (_tokens(args[name]) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    rows = rows[-max(1, MOST_SCORES // (group * max(1, len(keys)))) :]
    heads, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
    mine: dict[str, Any] = {name: args[name] for name in ("causal", "window_size", "softcap") if name in args}
    mine |= {"q": q[rows, heads][None], "k": k[keys, one][None], "v": v[keys, one][None]}
    if args.get("alibi_slopes") is not None:
        mine["alibi_slopes"] = args["alibi_slopes"][heads]
    call = Call("flash_attn_func", mine, None if dout is None else _tokens(dout)[rows, heads][None])
    return Piece(call, rows, keys, heads, one, right_answer(call))


def check(prepared: Prepared, given: Call, judged: Sequence[Piece], backward: bool) -> Check:
    """Check one call: return the worst mistake, or the quantity nearest to its bound."""
    leaves = [tensor.detach().requires_grad_(backward) for tensor in given.qkv]
    with torch.set_grad_enabled(backward), prepared.around():
        out = prepared.run(*leaves)
        if out.shape != given.q.shape:
            return broken("out", f"of shape {tuple(out.shape)}")
        gradients = torch.autograd.grad(out, leaves, _dout(judged, given)) if backward else ()
    checks: list[Check] = []
    for piece in judged:
        grads = {n: (piece.of_rows if n == "q" else piece.of_keys)(x) for n, x in zip("qkv", gradients)}
        answer = Answer(piece.of_rows(out.detach()), grads=grads).to(piece.right.exact.out.device)
        # Without the backward there is only out to judge.
        checks += against_fp64(piece.right, answer, out.device.type)[: 1 + len(grads)]
    return max(checks, key=lambda found: found.gravity)


def _dout(judged: Sequence[Piece], given: Call) -> Tensor:
    assert given.dout is not None
    dout = torch.zeros_like(given.dout, memory_format=torch.contiguous_format)
    for piece in judged:
        _tokens(dout)[piece.rows, piece.heads] = _tokens(given.dout)[piece.rows, piece.heads]
    return dout
