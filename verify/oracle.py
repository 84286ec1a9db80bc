"""The independent answer: what a call of flash_attn means, written out plainly, once, for every public function.

Solved in fp64 it is the truth that answers are held against. Solved in the input's dtype it is the yardstick: the
error that straightforward PyTorch makes on the same problem. Shares no code with the package under test.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verify.problem import CACHES, Answer, Problem


def truth(problem: Problem, dmask: Tensor | None = None) -> Answer:
    """The fp64 answer. With dropout, dmask (S_dmask of the run being judged; negative means dropped) says what was
    dropped.
    """
    oracle = _Oracle(problem, torch.float64, dmask)
    return replace(oracle.answer(), terms=oracle.of_all(oracle.terms), spoilt=oracle.of_all(oracle.spoilt))


def plain(problem: Problem, dmask: Tensor | None = None) -> Answer:
    """The same formula with every step rounded to the input's dtype, as plain PyTorch would on a GPU."""
    return _Oracle(problem, problem.dtype, dmask).answer()


def visible(problem: Problem) -> list[Tensor]:
    """Which keys each query row sees: one bool tensor (seqlen_q, seqlen_k) per sequence."""
    return _Oracle(problem, problem.dtype, None).visible()


@dataclass(frozen=True)
class Sequence:
    """One batch element: q (seqlen_q, nheads, d), k (seqlen_k, nheads_k, d), v (seqlen_k, nheads_k, dv), and what is
    sent back, dout (seqlen_q, nheads, dv).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None


def _sees(seqlen_q: int, seqlen_k: int, left: int, right: int) -> Tensor:
    """(seqlen_q, seqlen_k) bool; rows aligned with the end of the keys, -1 for an open side, both edges included."""
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)[None, :]
    sees = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        sees &= key >= position - left
    if right >= 0:
        sees &= key <= position + right
    return sees


def _slots(positions: Tensor, row: int, pages: Tensor | None, page: int) -> tuple[Tensor, Tensor]:
    """Where key positions lie in a cache: (row, position), or (block, slot) in a paged one."""
    if pages is None:
        return torch.full_like(positions, row), positions
    return pages[positions // page], positions % page


class _Oracle:
    def __init__(self, problem: Problem, dtype: torch.dtype, dmask: Tensor | None) -> None:
        self.problem = problem
        self.dtype = dtype
        self.dmask = dmask
        self.options: Mapping[str, Any] = problem.options
        self.wide = torch.promote_types(dtype, torch.float32)  # slopes, rotary and the LSE are fp32 in flash-attn
        self.tensors = {
            name: tensor.detach().to(dtype).requires_grad_(name in problem.differentiable)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in problem.tensors.items()
        }
        self.cache_after: dict[str, Tensor] = {}
        # By sequence, and in it by "out", "q", "k", "v": see _terms.
        self.terms: list[dict[str, Tensor]] = []
        self.spoilt: list[dict[str, Tensor]] = []

    # ---- from a call to its sequences -------------------------------------------------------------------------------

    def _sequences(self) -> tuple[list[Sequence], int]:
        """The sequences of the call, and the length its window is measured against."""
        if "kvcache" in self.problem.function:
            return self._cached()
        return self._varlen() if "varlen" in self.problem.function else self._dense()

    def visible(self) -> list[Tensor]:
        sequences, longest_k = self._sequences()
        window = self._window(longest_k)
        return [_sees(len(sequence.q), len(sequence.k), *window) for sequence in sequences]

    def answer(self) -> Answer:
        sequences, longest_k = self._sequences()
        left, right = self._window(longest_k)
        results = [self._attend(sequence, index, left, right) for index, sequence in enumerate(sequences)]
        outs, lses = [out for out, _ in results], [lse for _, lse in results]
        if "varlen" in self.problem.function:
            before, after = self._outside()
            out = F.pad(torch.cat(outs), (0, 0, 0, 0, before, after))
            softmax_lse = F.pad(torch.cat(lses, dim=-1), (before, after))
        else:
            out, softmax_lse = torch.stack(outs), torch.stack(lses)

        grads: dict[str, Tensor] = {}
        dout = self.problem.dout
        if dout is not None and self.problem.differentiable:
            leaves = [self.tensors[name] for name in self.problem.differentiable]
            found = torch.autograd.grad(out, leaves, dout.to(self.dtype))
            grads = dict(zip(self.problem.differentiable, found))
        return Answer(out=out.detach(), softmax_lse=softmax_lse.detach(), grads=grads, caches=self.cache_after)

    def _qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        tensors = self.tensors
        if "qkv" in tensors:
            q, k, v = tensors["qkv"].unbind(-3)
            return q, k, v
        if "kv" in tensors:
            k, v = tensors["kv"].unbind(-3)
            return tensors["q"], k, v
        return tensors["q"], tensors["k"], tensors["v"]

    def _dense(self) -> tuple[list[Sequence], int]:
        q, k, v = self._qkv()
        douts = [None] * len(q) if self.problem.dout is None else list(self.problem.dout)
        return [Sequence(*parts) for parts in zip(q, k, v, douts)], k.shape[1]

    def _outside(self) -> tuple[int, int]:
        """Tokens before the first and behind the last sequence."""
        q, _, _ = self._qkv()
        bounds = self.tensors["cu_seqlens" if "qkv" in self.tensors else "cu_seqlens_q"].tolist()
        return bounds[0], len(q) - bounds[-1]

    def _varlen(self) -> tuple[list[Sequence], int]:
        q, k, v = self._qkv()
        packed = "qkv" in self.tensors  # q and k have one pair of lengths then
        bounds_q = self.tensors["cu_seqlens" if packed else "cu_seqlens_q"].tolist()
        bounds_k = self.tensors["cu_seqlens" if packed else "cu_seqlens_k"].tolist()
        longest_k = int(self.options["max_seqlen" if packed else "max_seqlen_k"])
        table = self.tensors.get("block_table")
        sequences = []
        for index, (start, end) in enumerate(itertools.pairwise(bounds_k)):
            of_q = slice(bounds_q[index], bounds_q[index + 1])
            rows = q[of_q]
            if table is None:
                dout = None if self.problem.dout is None else self.problem.dout[of_q]
                sequences.append(Sequence(rows, k[start:end], v[start:end], dout))
            else:
                pages = table[index].long()
                sequences.append(
                    Sequence(rows, k[pages].flatten(0, 1)[: end - start], v[pages].flatten(0, 1)[: end - start])
                )
        return sequences, longest_k

    def _cached(self) -> tuple[list[Sequence], int]:
        tensors = self.tensors
        q, table = tensors["q"], tensors.get("block_table")
        k_cache, v_cache = tensors["k_cache"].clone(), tensors["v_cache"].clone()
        batch = q.shape[0]
        capacity = k_cache.shape[1] if table is None else table.shape[1] * k_cache.shape[1]
        lengths = self._cache_lengths(batch, capacity)
        leftpad = tensors["cache_leftpad"].tolist() if "cache_leftpad" in tensors else [0] * batch
        left, right = self._window(capacity)
        q_moves = left >= 0 or right >= 0  # without a mask every query row is rotated to the first new position

        page = k_cache.shape[1]
        sequences = []
        for index in range(batch):
            row = int(tensors["cache_batch_idx"][index]) if "cache_batch_idx" in tensors else index
            pages = None if table is None else table[index].long()
            end = lengths[index]
            if "k" in tensors:
                new = torch.arange(end, end + tensors["k"].shape[1])
                k_cache[_slots(new, row, pages, page)] = self._rotate(tensors["k"][index], new)
                v_cache[_slots(new, row, pages, page)] = tensors["v"][index]
                end += tensors["k"].shape[1]
            used = _slots(torch.arange(leftpad[index], end), row, pages, page)
            q_positions = lengths[index] + torch.arange(q.shape[1]) * int(q_moves)
            sequences.append(Sequence(self._rotate(q[index], q_positions), k_cache[used], v_cache[used]))
        self.cache_after = dict(zip(CACHES, (k_cache, v_cache)))
        return sequences, capacity

    def _cache_lengths(self, batch: int, capacity: int) -> list[int]:
        given = self.tensors.get("cache_seqlens", self.options.get("cache_seqlens"))
        if given is None:
            return [capacity] * batch
        return given.tolist() if isinstance(given, Tensor) else [int(given)] * batch

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (seqlen, nheads, d), rotated in its first 2 * rotary_cos.shape[1] channels."""
        if "rotary_cos" not in self.tensors:
            return x
        cos, sin = (
            self.problem.tensors[name].to(self.wide)[positions][:, None] for name in ("rotary_cos", "rotary_sin")
        )
        half = cos.shape[-1]
        turned, rest = x[..., : 2 * half].to(self.wide), x[..., 2 * half :]
        interleaved = self.options.get("rotary_interleaved", True)
        a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
        pair = (a * cos - b * sin, a * sin + b * cos)
        joined = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
        return torch.cat((joined.to(self.dtype), rest), dim=-1)

    # ---- one sequence -----------------------------------------------------------------------------------------------

    def _window(self, longest_k: int) -> tuple[int, int]:
        """(left, right) with -1 for an open side; a side no shorter than the longest key sequence is open."""
        left, right = (int(side) for side in self.options.get("window_size", (-1, -1)))
        if self.options.get("causal", False):
            right = 0
        return (-1 if left < 0 or left >= longest_k else left), (-1 if right < 0 or right >= longest_k else right)

    def _attend(self, sequence: Sequence, index: int, left: int, right: int) -> tuple[Tensor, Tensor]:
        """out (seqlen_q, nheads, dv) and softmax_lse (nheads, seqlen_q) of one sequence."""
        q, k, v = sequence.q, sequence.k, sequence.v
        (seqlen_q, nheads, head_dim), (seqlen_k, nheads_k, _) = q.shape, k.shape
        scale = self.options.get("softmax_scale")
        scale = head_dim**-0.5 if scale is None else float(scale)
        k, v = (x.repeat_interleave(nheads // nheads_k, dim=1) for x in (k, v))

        scores = self._matmul(q.transpose(0, 1) * scale, k.permute(1, 2, 0))
        softcap = float(self.options.get("softcap", 0.0))
        slope_of_cap: Tensor | float = 1.0
        if softcap > 0:
            capped = torch.tanh(scores / softcap)
            scores, slope_of_cap = softcap * capped, 1 - capped.detach() ** 2
        position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        key = torch.arange(seqlen_k)[None, :]
        slopes = self._slopes(index)
        if slopes is not None:
            scores = scores - slopes[:, None, None] * (position - key).abs()

        visible = _sees(seqlen_q, seqlen_k, left, right)
        alive = visible.any(dim=-1)
        # A row that sees nothing is computed as if it saw everything and then zeroed, so that no NaN enters the
        # gradient.
        masked = scores.masked_fill(~(visible | ~alive[:, None]), float("-inf"))
        probabilities = torch.softmax(masked, dim=-1).to(self.dtype) * alive[:, None]
        softmax_lse = torch.logsumexp(masked.detach().to(self.wide), dim=-1)
        if slopes is not None and left < 0 and right == 0:
            # flash-attn adds slope * key here instead of subtracting the distance: same softmax, LSE larger by slope
            # * position.
            softmax_lse = softmax_lse + slopes[:, None] * position[:, 0]
        softmax_lse = softmax_lse.masked_fill(~alive, float("inf"))

        p, share = self.problem.dropout_p, torch.ones((), dtype=self.dtype)
        dropped = probabilities
        if p > 0:
            if self.dmask is None:
                raise ValueError("with dropout the oracle needs dmask, the S_dmask of the run being judged")
            kept = (self.dmask[index, :, :seqlen_q, :seqlen_k] >= 0).to(self.dtype)
            share = kept / (1 - p)
            dropped = probabilities * kept / (1 - p)
        if self.dtype == torch.float64:
            with torch.no_grad():
                self._note(sequence, k, v, probabilities, share, slope_of_cap, abs(scale))
        return self._matmul(dropped, v.transpose(0, 1)).transpose(0, 1), softmax_lse

    def _slopes(self, index: int) -> Tensor | None:
        slopes = self.problem.tensors.get("alibi_slopes")
        if slopes is None:
            return None
        slopes = slopes.to(self.wide)
        return slopes[index] if slopes.dim() == 2 else slopes

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if self.dtype.itemsize >= 4:
            return a @ b
        # What a GPU does, and about 300 times faster on a CPU than its own half-precision product: accumulate in
        # fp32, round once.
        return (a.float() @ b.float()).to(self.dtype)

    # ---- how large what is summed is --------------------------------------------------------------------------------

    def _note(
        self, sequence: Sequence, k: Tensor, v: Tensor, probabilities: Tensor, share: Tensor,
        slope_of_cap: Tensor | float, scale: float,
    ) -> None:  # fmt: skip
        """Every result's formula with absolute values in it, the largest of each head; k and v are each query head's.

        Where numbers underflow, each probability and each score's gradient may be off by half of the dtype's smallest
        number; that is added here as a part of a sum of which one rounding is allowed.
        """
        nheads_k = sequence.k.shape[1]
        q, k, v = (x.transpose(0, 1).abs() for x in (sequence.q, k, v))
        smallest = torch.finfo(self.problem.dtype).smallest_normal

        def of_key_heads(x: Tensor) -> Tensor:
            return x.view(nheads_k, len(x) // nheads_k, *x.shape[1:]).sum(1)

        terms = {"out": _largest((probabilities * share) @ v) + smallest * _largest(v.sum(1))}
        inputs = [q, k, v]
        if sequence.dout is not None:
            dout = sequence.dout.to(self.dtype).transpose(0, 1).abs()
            inputs.append(dout)
            dprobabilities = (dout @ v.mT) * share
            mean = (probabilities * dprobabilities).sum(-1, keepdim=True)
            dscores = scale * probabilities * (dprobabilities + mean) * slope_of_cap
            terms["q"] = _largest(dscores @ k) + smallest * scale * _largest(k.sum(1))
            terms["k"] = _largest(of_key_heads(dscores.mT @ q)) + smallest * scale * _largest(of_key_heads(q.sum(1)))
            dropped = probabilities * share
            terms["v"] = _largest(of_key_heads(dropped.mT @ dout)) + smallest * _largest(of_key_heads(dout.sum(1)))
        self.terms.append(terms)
        # Of anything not finite the sum is not finite either.
        finite = of_key_heads(torch.stack([x.sum((1, 2)) for x in inputs], 1)).sum(1).isfinite()
        of_queries = ~finite.repeat_interleave(q.shape[0] // nheads_k)
        self.spoilt.append({"out": of_queries, "q": of_queries, "k": ~finite, "v": ~finite})

    def of_all(self, found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """(sequences, heads) of "out" and of each argument's gradient, "dq" and so on; {} where all is False."""
        together = {name: torch.stack([each[name] for each in found]) for name in found[0]}
        if together["out"].dtype == torch.bool and not together["out"].any():
            return {}
        of_arguments = {
            f"d{name}": torch.cat([together[part] for part in name], dim=1) for name in self.problem.differentiable
        }
        return {"out": together["out"], **of_arguments}


def _largest(x: Tensor) -> Tensor:
    """The largest number of each head, 0 where it has none."""
    x = x.flatten(1)
    return x.amax(1) if x.shape[1] else x.new_zeros(x.shape[0])
