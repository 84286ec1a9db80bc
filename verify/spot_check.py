"""Is a timed answer right? The longest and the shortest sequence of a call, one key head of each, against fp64.

Masks are aligned to the bottom right, so the last rows of a sequence are a call of their own. The check takes as many
of the last rows as MOST_SCORES allows. dout is 0 in all other rows, so that dk and dv depend on these rows alone. The
right answers and bounds are those of compare. Dropout is left out: only compare judges it.
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

MOST_SCORES = 16 * 2**20  # of a piece, with all its query heads: 128 MiB in fp64


@dataclass(frozen=True)
class Piece:
    """The last rows of one sequence, with one key head and its query heads, as a dense call with its right answer.

    rows, keys: the indices of its tokens among all tokens of q, and of k; heads, head: of q, and of k and v
    """

    call: Call
    rows: Tensor
    keys: Tensor
    heads: slice
    head: slice
    right: Right

    def of_rows(self, x: Tensor) -> Tensor:
        """Return this piece's rows and heads of a tensor shaped like q, as (1, rows, group, head_dim)."""
        return _tokens(x)[self.rows, self.heads][None]

    def of_keys(self, x: Tensor) -> Tensor:
        """Return this piece's keys and head of a tensor shaped like k, as (1, seqlen_k, 1, head_dim)."""
        return _tokens(x)[self.keys, self.head][None]


def _tokens(x: Tensor) -> Tensor:
    """Return x as (tokens, heads, head_dim), packed or not."""
    return x.flatten(0, -3)


def pieces(given: Call) -> list[Piece]:
    """Return a piece of the longest and one of the shortest sequence, with their right answers. The keys of a piece
    include new keys, rotated and appended.
    """
    # On the CPU if need be, since MPS has no fp64.
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
    """Make the call and check its pieces. Returns the worst mistake, or the check that is nearest to its bound."""
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
        # Only out, and the gradients if there was a backward.
        checks += against_fp64(piece.right, answer, out.device.type)[: 1 + len(grads)]
    return max(checks, key=lambda found: found.gravity)


def _dout(judged: Sequence[Piece], given: Call) -> Tensor:
    assert given.dout is not None
    dout = torch.zeros_like(given.dout, memory_format=torch.contiguous_format)
    for piece in judged:
        _tokens(dout)[piece.rows, piece.heads] = _tokens(given.dout)[piece.rows, piece.heads]
    return dout
