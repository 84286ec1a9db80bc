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
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat import backend_counts, reset_backend_counts
from flash_attn_compat.torch_flex import launch, override
from flash_attn_compat.torch_flex.policy import Policy
from tests.flex import calls, random_mods
from tests.flex.calls import Answer
from tests.flex.random_mods import Maker, Sizes
from tests.kernels import fused_on_cpu

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
    score_mod = random_mods.make_score_mod(maker) if rng.random() < 0.8 else calls.identity
    learned: tuple[Tensor, ...] = ()
    if rng.random() < 0.4:
        score_mod, learned = random_mods.with_learned_tensors(maker, score_mod)
    mask, block = None, rng.choice(BLOCKS)
    if score_mod is calls.identity or rng.random() < 0.7:
        mask = calls.make_mask(random_mods.make_mask_mod(maker), *qkv[:2], per_head=True, block=block)
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
            if not off <= 2 * own_off:
                return f"{name} off by {off:.2e}, PyTorch's by {own_off:.2e}, of {largest:.2e}"
    same = found.lse == right.lse
    off = torch.where(same, 0.0, (found.lse - right.lse).abs()).max().item() if found.lse.numel() else 0.0
    return (
        None
        if off
        <= 1e-4 * max(1.0, right.lse[right.lse.isfinite()].abs().max().item() if right.lse.isfinite().any() else 1.0)
        else f"lse off by {off:.2e}"
    )


def arrays(answer: Answer) -> tuple[Tensor, ...]:
    return answer.out, *answer.gradients


@contextlib.contextmanager
def kernels_on(device: str) -> Iterator[None]:
    """Put our kernels under flex_attention on a device; on a CPU, emulated."""
    with pytest.MonkeyPatch.context() as patches:
        if device == "cpu":
            fused_on_cpu.emulate(patches)
            patches.setattr(launch, "_runs", {})
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
