"""Random score_mods and mask_mods from the table of operators; each head of a call has functions of its own.

Scores pass only through continuous functions: a comparison of two scores that differ by an ulp is no mistake of ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Places = tuple[Tensor, Tensor, Tensor, Tensor]  # b, h, q, kv
Number = Callable[[Any, Places], Tensor]  # of the score, or None in a mask_mod
INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8
FLOATS = torch.float32, torch.float16, torch.bfloat16


class Sizes(NamedTuple):
    """Of a call: what b, h, q and kv count."""

    batch: int
    heads: int
    rows: int
    keys: int


class Maker:
    """Makes functions of random operators. Captured tensors are few, so that a call has at most sixteen."""

    def __init__(self, rng: random.Random, sizes: Sizes, device: str) -> None:
        self.rng, self.sizes, self.device = rng, sizes, device
        self.tables: list[tuple[Tensor, tuple[int, ...]]] = []  # a captured tensor, and the places that index it
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        for _ in range(rng.randint(1, 5)):
            self.tables.append(self._make_table())

    def _make_table(self) -> tuple[Tensor, tuple[int, ...]]:
        rng = self.rng
        axes = tuple(rng.sample(range(4), rng.choice((0, 1, 1, 2, 2, 3))))
        shape = [self.sizes[axis] for axis in axes]
        if rng.random() < 0.5:
            dtype = rng.choice(INTEGERS)
            table = torch.randint(-9, 10, [2 * n for n in shape], generator=self.generator).to(dtype)
        else:
            table = torch.randn([2 * n for n in shape], generator=self.generator).to(rng.choice(FLOATS))
        start = rng.randint(0, 1)
        table = table[tuple(slice(start, None, 2) for _ in shape)] if shape else table
        return table.to(self.device), axes

    # ---- Integers, which stay small enough for int32

    def integer(self, depth: int) -> Number:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.15:
            return self._integer_leaf()
        a, b, n = self.integer(depth - 1), self.integer(depth - 1), rng.choice((2, 3, 5, 7, 16, -3, -4))
        return rng.choice((
            lambda s, p: a(s, p) + b(s, p), lambda s, p: a(s, p) - b(s, p), lambda s, p: (a(s, p) * b(s, p)) % 1009,
            lambda s, p: a(s, p) // n, lambda s, p: a(s, p) % n, lambda s, p: torch.fmod(a(s, p), n),
            lambda s, p: torch.div(a(s, p), n, rounding_mode="trunc"), lambda s, p: a(s, p).abs(),
            lambda s, p: -a(s, p), lambda s, p: torch.minimum(a(s, p), b(s, p)),
            lambda s, p: torch.maximum(a(s, p), b(s, p)), lambda s, p: a(s, p).clamp(-n * n, n * n),
            lambda s, p: a(s, p) & b(s, p), lambda s, p: a(s, p) ^ b(s, p), lambda s, p: (a(s, p) | 3) % 511,
            lambda s, p: a(s, p) >> 2, lambda s, p: (a(s, p) % 64) << 2, lambda s, p: torch.sign(a(s, p)),
        ))  # fmt: skip

    def _integer_leaf(self) -> Number:
        rng = self.rng
        table = self._table(INTEGERS) if rng.random() < 0.3 else None
        if table is not None:
            found, index = table
            return lambda s, p: found[index(p)].to(torch.int64)
        place = rng.choice((0, 1, 2, 2, 3, 3))
        return lambda s, p: p[place]

    def _table(self, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, Callable[[Places], tuple[Tensor, ...]]] | None:
        """Return a captured tensor of these dtypes and its index; sometimes one that is computed, and wraps."""
        fitting = [table for table in self.tables if table[0].dtype in dtypes and table[1]]
        if not fitting:
            return None
        table, axes = self.rng.choice(fitting)
        if self.rng.random() < 0.7:
            return table, lambda p: tuple(p[axis] for axis in axes)
        size, shift = table.shape[0], self.rng.randint(0, 9)
        other = self.rng.randint(0, 3)
        return table, lambda p: ((p[other] + shift) % size - size, *(p[axis] for axis in axes[1:]))

    # ---- Booleans

    def boolean(self, depth: int) -> Number:
        rng = self.rng
        a, b = self.integer(depth), self.integer(depth)
        compare = rng.choice((
            lambda s, p: a(s, p) <= b(s, p), lambda s, p: a(s, p) < b(s, p), lambda s, p: a(s, p) != b(s, p),
            lambda s, p: a(s, p) >= b(s, p), lambda s, p: a(s, p) % 3 == 0, lambda s, p: (a(s, p) - b(s, p)).abs() < 20,
        ))  # fmt: skip
        if depth <= 0 or rng.random() < 0.3:
            return compare
        c = self.boolean(depth - 1)
        return rng.choice((
            lambda s, p: compare(s, p) & c(s, p), lambda s, p: compare(s, p) | c(s, p), lambda s, p: ~c(s, p),
            lambda s, p: torch.logical_xor(compare(s, p), c(s, p)),
            lambda s, p: torch.logical_and(compare(s, p), c(s, p)),
        ))  # fmt: skip

    # ---- Floats between -8 and 8 or so, of the score if there is one

    def number(self, depth: int, of_score: bool) -> Number:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.1:
            return self._number_leaf(of_score)
        a, b, x = self.number(depth - 1, of_score), self.number(depth - 1, of_score), rng.uniform(-2, 2)
        where = self.boolean(1)
        return rng.choice((
            lambda s, p: a(s, p) + b(s, p), lambda s, p: a(s, p) - x, lambda s, p: torch.tanh(a(s, p) / 3) * b(s, p),
            lambda s, p: a(s, p) * x, lambda s, p: torch.sigmoid(a(s, p)) * 4, lambda s, p: a(s, p) / (1.5 + abs(x)),
            lambda s, p: torch.tanh(a(s, p)), lambda s, p: torch.exp(-a(s, p).abs()),
            lambda s, p: a(s, p).clamp(-3, 4.5),
            lambda s, p: torch.log1p(a(s, p).abs()), lambda s, p: torch.sqrt(a(s, p).abs() + 1),
            lambda s, p: torch.sin(a(s, p)), lambda s, p: torch.cos(a(s, p)), lambda s, p: torch.erf(a(s, p)),
            lambda s, p: torch.relu(a(s, p)), lambda s, p: torch.maximum(a(s, p), b(s, p)), lambda s, p: -a(s, p),
            lambda s, p: torch.minimum(a(s, p), b(s, p)), lambda s, p: torch.where(where(s, p), a(s, p), b(s, p)),
            lambda s, p: torch.nn.functional.silu(a(s, p)), lambda s, p: torch.nn.functional.softplus(a(s, p)),
            lambda s, p: (a(s, p) / 4) ** 2, lambda s, p: torch.rsqrt(a(s, p) * a(s, p) + 1),
            lambda s, p: torch.atan(a(s, p)),
            lambda s, p: torch.exp2(-a(s, p).abs()), lambda s, p: torch.log2(a(s, p).abs() + 1),
        ))  # fmt: skip

    def _number_leaf(self, of_score: bool) -> Number:
        rng = self.rng
        if of_score and rng.random() < 0.4:
            return lambda s, p: s
        table = self._table(FLOATS) if rng.random() < 0.6 else None
        if table is not None:
            found, index = table
            return lambda s, p: found[index(p)].to(torch.float32)
        single = [table for table, axes in self.tables if not axes and table.dtype in FLOATS]
        if single and rng.random() < 0.3:
            return lambda s, p: single[0].to(torch.float32)
        a, n = self.integer(1), rng.choice((8.0, 16.0, 64.0))
        return lambda s, p: (a(s, p) % 127).to(torch.float32) / n


def make_score_mod(maker: Maker) -> Callable[..., Tensor]:
    """Return a score_mod of which each head is another function: the score plus something bounded."""
    parts = [(maker.number(3, of_score=True), maker.rng.uniform(0.3, 1.2)) for _ in range(maker.sizes.heads)]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        found = score
        for head, (part, factor) in enumerate(parts):
            changed = factor * score + 3 * torch.tanh(part(score, (b, h, q, kv)) / 3)
            found = torch.where(h == head, changed, found)
        return found

    return score_mod


def make_mask_mod(maker: Maker) -> Callable[..., Tensor]:
    """Return a mask_mod of which each head is another function, under which every third key is visible to most rows."""
    parts = [maker.boolean(2) for _ in range(maker.sizes.heads)]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        found = q >= kv
        for head, part in enumerate(parts):
            found = torch.where(h == head, part(None, (b, h, q, kv)), found)
        return found

    return mask_mod


def with_learned_tensors(
    maker: Maker, score_mod: Callable[..., Tensor]
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return a score_mod of the score times one learned tensor, plus another one, and both tensors."""
    rng, sizes = maker.rng, maker.sizes
    axes = [rng.sample(range(4), rng.choice((1, 1, 2, 2, 3, 4))) for _ in range(2)]
    found = [torch.randn([sizes[axis] for axis in each], generator=maker.generator) for each in axes]
    factor, bias = (x.to(maker.device).requires_grad_() for x in found)
    repeats, count = rng.random() < 0.5, bias.shape[0]

    def learned_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        places = b, h, q, kv
        first = (q - kv) % count if repeats else places[axes[1][0]]
        changed = score_mod(score * (1 + 0.3 * torch.tanh(factor[tuple(places[i] for i in axes[0])])), *places)
        return changed + bias[(first, *(places[i] for i in axes[1][1:]))]

    return learned_mod, (factor, bias)
