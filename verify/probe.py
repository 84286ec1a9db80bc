"""A problem for locate, the problems that it contains, and the answer of a kernel that is known by a call only."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import oracle
from .call import Answer, Call, accepted, parts_of, same
from .errors import UsageError
from .judge import Check, Right, against_fp64, right_answer


@dataclass(frozen=True)
class Setting:
    """A call of flash_attn_func on the CPU, the device to make it on, and the rows and keys of a kernel's tiles."""

    call: Call
    block_rows: int
    block_columns: int
    device: str

    def but(self, **args: Any) -> Setting:
        """With other arguments."""
        return replace(self, call=replace(self.call, args={**self.call.args, **args}))

    @functools.cached_property
    def right(self) -> Right:
        return right_answer(self.call)

    @property
    def key_tiles(self) -> list[slice]:
        n, size = self.call.args["k"].shape[1], self.block_columns
        return [slice(start, min(start + size, n)) for start in range(0, n, size)]

    @functools.cached_property
    def grown(self) -> list[Setting]:
        """The same problem with its first 1, 2, ... key tiles; a square one stays so, since many kernels need that."""
        q, k, v = self.call.qkv
        square = q.shape[1] == k.shape[1]
        ends = [tile.stop for tile in self.key_tiles]
        return [self.but(q=q[:, :end] if square else q, k=k[:, :end], v=v[:, :end]) for end in ends]

    @functools.cached_property
    def shares(self) -> Tensor:
        """(batch, nheads, row, key tiles, head_dim + 1) in fp64: what each key tile adds to each row of the output, and
        behind it the tile's softmax weight. Each tile has channels of its own in v.
        """
        v = self.call.args["v"]
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        tile = torch.arange(values.shape[1]) // self.block_columns
        of_tile = torch.nn.functional.one_hot(tile)[:, None, :, None] * values[..., None, :]
        out = oracle.answer(self.call.fn, {**self.call.args, "v": of_tile.flatten(-2)}).out
        return torch.unflatten(out.transpose(1, 2), -1, of_tile.shape[-2:])

    def judged(self, out: Tensor) -> Check:
        """An output held against fp64."""
        return against_fp64(self.right, Answer(out))[0]

    def as_near_as(self, out: Tensor, dtype: torch.dtype) -> bool:
        """Whether an output is no further from fp64 than a right one that is computed in another dtype."""
        return against_fp64(right_answer(self.call, dtype=dtype), Answer(out))[0].ok


@dataclass(frozen=True)
class Kernel:
    """A function by its import path, called as function(q, k, v, causal=...), and its answer held against fp64.

    out: (batch, seqlen_q, nheads, head_dim) on the CPU; repeats: how far a second call was from the first
    """

    name: str
    function: Callable[..., Any]
    out: Tensor
    check: Check
    changed_inputs: Sequence[str]
    repeats: float

    @property
    def remarks(self) -> list[str]:
        """What is worth knowing of a right answer too."""
        lines = [f"it changed its input {name}" for name in self.changed_inputs]
        if self.repeats > 0:
            lines.append(f"a second call gave another answer, {self.repeats:.1e} off the first")
        return lines


def gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| as (batch, nheads, row, channel) in fp64; 0 for equal infinities, inf where one of them is no number."""
    a, b = (x.double().transpose(1, 2) for x in (a, b))
    return torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


# ---- one call -------------------------------------------------------------------------------------------------------


def ask(name: str, function: Callable[..., Any], setting: Setting) -> tuple[Tensor, list[str]]:
    """The output on the CPU, and the inputs that were written to; UsageError if it raises or answers no output."""
    given, call = setting.call, setting.call.to(setting.device)
    q, k, v = call.qkv
    try:
        with torch.no_grad():
            out, *_ = parts_of(function(q, k, v, **accepted(function, {"causal": given.args["causal"]})))
            found = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            out = out.cpu() if isinstance(out, Tensor) else out
    except Exception as error:  # whatever someone's kernel raises
        shapes = ", ".join(f"{name} {tuple(given.args[name].shape)}" for name in "qkv")
        first_line = (str(error).splitlines() or [""])[0]
        raise UsageError(f"{name} raised {type(error).__name__} for {shapes}: {first_line}") from error
    expected = f"shape {(*q.shape[:-1], v.shape[-1])}"
    if found != expected:
        raise UsageError(f"{name} returned {found}, expected {expected}: batch, seqlen, heads, head_dim")
    return out, [name for name in "qkv" if not same(given.args[name], call.args[name].cpu())]


def answered(name: str, function: Callable[..., Any], setting: Setting) -> Kernel:
    """With its answer, asked for twice."""
    out, changed = ask(name, function, setting)
    once, again = (x.nan_to_num(nan=0.0) for x in (out, ask(name, function, setting)[0]))
    return Kernel(name, function, out, setting.judged(out), changed, gap(once, again).max().item())
