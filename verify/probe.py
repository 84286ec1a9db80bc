"""Asks a kernel questions from outside: its answer, how much weight a row gives each key tile, and how long a problem
must be before two kernels disagree.

Attention is linear in v, so v = 1 on the keys of one tile and 0 elsewhere makes the output that tile's softmax weight.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from verify.call import Answer, Call
from verify.difference import gap
from verify.errors import UsageError
from verify.judge import Check, Right, against_fp64, right_answer
from verify.oracle import visible


@dataclass(frozen=True)
class Setting:
    """One problem: q (batch, seqlen_q, nheads, head_dim), k and v (batch, seqlen_k, nheads_k, head_dim), on the CPU."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    block_rows: int
    block_columns: int
    device: str
    atol: float | None = None  # what counts as a difference, where not the bound that verify itself uses

    @property
    def call(self) -> Call:
        return Call("flash_attn_func", {"q": self.q, "k": self.k, "v": self.v, "causal": self.causal})

    @functools.cached_property
    def right(self) -> Right:
        return right_answer(self.call)

    @property
    def key_tiles(self) -> list[slice]:
        n, size = self.k.shape[1], self.block_columns
        return [slice(start, min(start + size, n)) for start in range(0, n, size)]

    def grown_to(self, keys: int) -> Setting:
        """The same problem with its first keys only; where it is square it stays so, since many kernels need that."""
        rows = keys if self.q.shape[1] == self.k.shape[1] else self.q.shape[1]
        return replace(self, q=self.q[:, :rows], k=self.k[:, :keys], v=self.v[:, :keys])

    def judged(self, out: Tensor) -> Check:
        """An output held against fp64."""
        return against_fp64(self.right, Answer(out))[0]

    def differs(self, a: Tensor, b: Tensor) -> Tensor:
        """(batch, nheads, row, channel): where two outputs are further apart than the tolerance."""
        return gap(a, b) > self.tolerance(a)

    def tolerance(self, out: Tensor) -> float:
        """Two answers that verify passes are each within the bound of fp64, so within twice the bound of each other."""
        return 2 * self.judged(out).widest_bound if self.atol is None else self.atol


@dataclass(frozen=True)
class Candidate:
    """A kernel by its import path, called as function(q, k, v, causal=...)."""

    name: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Judged:
    """A candidate's answer to one setting, (batch, seqlen_q, nheads, head_dim) on the CPU, held against fp64."""

    name: str
    out: Tensor
    check: Check
    changed_inputs: tuple[str, ...] = ()
    repeats: float = 0.0  # how far a second call was from the first

    @property
    def remarks(self) -> list[str]:
        """What is worth knowing of a right answer too."""
        lines = [f"it changed its input {name}" for name in self.changed_inputs]
        if self.repeats > 0:
            lines.append(f"a second call gave another answer, {self.repeats:.1e} off the first")
        return lines


# ---- one call -------------------------------------------------------------------------------------------------------


def ask(candidate: Candidate, setting: Setting) -> tuple[Tensor, tuple[str, ...]]:
    """The candidate's output on the CPU, and the inputs it wrote to; UsageError if it raises or answers no output."""
    given = {name: getattr(setting, name).to(setting.device) for name in ("q", "k", "v")}
    inputs = {name: tensor.clone() for name, tensor in given.items()}
    try:
        with torch.no_grad():
            out = candidate.function(*inputs.values(), **_options(candidate, setting))
            out = out[0] if isinstance(out, (tuple, list)) and out else out
            if not isinstance(out, Tensor):
                raise TypeError(f"returned {type(out).__name__}, expected a tensor")
            out = out.detach().cpu()
    except UsageError:
        raise
    except Exception as error:  # whatever someone's kernel raises
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
        first_line = (str(error).splitlines() or [""])[0]
        raise UsageError(f"{candidate.name} raised {type(error).__name__} for {shapes}: {first_line}") from error
    expected = (*setting.q.shape[:-1], setting.v.shape[-1])
    if tuple(out.shape) != expected:
        raise UsageError(
            f"{candidate.name} returned shape {tuple(out.shape)}, expected {expected}: batch, seqlen, heads, head_dim"
        )
    return out, tuple(name for name in given if not torch.equal(given[name], inputs[name]))


def _options(candidate: Candidate, setting: Setting) -> dict[str, Any]:
    """causal, and the block sizes where the function has parameters of these names."""
    try:
        parameters = inspect.signature(candidate.function).parameters
    except (TypeError, ValueError):  # a compiled function need not have one
        return {"causal": setting.causal}
    options = {name: getattr(setting, name) for name in ("causal", "block_rows", "block_columns") if name in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        options["causal"] = setting.causal
    if setting.causal and "causal" not in options:
        raise UsageError(f"{candidate.name} has no argument causal, so --causal cannot be asked of it")
    return options


# ---- against fp64, and against each other ---------------------------------------------------------------------------


def judged(candidate: Candidate, setting: Setting) -> Judged:
    """Its answer, asked twice, held against fp64."""
    out, changed = ask(candidate, setting)
    once, again = (x.nan_to_num(nan=0.0) for x in (out, ask(candidate, setting)[0]))
    return Judged(candidate.name, out, setting.judged(out), changed, gap(once, again).max().item())


def growth(candidates: tuple[Candidate, Candidate], setting: Setting) -> Iterator[tuple[int, bool]]:
    """(number of keys, whether the two differ there) for problems of 1, 2, ... key tiles."""
    for columns in setting.key_tiles:
        smaller = setting.grown_to(columns.stop)
        a, b = (ask(candidate, smaller)[0] for candidate in candidates)
        yield columns.stop, bool(smaller.differs(a, b).any())


def key_weights(candidate: Candidate, setting: Setting) -> Tensor:
    """(batch, nheads, seqlen_q, key tiles): the softmax weight each row gives each key tile, measured through v."""
    parts = []
    for columns in setting.key_tiles:
        v = torch.zeros_like(setting.v)
        v[:, columns] = 1
        # Every channel says the same, unless it is the channels that are mixed up.
        parts.append(ask(candidate, replace(setting, v=v))[0].double().median(dim=-1).values)
    return torch.stack(parts, dim=-1).transpose(1, 2)


# ---- what is right --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileStatistics:
    """In fp64, by row and key tile, each (batch, nheads, seqlen_q, key tiles); out has head_dim behind.

    weight: the tile's share of the softmax; out: what the row would get from the tile alone
    """

    weight: Tensor
    out: Tensor = field(repr=False)


def statistics(setting: Setting) -> TileStatistics:
    groups = setting.q.shape[2] // setting.k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (setting.q, setting.k, setting.v))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    sees = torch.stack(visible(setting.call))[:, None]
    s = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~sees, -torch.inf)
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - top.masked_fill(top == -torch.inf, 0.0))
    sums = torch.stack([p[..., tile].sum(-1) for tile in setting.key_tiles], dim=-1)
    tile_out = torch.stack([p[..., tile] @ v[..., tile, :] for tile in setting.key_tiles], dim=-2)
    return TileStatistics(_over(sums, sums.sum(-1, keepdim=True)), _over(tile_out, sums[..., None]))


def _over(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > 0, a / b, 0.0)
