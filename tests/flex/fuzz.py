"""Random functions, shapes and BlockMasks against PyTorch's own composition in fp32, forward and backward.

`python -m tests.flex.fuzz --count 100 [--device cuda] [--first 0]` counts functions: each head of a call has its own.
On a CPU the kernels are emulated. Prints the seeds of wrong answers and returns 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat import backend_counts, reset_backend_counts
from flash_attn_compat.torch_flex import override
from flash_attn_compat.torch_flex.policy import Policy
from tests.flex import calls
from tests.flex.calls import Answer
from tests.kernels import fused_on_cpu

# ---------------------------------------------------------------- functions; each head of a call has its own
#
# Scores pass only through continuous functions: a comparison of two scores that differ by an ulp is no mistake of ours.

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


# ---------------------------------------------------------------- calls

DIMS = (64, 64, 64, 128, 32, 96, 80, 40, 36, 256)
BLOCKS = (128, 128, 64, (128, 64), (256, 128), 16, (48, 80))


class Problem(NamedTuple):
    """A random call. qkv: (batch, heads, tokens, channels); learned: captured tensors that want a gradient"""

    qkv: tuple[Tensor, Tensor, Tensor]
    score_mod: Any
    mask: Any
    scale: float
    words: str
    learned: tuple[Tensor, ...] = ()


def make_problem(seed: int, device: str) -> Problem:
    rng = random.Random(seed)
    heads = rng.choice((2, 4, 4, 8))
    sizes = Sizes(rng.choice((1, 2)), heads, rng.randint(1, 300), rng.randint(1, 300))
    dim, dtype = rng.choice(DIMS), rng.choice((torch.float16, torch.float16, torch.bfloat16))
    dim_v = rng.choice((None, None, None, 64, 32))
    heads_k = rng.choice([number for number in (1, 2, 4, 8) if heads % number == 0])
    qkv = calls.tensors(sizes.batch, heads, heads_k, sizes.rows, sizes.keys, dim, dim_v, dtype, device, seed)
    maker = Maker(rng, sizes, device)
    score_mod = make_score_mod(maker) if rng.random() < 0.8 else calls.identity
    learned: tuple[Tensor, ...] = ()
    if rng.random() < 0.4:
        score_mod, learned = with_learned_tensors(maker, score_mod)
    mask, block = None, rng.choice(BLOCKS)
    if score_mod is calls.identity or rng.random() < 0.7:
        mask = calls.make_mask(make_mask_mod(maker), *qkv[:2], per_head=True, block=block)
    scale = rng.choice((dim**-0.5, dim**-0.5, 0.05, -0.1))
    words = f"{tuple(sizes)} over {heads_k}, {dim}/{dim_v}, {dtype}, blocks {block if mask else None}"
    return Problem(qkv, score_mod, mask, scale, f"{words}, {len(learned)} learned", learned)


def mistake(problem: Problem) -> str | None:
    """Return what is wrong in the answer of our kernels, or None. Raises if they do not serve."""
    reset_backend_counts()
    arguments = problem.score_mod, problem.mask, problem.scale
    found = calls.call(problem.qkv, *arguments, more=problem.learned)
    if backend_counts() != {"fused": 1}:
        return f"not served: {backend_counts()}"
    right, usual = calls.in_fp32(problem.qkv, *arguments, more=problem.learned), None
    names = "out", "dq", "dk", "dv", *(f"learned {i}" for i in range(len(problem.learned)))
    for name, x, y in zip(names, arrays(found), arrays(right), strict=True):
        y = y.float()
        off = (x.float() - y).abs().max().item() if x.numel() else 0.0
        largest = max(y.abs().max().item() if y.numel() else 0.0, 0.1)
        if not off <= 8 * torch.finfo(problem.qkv[0].dtype).eps * largest:
            usual = usual or calls.composed(problem.qkv, *arguments, more=problem.learned)
            own = dict(zip(names, arrays(usual)))[name]
            own_off = (own.float() - y).abs().max().item()
            if not off <= max(2 * own_off, cancelled(problem, name)):
                return f"{name} off by {off:.2e}, PyTorch's by {own_off:.2e}, of {largest:.2e}"
    same = found.lse == right.lse
    off = torch.where(same, 0.0, (found.lse - right.lse).abs()).max().item() if found.lse.numel() else 0.0
    return (
        None
        if off
        <= 1e-4 * max(1.0, right.lse[right.lse.isfinite()].abs().max().item() if right.lse.isfinite().any() else 1.0)
        else f"lse off by {off:.2e}"
    )


def cancelled(problem: Problem, name: str) -> float:
    """Return what a learned tensor's gradient may be off where its terms cancel: a rounding of their root of squares.

    All kernels that take delta from the rounded out, as flash attention does, leave that much of a bias that every
    score of a row shares, whose gradient is 0.
    """
    if "learned" not in name:
        return 0.0
    (q, k, _), score_mod = problem.qkv, problem.score_mod
    terms = torch.zeros(*q.shape[:3], k.shape[2], device=q.device, requires_grad=True)

    def with_terms(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score_mod(score, b, h, i, j) + terms[b, h, i, j]

    found = calls.in_fp32(problem.qkv, with_terms, problem.mask, problem.scale, more=[terms]).gradients[-1]
    elements = problem.learned[int(name.split()[1])].numel()
    return torch.finfo(q.dtype).eps * found.norm().item() / elements**0.5


def arrays(answer: Answer) -> tuple[Tensor, ...]:
    return answer.out, *answer.gradients


@contextlib.contextmanager
def kernels_on(device: str) -> Iterator[None]:
    """Put our kernels under flex_attention on a device; on a CPU, emulated."""
    with pytest.MonkeyPatch.context() as patches:
        if device == "cpu":
            fused_on_cpu.emulate(patches)
            calls.forget_prepared(patches)
        with override.applied(Policy(device, always=True)):
            yield


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flex.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="functions; each head of a call has one (20)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (0)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="share the functions out to so many (1)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    options = parser.parse_args(argv)
    if options.processes > 1:
        return run_processes(options)
    warnings.filterwarnings("ignore")
    seed, functions, outcomes, begun = options.first, 0, Counter[str](), time.monotonic()
    with kernels_on(options.device):
        while functions < options.count and time.monotonic() - begun < options.seconds:
            problem = make_problem(seed, options.device)
            try:
                wrong = mistake(problem)
            except Exception as error:  # noqa: BLE001  # a failure is an outcome, too
                wrong = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
            outcomes["wrong" if wrong else "right"] += 1
            if wrong:
                print(f"seed {seed}: {problem.words}: {wrong}", flush=True)
            functions += problem.qkv[0].shape[1]
            seed += 1
            torch._dynamo.reset()
    seconds = time.monotonic() - begun
    print(f"{functions} functions in {sum(outcomes.values())} calls, {outcomes['wrong']} calls wrong, {seconds:.0f} s")
    return int(outcomes["wrong"] > 0)


def run_processes(options: argparse.Namespace) -> int:
    """Run the functions in several processes, whose seeds are far apart."""
    command = [sys.executable, "-m", "tests.flex.fuzz", "--device", options.device, "--seconds", str(options.seconds)]
    count = -(-options.count // options.processes)
    firsts = [options.first + 1_000_000 * number for number in range(options.processes)]
    children = [subprocess.Popen([*command, "--count", str(count), "--first", str(first)]) for first in firsts]
    return max(child.wait() for child in children)


if __name__ == "__main__":
    sys.exit(main())
