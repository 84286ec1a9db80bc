"""Is a timed answer right? The longest and the shortest sequence of a workload, one key head of each, against fp64.

The last rows of a sequence are a call of their own, since attention is aligned to the bottom right: as many of them are
judged as fp64 has room for. dout is 0 outside of what is looked at, so that dk and dv are of these rows, too. The
oracle and the judge are those of compare. Under dropout each contestant is asked which probabilities it kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verify.call import CACHES, Answer, Call
from verify.contestants import Prepared
from verify.judge import Check, Right, against_fp64, broken, kept_fraction, right_answer
from verify.workloads import Workload

MOST_SCORES = 16 * 2**20  # of a piece, for all its query heads: 128 MiB in fp64
SEED = 7  # before every call: under dropout the mask is the same


@dataclass(frozen=True)
class Piece:
    """The last rows of one sequence, with one key head and the query heads that read it."""

    workload: Workload
    sequence: int
    head: int

    @property
    def rows(self) -> int:
        seqlen_q, seqlen_k = (lengths[self.sequence] for lengths in (self.workload.seqlens_q, self.workload.seqlens_k))
        return min(seqlen_q, max(1, MOST_SCORES // (self.workload.group * max(1, seqlen_k))))

    def of_rows(self, tensor: Tensor) -> Tensor:
        """The piece of what is like q, as (1, rows, group, head_dim). A view."""
        group = self.workload.group
        heads = slice(self.head * group, (self.head + 1) * group)
        tokens = self._tokens(tensor, self.workload.seqlens_q)
        return tokens[len(tokens) - self.rows :, heads][None]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """The piece of what is like k, as (1, seqlen_k, 1, head_dim). A view."""
        return self._tokens(tensor, self.workload.seqlens_k)[:, self.head : self.head + 1][None]

    def _tokens(self, tensor: Tensor, lengths: tuple[int, ...]) -> Tensor:
        start = sum(lengths[: self.sequence]) if self.workload.packed else 0
        tokens = tensor if self.workload.packed else tensor[self.sequence]
        return tokens[start : start + lengths[self.sequence]]


def pieces(workload: Workload) -> list[Piece]:
    """Of the longest and the shortest sequence."""
    order = sorted(range(workload.batch), key=lambda index: workload.seqlens_k[index])
    both = (Piece(workload, order[-1], workload.nheads_k - 1), Piece(workload, order[0], 0))
    return list(dict.fromkeys(both))


def truths(workload: Workload, given: Call) -> dict[Piece, Right]:
    """The right answers to a workload's pieces, computed once for all contestants; none under dropout, since each of
    them draws a mask of its own.
    """
    return {} if workload.dropout_p else {piece: _right(piece, given) for piece in pieces(workload)}


def check(prepared: Prepared, workload: Workload, given: Call, right: Mapping[Piece, Right], backward: bool) -> Check:
    """One call held against `right`: the quantity nearest to its bound, or furthest beyond it."""
    q, k, v = leaves = [tensor.detach().requires_grad_(backward) for tensor in given.qkv]

    def run(v: Tensor) -> Tensor:
        torch.manual_seed(SEED)
        return prepared.run(q, k, v)

    with torch.set_grad_enabled(backward), prepared.around():
        out = run(v)
        if out.shape != given.q.shape:
            return broken("out", f"of shape {tuple(out.shape)}")
        gradients = torch.autograd.grad(out, leaves, _dout(workload, given)) if backward else ()
        keep = _kept(run, workload, v) if workload.dropout_p else {}
    checks = []
    for piece, mask in keep.items():
        found = _right(piece, given, mask)
        # What one byte for each probability makes of p, as in flash-attn, is as good as p itself.
        checks.append(kept_fraction(found.call, torch.where(mask.to(found.call.q.device), 1, -1), slack=1 / 256))
        right = {**right, piece: found}
    for piece, truth in right.items():
        grads = {n: (piece.of_rows if n == "q" else piece.of_keys)(x) for n, x in zip("qkv", gradients)}
        answer = Answer(piece.of_rows(out.detach()), grads=grads).to(truth.exact.out.device)
        # Without the backward only out is there to be judged.
        checks += against_fp64(truth, answer, out.device.type)[: 1 + len(grads)]
    return max(checks, key=lambda found: found.ratio)


def _dout(workload: Workload, given: Call) -> Tensor:
    assert given.dout is not None
    dout = torch.zeros_like(given.dout)
    for piece in pieces(workload):
        piece.of_rows(dout).copy_(piece.of_rows(given.dout))
    return dout


def _kept(run: Callable[[Tensor], Tensor], workload: Workload, v: Tensor) -> dict[Piece, Tensor]:
    """The probabilities that were kept, (1, group, rows, seqlen_k) bool for each piece. Attention is linear in v:
    with v = 1 at one key and channel, and 0 elsewhere, that channel of out is the key's weight, 0 where it was dropped.
    """
    found: dict[Piece, list[Tensor]] = {piece: [] for piece in pieces(workload)}
    for start in range(0, workload.max_seqlen_k, workload.head_dim):
        probe = torch.zeros_like(v)
        for piece in found:
            keys = piece.of_keys(probe)[0, start : start + workload.head_dim, 0]
            keys.copy_(torch.eye(len(keys), workload.head_dim))
        weights = run(probe.requires_grad_(v.requires_grad)).detach()
        for piece, parts in found.items():
            parts.append(piece.of_rows(weights).transpose(1, 2) != 0)
    return {piece: torch.cat(parts, -1)[..., : workload.seqlens_k[piece.sequence]] for piece, parts in found.items()}


# ---- the right answer ------------------------------------------------------------------------------------------------


def _right(piece: Piece, given: Call, keep: Tensor | None = None) -> Right:
    """keep: under dropout, which probabilities were kept."""
    # MPS has no fp64.
    device = given.q.device if given.q.device.type == "cuda" else torch.device("cpu")
    call = _step(piece, given) if piece.workload.decode else _call(piece, given)
    args = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.args.items()}
    dout = None if call.dout is None else call.dout.to(device)
    right = right_answer(Call(call.fn, args, dout), None if keep is None else keep.to(device))
    return replace(right, exact=replace(right.exact, caches={}))  # which are the timed calls' own: not looked at


def _call(piece: Piece, given: Call) -> Call:
    assert given.dout is not None
    args: dict[str, Any] = {name: given.args[name] for name in ("causal", "window_size", "softcap", "dropout_p")}
    args |= {"q": piece.of_rows(given.q), "k": piece.of_keys(given.args["k"]), "v": piece.of_keys(given.args["v"])}
    if piece.workload.alibi:
        args["alibi_slopes"] = given.args["alibi_slopes"].view(-1, piece.workload.group)[piece.head]
    return Call("flash_attn_func", args, piece.of_rows(given.dout))


def _step(piece: Piece, given: Call) -> Call:
    """One sequence's decoding step, its pages in order."""
    one, head = slice(piece.sequence, piece.sequence + 1), [piece.head]
    args = {**given.args, "q": piece.of_rows(given.q), "cache_seqlens": given.args["cache_seqlens"][one]}
    rows: Any = one
    if piece.workload.page_size:
        rows = given.args["block_table"][piece.sequence].long()
        args["block_table"] = torch.arange(len(rows), dtype=torch.int32)[None]
    args |= {name: given.args[name][rows][:, :, head] for name in CACHES}
    args |= {name: given.args[name][one][:, :, head] for name in ("k", "v") if piece.workload.new_keys}
    return Call(given.fn, args)
