"""Is a timed answer right? The longest and the shortest sequence of a workload, one key head of each, against fp64.

All rows, all keys and all gradients of those, by the oracle and the judge, block by block of rows where the mask allows
it, so that the largest workload fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verify import oracle
from verify.call import Answer, Call
from verify.contestants import Contestant, Prepared
from verify.judge import Cells, Right, against_fp64, bounds
from verify.workloads import Inputs, Workload, after_append

# Scores of one block of rows, for all query heads of the piece: 128 MiB in fp64.
BLOCK_SCORES = 16 * 2**20
# A dropout mask is found out head_dim keys at a time; where that takes more calls, dropout is left out.
MOST_PROBES = 64
DROPOUT_SEED = 7


@dataclass(frozen=True)
class Verdict:
    """The error nearest to (or furthest beyond) its bound, as a multiple of it, and which quantity that was."""

    ratio: float
    quantity: str
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0  # False for NaN


@dataclass(frozen=True)
class Piece:
    """One sequence and one key head with the query heads that read it."""

    sequence: int
    head: int


def pieces(workload: Workload) -> list[Piece]:
    order = sorted(range(workload.batch), key=lambda index: workload.seqlens_k[index])
    both = (Piece(order[-1], workload.nheads_k - 1), Piece(order[0], 0))
    return list(dict.fromkeys(both))


class Truth:
    """The right answers to a workload's pieces, computed once for all contestants.

    given: what the contestants get; inputs: what attention meets, once new keys are appended and rotated.
    """

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        self.workload, self.given, self.inputs = workload, inputs, after_append(workload, inputs)
        self._without_dropout: dict[Piece, Right] = {}

    def of(self, piece: Piece, kept: Tensor | None) -> Right:
        """kept: the piece's dropout mask in the run in question, None without dropout."""
        if kept is not None:
            return _right(self.workload, self.inputs, piece, kept)
        if piece not in self._without_dropout:
            self._without_dropout[piece] = _right(self.workload, self.inputs, piece, None)
        return self._without_dropout[piece]


def check(contestant: Contestant, prepared: Prepared, truth: Truth, backward: bool) -> Verdict:
    """One call, held against fp64. Dropout counts with the mask that was drawn."""
    workload, inputs = truth.workload, truth.given
    note = ""
    if workload.dropout_p and -(-workload.max_seqlen_k // workload.head_dim) > MOST_PROBES:
        workload = replace(workload, dropout_p=0.0)
        prepared = contestant.prepare(workload, inputs)
        note = "checked without dropout"
    backward = backward and not prepared.no_backward
    leaves = [tensor.detach().requires_grad_(backward) for tensor in inputs.qkv]
    with torch.set_grad_enabled(backward), prepared.around(), _fork_rng(inputs):
        kept = _dropout_masks(prepared, workload, inputs, leaves) if workload.dropout_p else {}
        torch.manual_seed(DROPOUT_SEED)
        out = prepared.run(*leaves)
        if out.shape != inputs.q.shape:
            return Verdict(math.inf, f"out of shape {tuple(out.shape)}")
        gradients = torch.autograd.grad(out, leaves, inputs.dout) if backward else ()
    answer = (out.detach(), *gradients)
    found = [verdict for piece in pieces(workload) for verdict in _judge(answer, truth, piece, kept.get(piece))]
    worst = max(found, key=lambda verdict: math.inf if math.isnan(verdict.ratio) else verdict.ratio)
    return replace(worst, note=note)


def _dropout_masks(
    prepared: Prepared, workload: Workload, inputs: Inputs, leaves: Sequence[Tensor]
) -> dict[Piece, Tensor]:
    """(group, seqlen_q, seqlen_k) bool of each piece: which probabilities the mask of DROPOUT_SEED keeps.

    A value that is 1 in channel c of key j and else 0 shows the probability of key j in channel c of the output; a
    mask depends on the seed, not on the values. Works for whoever draws from PyTorch's generators.
    """
    q, k, v = leaves
    lengths = workload.seqlens_k if workload.packed else (workload.max_seqlen_k,)
    position = torch.cat([torch.arange(length) for length in lengths]).to(v.device)
    channel = torch.arange(workload.head_dim, device=v.device)
    found: dict[Piece, list[Tensor]] = {piece: [] for piece in pieces(workload)}
    for first in range(0, workload.max_seqlen_k, workload.head_dim):
        one_hot = (position[:, None] == first + channel)[:, None, :].to(v.dtype)
        one_hot = one_hot.expand(v.shape).contiguous().requires_grad_(v.requires_grad)
        torch.manual_seed(DROPOUT_SEED)
        seen = prepared.run(q, k, one_hot).detach() != 0
        for piece, parts in found.items():
            parts.append(_rows(seen, workload, piece).transpose(0, 1))
    return {piece: torch.cat(parts, -1)[..., : workload.seqlens_k[piece.sequence]] for piece, parts in found.items()}


def _fork_rng(inputs: Inputs) -> AbstractContextManager[None]:
    """The generators of the CPU and of the inputs' device, put back afterwards."""
    devices = [inputs.device.index or 0] if inputs.device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices)


def _judge(answer: Sequence[Tensor], truth: Truth, piece: Piece, kept: Tensor | None) -> list[Verdict]:
    workload, inputs = truth.workload, truth.inputs
    right = truth.of(piece, kept)
    device = right.exact.out.device
    out, *grads = (
        (_keys(whole, workload, inputs, piece) if name in "kv" else _rows(whole, workload, piece)).to(device)[None]
        for name, whole in zip(("out", "q", "k", "v"), answer)
    )
    checks = against_fp64(right, Answer(out, grads=dict(zip("qkv", grads))), inputs.device.type)
    wanted = ("out", "dq", "dk", "dv")[: len(answer)]
    return [Verdict(check.ratio, check.quantity) for check in checks if check.quantity in wanted]


# ---- one piece out of the whole --------------------------------------------------------------------------------------


def _slice(tensor: Tensor, lengths: tuple[int, ...], packed: bool, piece: Piece) -> Tensor:
    """(seqlen, heads, head_dim) of the piece's sequence."""
    length = lengths[piece.sequence]
    if not packed:
        return tensor[piece.sequence, :length]
    start = sum(lengths[: piece.sequence])
    return tensor[start : start + length]


def _rows(tensor: Tensor, workload: Workload, piece: Piece) -> Tensor:
    """(seqlen_q, group, head_dim): the query heads of the piece."""
    group = workload.nheads // workload.nheads_k
    return _slice(tensor, workload.seqlens_q, workload.packed, piece)[:, piece.head * group : (piece.head + 1) * group]


def _keys(tensor: Tensor, workload: Workload, inputs: Inputs, piece: Piece) -> Tensor:
    """(seqlen_k, 1, head_dim)"""
    head = slice(piece.head, piece.head + 1)
    if inputs.block_table is not None:
        pages = tensor[inputs.block_table[piece.sequence], :, head]
        return pages.flatten(0, 1)[: workload.seqlens_k[piece.sequence]]
    return _slice(tensor, workload.seqlens_k, workload.packed, piece)[:, head]


# ---- the right answer ------------------------------------------------------------------------------------------------


def _right(workload: Workload, inputs: Inputs, piece: Piece, kept: Tensor | None) -> Right:
    # MPS has no fp64.
    device = inputs.device if inputs.device.type == "cuda" else torch.device("cpu")
    q, dout = (_rows(tensor, workload, piece).to(device)[None] for tensor in (inputs.q, inputs.dout))
    k, v = (_keys(tensor, workload, inputs, piece).to(device)[None] for tensor in (inputs.k, inputs.v))
    seqlen_q, group, seqlen_k = q.shape[1], q.shape[2], k.shape[1]
    options: dict[str, Any] = {"causal": workload.causal, "window_size": workload.window_size}
    options |= {"softcap": workload.softcap, "dropout_p": workload.dropout_p if kept is not None else 0.0}
    if inputs.alibi_slopes is not None:
        options["alibi_slopes"] = inputs.alibi_slopes.view(-1, group)[piece.head].to(device)
    # Rows up to b of a causal problem are a problem of their own with the keys that b sees; so are any rows of one
    # without mask and bias.
    left, last_column = workload.bounds
    by_blocks = last_column == 0 or (left < 0 and last_column < 0 and inputs.alibi_slopes is None)
    step = max(1, BLOCK_SCORES // max(1, group * seqlen_k)) if by_blocks else max(1, seqlen_q)
    blocks: list[tuple[oracle.Truth, oracle.Truth]] = []
    for start in range(0, seqlen_q, step):
        rows = slice(start, min(start + step, seqlen_q))
        keys = slice(0, max(0, rows.stop + seqlen_k - seqlen_q) if last_column == 0 else seqlen_k)
        args = {"q": q[:, rows], "k": k[:, keys], "v": v[:, keys], **options}
        keep = None if kept is None else kept[None, :, rows, keys].to(device)
        both = (solver("flash_attn_func", args, dout[:, rows], keep) for solver in (oracle.answer, oracle.plain))
        exact, plain = (_full_keys(each, seqlen_k) for each in both)
        blocks.append((exact, plain))
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
