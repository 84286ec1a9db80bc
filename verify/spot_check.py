"""Is a timed answer right? The longest and the shortest sequence of a workload, one key head of each, against fp64.

All rows, all keys and all gradients of those, block by block of rows, so that the largest workload fits. The bound is
judge's: twice the error (gradients three times) of the same steps rounded to the input's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verify.contestants import Contestant, Prepared
from verify.judge import GRADIENT, OUT
from verify.workloads import Inputs, Workload, after_append

# Scores of one block of rows, for all query heads of the piece: 128 MiB in fp64.
BLOCK_SCORES = 16 * 2**20
# A dropout mask is found out head_dim keys at a time; where that takes more calls, dropout is left out.
MOST_PROBES = 64
DROPOUT_SEED = 7
# The floors under the bounds: half a unit in the last place of the largest value for half precision, four for fp32,
# where the order of summation alone makes that difference; and of fp32 sums that cancel to zero, for values around 1.
ROUNDINGS, CANCELLATION = {2: 0.5, 4: 4.0, 8: 32.0}, 64.0
QUANTITIES = ("out", "dq", "dk", "dv")


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


@dataclass(frozen=True)
class Solution:
    """(group, seqlen_q, head_dim) out and dq, (seqlen_k, head_dim) dk and dv, and the largest |softmax_lse|."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    largest_lse: float


def pieces(workload: Workload) -> list[Piece]:
    order = sorted(range(workload.batch), key=lambda index: workload.seqlens_k[index])
    both = (Piece(order[-1], workload.nheads_k - 1), Piece(order[0], 0))
    return list(dict.fromkeys(both))


class Truth:
    """The fp64 answers and the plain ones of a workload's pieces, computed once for all contestants.

    given: what the contestants get; inputs: what attention meets, once new keys are appended and rotated.
    """

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        self.workload, self.given, self.inputs = workload, inputs, after_append(workload, inputs)
        self._without_dropout: dict[Piece, tuple[Solution, Solution]] = {}

    def of(self, piece: Piece, kept: Tensor | None) -> tuple[Solution, Solution]:
        """Exact and plain. kept is the piece's dropout mask in the run in question, None without dropout."""
        if kept is not None:
            return self._solve(piece, kept)
        if piece not in self._without_dropout:
            self._without_dropout[piece] = self._solve(piece, None)
        return self._without_dropout[piece]

    def _solve(self, piece: Piece, kept: Tensor | None) -> tuple[Solution, Solution]:
        dtype = self.inputs.q.dtype
        work = torch.promote_types(dtype, torch.float32)
        exact = _solve(self.workload, self.inputs, piece, kept, torch.float64, lambda tensor: tensor)
        plain = _solve(self.workload, self.inputs, piece, kept, work, lambda tensor: tensor.to(dtype).to(work))
        return exact, plain


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
            parts.append(_rows(seen, workload, piece))
    return {piece: torch.cat(parts, -1)[..., : workload.seqlens_k[piece.sequence]] for piece, parts in found.items()}


def _fork_rng(inputs: Inputs) -> AbstractContextManager[None]:
    """The generators of the CPU and of the inputs' device, put back afterwards."""
    devices = [inputs.device.index or 0] if inputs.device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices)


def _judge(answer: Sequence[Tensor], truth: Truth, piece: Piece, kept: Tensor | None) -> list[Verdict]:
    workload, inputs = truth.workload, truth.inputs
    dtype = inputs.q.dtype
    exact, plain = truth.of(piece, kept)
    verdicts = []
    for name, whole in zip(QUANTITIES, answer):
        got = _rows(whole, workload, piece) if name in ("out", "dq") else _keys(whole, workload, inputs, piece)
        expected = getattr(exact, name)
        got, yardstick = (tensor.to(expected.device, torch.float64) for tensor in (got, getattr(plain, name)))
        factor, _ = OUT if name == "out" else GRADIENT
        bound = factor * (yardstick - expected).abs().max().item()
        bound += ROUNDINGS[dtype.itemsize] * torch.finfo(dtype).eps * _largest(expected)
        if name != "out":
            # A backward pass computes exp(score - softmax_lse) anew, from fp32 numbers of that size.
            fp32 = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
            bound += (CANCELLATION + exact.largest_lse * _largest(expected)) * fp32
        verdicts.append(Verdict((got - expected).abs().max().item() / bound, name))
    return verdicts


# ---- one piece out of the whole --------------------------------------------------------------------------------------


def _slice(tensor: Tensor, lengths: tuple[int, ...], packed: bool, piece: Piece) -> Tensor:
    """(seqlen, heads, head_dim) of the piece's sequence."""
    length = lengths[piece.sequence]
    if not packed:
        return tensor[piece.sequence, :length]
    start = sum(lengths[: piece.sequence])
    return tensor[start : start + length]


def _rows(tensor: Tensor, workload: Workload, piece: Piece) -> Tensor:
    group = workload.nheads // workload.nheads_k
    heads = slice(piece.head * group, (piece.head + 1) * group)
    return _slice(tensor, workload.seqlens_q, workload.packed, piece)[:, heads].transpose(0, 1)


def _keys(tensor: Tensor, workload: Workload, inputs: Inputs, piece: Piece) -> Tensor:
    if inputs.block_table is not None:
        pages = tensor[inputs.block_table[piece.sequence], :, piece.head]
        return pages.flatten(0, 1)[: workload.seqlens_k[piece.sequence]]
    return _slice(tensor, workload.seqlens_k, workload.packed, piece)[:, piece.head]


# ---- the fp64 answer -------------------------------------------------------------------------------------------------


def _solve(
    workload: Workload,
    inputs: Inputs,
    piece: Piece,
    kept: Tensor | None,
    work: torch.dtype,
    rounded: Callable[[Tensor], Tensor],
) -> Solution:
    """Attention and its gradients by their formulas; `rounded` is applied after every step."""
    # MPS has no fp64.
    device = inputs.device if inputs.device.type == "cuda" else torch.device("cpu")
    q, dout = (_rows(tensor, workload, piece).to(device, work) for tensor in (inputs.q, inputs.dout))
    k, v = (_keys(tensor, workload, inputs, piece).to(device, work) for tensor in (inputs.k, inputs.v))
    group, seqlen_q, head_dim = q.shape
    seqlen_k = len(k)
    scale = head_dim**-0.5
    left, right = workload.bounds
    key = torch.arange(seqlen_k, device=device)
    slopes = keep = None
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes.view(workload.nheads_k, group)[piece.head].to(device, work)[:, None, None]
    if kept is not None:
        keep = kept.to(device)

    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    largest_lse = 0.0
    step = max(1, BLOCK_SCORES // max(1, group * seqlen_k))
    for start in range(0, seqlen_q, step):
        rows = slice(start, min(start + step, seqlen_q))
        position = torch.arange(rows.start, rows.stop, device=device)[:, None] + seqlen_k - seqlen_q
        visible = torch.ones(len(position), seqlen_k, dtype=torch.bool, device=device)
        if left >= 0:
            visible &= key >= position - left
        if right >= 0:
            visible &= key <= position + right
        scores = rounded(rounded(q[:, rows] @ k.T) * scale)
        slope_of_cap = None
        if workload.softcap:
            capped = rounded(torch.tanh(scores / workload.softcap))
            slope_of_cap = 1 - capped * capped
            scores = rounded(capped * workload.softcap)
        if slopes is not None:
            scores = rounded(scores - slopes * (position - key).abs())
        scores = scores.masked_fill(~visible, -torch.inf)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        largest_lse = max(largest_lse, _largest(lse))
        # A row that sees nothing has probability nowhere.
        probabilities = rounded(torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)))
        share = torch.ones((), dtype=work, device=device)
        if keep is not None:
            share = keep[:, rows].to(work) / (1 - workload.dropout_p)
        dropped = rounded(probabilities * share)
        out[:, rows] = rounded(dropped @ v)
        dv += (dropped.transpose(1, 2) @ dout[:, rows]).sum(0)
        dprobabilities = rounded(rounded(dout[:, rows] @ v.T) * share)
        delta = (probabilities * dprobabilities).sum(-1, keepdim=True)
        dscores = rounded(probabilities * (dprobabilities - delta))
        if slope_of_cap is not None:
            dscores = rounded(dscores * slope_of_cap)
        dq[:, rows] = rounded(dscores @ k * scale)
        dk += (dscores.transpose(1, 2) @ q[:, rows]).sum(0) * scale
    return Solution(out, dq, rounded(dk), rounded(dv), largest_lse)


def _largest(values: Tensor) -> float:
    """The largest finite magnitude, 0 for none."""
    finite = values[values.isfinite()].double().abs()
    return finite.max().item() if finite.numel() else 0.0
