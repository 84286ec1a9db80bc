"""Is a timed answer right? The longest and the shortest sequence of a workload, one key head of each, against fp64.

All rows, all keys and all gradients of those, by the oracle and the judge, block by block of rows where the mask allows
it, so that the largest workload fits. Under dropout each contestant is asked which probabilities it kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verify import oracle
from verify.call import CACHES, Answer, Call
from verify.contestants import Prepared
from verify.judge import Cells, Check, Right, against_fp64, bounds, broken, right_answer
from verify.oracle import keys_visible
from verify.workloads import Workload

# Scores of one block of rows, for all query heads of the piece: 128 MiB in fp64.
BLOCK_SCORES = 16 * 2**20
SEED = 7  # before every call: under dropout the mask is the same


@dataclass(frozen=True)
class Piece:
    """One sequence and one key head with the query heads that read it."""

    sequence: int
    head: int


def pieces(workload: Workload) -> list[Piece]:
    order = sorted(range(workload.batch), key=lambda index: workload.seqlens_k[index])
    both = (Piece(order[-1], workload.nheads_k - 1), Piece(order[0], 0))
    return list(dict.fromkeys(both))


def truths(workload: Workload, given: Call) -> dict[Piece, Right]:
    """The right answers to a workload's pieces, computed once for all contestants; none under dropout, since each of
    them draws a mask of its own.
    """
    if workload.dropout_p:
        return {}
    right = _right_step if workload.decode else _right
    return {piece: right(workload, given, piece) for piece in pieces(workload)}


def check(prepared: Prepared, workload: Workload, given: Call, right: Mapping[Piece, Right], backward: bool) -> Check:
    """One call held against `right`: the quantity nearest to its bound, or furthest beyond it."""
    backward = backward and not prepared.no_backward
    leaves = [tensor.detach().requires_grad_(backward) for tensor in given.qkv]

    q, k, _ = leaves

    def run(v: Tensor) -> Tensor:
        torch.manual_seed(SEED)
        return prepared.run(q, k, v)

    with torch.set_grad_enabled(backward), prepared.around():
        out = run(leaves[2])
        if out.shape != given.q.shape:
            return broken("out", f"of shape {tuple(out.shape)}")
        gradients = torch.autograd.grad(out, leaves, given.dout) if backward else ()
        keep = _kept(run, workload, leaves[2]) if workload.dropout_p else {}
    checks = [_share_kept(workload, piece, mask) for piece, mask in keep.items()]
    right = right or {piece: _right(workload, given, piece, mask) for piece, mask in keep.items()}
    answer = (out.detach(), *gradients)
    checks += [found for piece in right for found in _judged(answer, workload, piece, right[piece])]
    return max(checks, key=lambda found: found.ratio)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def _kept(run: Callable[[Tensor], Tensor], workload: Workload, v: Tensor) -> dict[Piece, Tensor]:
    """The probabilities that were kept, (1, group, seqlen_q, seqlen_k) bool for each piece. Attention is linear in v:
    with v = 1 at one key and channel, and 0 elsewhere, that channel of out is the key's weight, 0 where it was dropped.
    """
    found: dict[Piece, list[Tensor]] = {piece: [] for piece in pieces(workload)}
    for start in range(0, workload.max_seqlen_k, workload.head_dim):
        probe = torch.zeros_like(v)
        for piece in found:
            keys = _keys(probe, workload, piece)[start : start + workload.head_dim, 0]
            keys.copy_(torch.eye(len(keys), workload.head_dim))
        weights = run(probe.requires_grad_(v.requires_grad)).detach()
        for piece, parts in found.items():
            parts.append(_rows(weights, workload, piece).permute(1, 0, 2)[None] != 0)
    return {piece: torch.cat(parts, -1)[..., : workload.seqlens_k[piece.sequence]] for piece, parts in found.items()}


def _share_kept(workload: Workload, piece: Piece, keep: Tensor) -> Check:
    """Within five standard deviations, and what one byte for each probability makes of p, as in flash-attn."""
    p = workload.dropout_p
    visible = keys_visible(keep.shape[2], keep.shape[3], workload.causal, workload.window, keep.device)
    drawn = keep[..., visible].double()
    allowed = 1 / 256 + 5 * math.sqrt(p * (1 - p) / max(1, drawn.numel()))
    return Check("kept", "fp64", abs(drawn.mean().item() - (1 - p)) if drawn.numel() else 0.0, allowed)


def _judged(answer: Sequence[Tensor], workload: Workload, piece: Piece, right: Right) -> list[Check]:
    out, *grads = (
        (_rows if name in ("out", "q") else _keys)(whole, workload, piece)[None].to(right.exact.out.device)
        for name, whole in zip(("out", "q", "k", "v"), answer)
    )
    checks = against_fp64(right, Answer(out, grads=dict(zip("qkv", grads))), answer[0].device.type)
    return [check for check in checks if check.quantity in ("out", "dq", "dk", "dv")[: len(answer)]]


# ---- one piece out of the whole --------------------------------------------------------------------------------------


def _slice(tensor: Tensor, lengths: tuple[int, ...], packed: bool, piece: Piece) -> Tensor:
    """(seqlen, heads, head_dim) of the piece's sequence."""
    length = lengths[piece.sequence]
    start = sum(lengths[: piece.sequence])
    return tensor[start : start + length] if packed else tensor[piece.sequence, :length]


def _rows(tensor: Tensor, workload: Workload, piece: Piece) -> Tensor:
    """(seqlen_q, group, head_dim): the query heads of the piece."""
    heads = slice(piece.head * workload.group, (piece.head + 1) * workload.group)
    return _slice(tensor, workload.seqlens_q, workload.packed, piece)[:, heads]


def _keys(tensor: Tensor, workload: Workload, piece: Piece) -> Tensor:
    """(seqlen_k, 1, head_dim)"""
    return _slice(tensor, workload.seqlens_k, workload.packed, piece)[:, piece.head : piece.head + 1]


# ---- the right answer ------------------------------------------------------------------------------------------------


def _judging_device(given: Call) -> torch.device:
    # MPS has no fp64.
    return given.q.device if given.q.device.type == "cuda" else torch.device("cpu")


def _right_step(workload: Workload, given: Call, piece: Piece) -> Right:
    """Of one sequence's decoding step, its pages in order."""
    device, one, head = _judging_device(given), slice(piece.sequence, piece.sequence + 1), [piece.head]
    args = {**given.args, "q": _rows(given.q, workload, piece)[None], "cache_seqlens": given.args["cache_seqlens"][one]}
    sequence: Any = one
    if workload.page_size:
        sequence = given.args["block_table"][piece.sequence].long()
        args["block_table"] = torch.arange(len(sequence), dtype=torch.int32)[None]
    args |= {name: given.args[name][sequence][:, :, head] for name in CACHES}
    args |= {name: given.args[name][one][:, :, head] for name in ("k", "v") if workload.new_keys}
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in args.items()}
    right = right_answer(Call(given.fn, moved))
    return replace(right, exact=replace(right.exact, caches={}))  # which are the timed calls' own: not looked at


def _right(workload: Workload, given: Call, piece: Piece, keep: Tensor | None = None) -> Right:
    """keep: under dropout, which probabilities were kept."""
    assert given.dout is not None
    device = _judging_device(given)
    q, dout = (_rows(tensor, workload, piece).to(device)[None] for tensor in (given.q, given.dout))
    k, v = (_keys(given.args[name], workload, piece).to(device)[None] for name in "kv")
    seqlen_q, group, seqlen_k = q.shape[1], q.shape[2], k.shape[1]
    options: dict[str, Any] = {name: given.args[name] for name in ("causal", "window_size", "softcap", "dropout_p")}
    if workload.alibi:
        options["alibi_slopes"] = given.args["alibi_slopes"].view(-1, group)[piece.head].to(device)
    # Rows up to b of a causal problem are a problem of their own with the keys that b sees; so are any rows of one
    # without mask and bias.
    left, last_column = workload.bounds
    by_blocks = last_column == 0 or (left < 0 and last_column < 0 and not workload.alibi)
    step = max(1, BLOCK_SCORES // max(1, group * seqlen_k)) if by_blocks else max(1, seqlen_q)
    blocks: list[tuple[oracle.Truth, ...]] = []
    for start in range(0, seqlen_q, step):
        rows = slice(start, min(start + step, seqlen_q))
        keys = slice(0, max(0, rows.stop + seqlen_k - seqlen_q) if last_column == 0 else seqlen_k)
        args = {"q": q[:, rows], "k": k[:, keys], "v": v[:, keys], **options}
        mask = None if keep is None else keep[:, :, rows, keys].to(device)
        both = (solver("flash_attn_func", args, dout[:, rows], mask) for solver in (oracle.answer, oracle.plain))
        blocks.append(tuple(_full_keys(each, seqlen_k) for each in both))
    call = Call("flash_attn_func", {"q": q, "k": k, "v": v}, dout)
    cells = Cells(call, device)
    truth, yardstick = (_together(each) for each in zip(*blocks))
    return Right(call, truth, bounds(truth, yardstick, cells), cells, bool(truth.tainted.any()))


def _full_keys(answer: oracle.Truth, seqlen_k: int) -> oracle.Truth:
    grads = {n: F.pad(x, (0, 0, 0, 0, 0, seqlen_k - x.shape[1])) if n != "q" else x for n, x in answer.grads.items()}
    return replace(answer, softmax_lse=None, grads=grads)


def _together(blocks: Sequence[oracle.Truth]) -> oracle.Truth:
    """Rows of out and dq one after the other, dk and dv summed; the magnitudes are those of the largest block."""
    grads = {n: [block.grads[n] for block in blocks] for n in blocks[0].grads}
    return oracle.Truth(
        out=torch.cat([block.out for block in blocks], 1),
        grads={n: torch.cat(x, 1) if n == "q" else torch.stack(x).sum(0) for n, x in grads.items()},
        magnitudes=_largest([block.magnitudes for block in blocks]),
        spacings=_largest([block.spacings for block in blocks]),
        tainted=torch.stack([block.tainted for block in blocks]).any(0),
    )


def _largest(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in found]).amax(0) for name in found[0]}
