"""ring-flash-attn, unmodified, on this package: every variant against the whole sequence in fp64.

On two GPUs over NCCL, as each GPU is and treated as one of capability 7.5, one line for each case, exit code 1 if one
is off:

    flash-attn-compat run -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m tests.clients.ring_worker --device cuda

test_ring_flash_attn.py runs it on the CPU over gloo.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.plain import attention

NHEADS, NHEADS_K, HEAD_DIM = 4, 2, 16
BATCH, SEQLEN = 2, 64
CAPABILITY = "FLASH_ATTN_COMPAT_CAPABILITY"
# Largest errors of the output and of a gradient, as parts of the largest exact value. Rounding once costs 5e-4 in fp16
# and 4e-3 in bf16, and ring attention rounds each partial gradient, dq to bf16 in any case; a mistake shows as 0.1.
BOUNDS = {"float16": (1e-3, 5e-3), "bfloat16": (8e-3, 3e-2)}


@dataclass(frozen=True)
class Problem:
    """One process's view. `lengths` of packed sequences are divisible by twice the processes, as zigzag asks."""

    rank: int
    world: int
    device: str
    dtype: torch.dtype

    @property
    def seqlen(self) -> int:
        return SEQLEN if self.device == "cpu" else 2048

    @property
    def head_dim(self) -> int:
        return HEAD_DIM if self.device == "cpu" else 64

    @property
    def lengths(self) -> list[int]:
        return [self.seqlen // 2, self.seqlen // 8, self.seqlen * 3 // 8]


@dataclass(frozen=True)
class Case:
    """attention(q, k, v) of a shard, how a tensor is sharded along an axis, and what the whole sequence computes."""

    attention: Callable[..., Tensor]
    shard: Callable[[Tensor, Problem, int], Tensor]
    packed: bool
    causal: bool


@dataclass(frozen=True)
class Outcome:
    """errors: of out, dq, dk, dv, the worst of all processes; served_by: calls of all processes by backend."""

    case: str
    setting: str
    errors: Mapping[str, float]
    served_by: Mapping[str, int]

    def right(self, dtype: str) -> bool:
        of_output, of_gradient = BOUNDS[dtype]
        return bool(self.served_by) and all(
            error <= (of_output if name == "out" else of_gradient)  # False for NaN
            for name, error in self.errors.items()
        )

    def line(self, dtype: str) -> str:
        errors = " ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        served = ", ".join(f"{name} {calls}" for name, calls in sorted(self.served_by.items())) or "nobody of ours"
        return f"{'right' if self.right(dtype) else 'WRONG'}  {self.case:22} {self.setting:22} {errors}  by {served}"


def ring_flash_attn() -> Any:
    """The package as it came. Its adapter for transformers 4 must find one to import; attention does not use it."""
    for name in ("transformers", "transformers.modeling_flash_attention_utils", "transformers.modeling_utils"):
        sys.modules[name] = types.ModuleType(name)
    utilities = sys.modules["transformers.modeling_flash_attention_utils"]
    utilities.is_flash_attn_greater_or_equal_2_10 = lambda: True  # type: ignore[attr-defined]
    sys.modules["transformers"].modeling_flash_attention_utils = utilities  # type: ignore[attr-defined]
    return importlib.import_module("ring_flash_attn")


def whole(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return attention(q, k, v, window=(-1, 0 if causal else -1))


def whole_packed(q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: list[int]) -> Tensor:
    parts = zip(*(x.split(lengths) for x in (q, k, v)))
    return torch.cat([whole(*(x[None] for x in part), causal)[0] for part in parts])


# ---- how it is cut ---------------------------------------------------------------------------------------------------


def contiguous(x: Tensor, rank: int, world: int, dim: int) -> Tensor:
    return x.chunk(world, dim)[rank]


def zigzag(x: Tensor, rank: int, world: int, dim: int) -> Tensor:
    chunks = x.chunk(2 * world, dim)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], dim)


def striped(x: Tensor, rank: int, world: int, dim: int) -> Tensor:
    return x.unflatten(dim, (-1, world)).select(dim + 1, rank)


def at_once(shard: Callable[..., Tensor]) -> Callable[[Tensor, Problem, int], Tensor]:
    return lambda x, problem, dim: shard(x, problem.rank, problem.world, dim)


def per_sequence(shard: Callable[..., Tensor]) -> Callable[[Tensor, Problem, int], Tensor]:
    return lambda x, problem, dim: torch.cat(
        [shard(part, problem.rank, problem.world, dim) for part in x.split(problem.lengths, dim)], dim
    )


def cases(package: Any, problem: Problem) -> dict[str, Case]:
    cu_seqlens = torch.tensor([0, *problem.lengths]).cumsum(0).to(torch.int32).to(problem.device)

    def packed(function: Callable[..., Tensor], causal: bool) -> Callable[..., Tensor]:
        local = cu_seqlens // problem.world
        return lambda q, k, v: function(q, k, v, local, int(local.diff().max()), causal=causal)

    def llama3(causal: bool) -> Callable[..., Tensor]:
        # cu_seqlens of queries and keys, the longest of each, and the keys that this process needs.
        cu_q, cu_k, max_q, max_k, part = package.llama3_flash_attn_prepare_cu_seqlens(
            cu_seqlens, causal, problem.rank, problem.world
        )
        return lambda q, k, v: package.llama3_flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max_q, max_k, heads_k_stride=1, local_k_slice=part, causal=causal
        )

    def dense(function: Callable[..., Tensor], causal: bool) -> Callable[..., Tensor]:
        return lambda q, k, v: function(q, k, v, causal=causal)

    zigzag_varlen = packed(package.zigzag_ring_flash_attn_varlen_func, True)
    found = {
        "zigzag, causal": Case(dense(package.zigzag_ring_flash_attn_func, True), at_once(zigzag), False, True),
        "stripe, causal": Case(dense(package.stripe_flash_attn_func, True), at_once(striped), False, True),
        "zigzag varlen, causal": Case(zigzag_varlen, per_sequence(zigzag), True, True),
    }
    for causal in (True, False):
        word = "causal" if causal else "full"
        found[f"ring, {word}"] = Case(dense(package.ring_flash_attn_func, causal), at_once(contiguous), False, causal)
        ring = packed(package.ring_flash_attn_varlen_func, causal)
        found[f"ring varlen, {word}"] = Case(ring, per_sequence(contiguous), True, causal)
        found[f"llama3 varlen, {word}"] = Case(llama3(causal), at_once(contiguous), True, causal)
    return found


# ---- one case --------------------------------------------------------------------------------------------------------


def errors_of(case: Case, problem: Problem) -> list[float]:
    """Largest errors of out, dq, dk, dv on this process, relative to the largest exact value."""
    leading = (problem.seqlen,) if case.packed else (BATCH, problem.seqlen)
    dim = len(leading) - 1
    generator = torch.Generator().manual_seed(0)
    # Rounded to the dtype first, so that both sides start from the same numbers.
    q, k, v, dout = (
        torch.randn(*leading, heads, problem.head_dim, generator=generator)
        .to(problem.dtype)
        .to(problem.device)
        .double()
        for heads in (NHEADS, NHEADS_K, NHEADS_K, NHEADS)
    )

    def local(x: Tensor) -> Tensor:
        return case.shard(x, problem, dim).to(problem.dtype).contiguous()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = whole_packed(*leaves, case.causal, problem.lengths) if case.packed else whole(*leaves, case.causal)
    expected = [exact, *torch.autograd.grad(exact, leaves, dout)]
    inputs = [local(x).requires_grad_() for x in (q, k, v)]
    out = case.attention(*inputs)
    got = [out, *torch.autograd.grad(out, inputs, local(dout))]
    return [
        float((a.detach().double() - case.shard(b.detach(), problem, dim)).abs().max() / b.detach().abs().max())
        for a, b in zip(got, expected)
    ]


def outcome(name: str, case: Case, problem: Problem, setting: str) -> Outcome:
    import flash_attn_compat

    flash_attn_compat.reset_backend_counts()
    worst = torch.tensor(errors_of(case, problem), device=problem.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    counts: list[Any] = [None] * problem.world
    dist.all_gather_object(counts, {name: calls for name, calls in flash_attn_compat.backend_counts().items() if calls})
    served_by = sum((Counter(each) for each in counts), Counter())
    return Outcome(name, setting, dict(zip(("out", "dq", "dk", "dv"), worst.tolist())), dict(served_by))


def capabilities(device: str) -> list[str | None]:
    """What the GPU counts as: itself and a Turing GPU, unless the environment has decided; on CPUs no matter."""
    return [None, "7.5"] if device == "cuda" and not os.environ.get(CAPABILITY) else [None]


@contextmanager
def treated_as(capability: str | None) -> Iterator[str]:
    """Yields how to call it."""
    if capability is None:
        forced = os.environ.get(CAPABILITY)
        yield f"capability {forced} forced" if forced else "as it is"
        return
    os.environ[CAPABILITY] = capability
    try:
        yield f"capability {capability} forced"
    finally:
        del os.environ[CAPABILITY]


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", nargs="?", help="file for errors and counts, as JSON")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cpu: over gloo, cuda: over NCCL")
    # Half precision only: ring-flash-attn accumulates gradients in .to(float32) of a buffer, in fp32 the buffer itself.
    parser.add_argument("--dtype", default="float16", choices=BOUNDS)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: " + __doc__.split("\n\n")[2].strip())
    torch.set_num_threads(1)
    device = "cpu"
    if options.device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", timeout=timedelta(minutes=2))
    rank, world = dist.get_rank(), dist.get_world_size()
    problem = Problem(rank, world, device, getattr(torch, options.dtype))
    # The first operation creates the communicator, and ring attention's own first one is no collective.
    dist.all_reduce(torch.zeros(1, device=device))
    package, outcomes = ring_flash_attn(), []
    for capability in capabilities(options.device):
        with treated_as(capability) as setting:
            for name, case in cases(package, problem).items():
                outcomes.append(outcome(name, case, problem, setting))
                if rank == 0:
                    print(outcomes[-1].line(options.dtype), flush=True)
    right = sum(each.right(options.dtype) for each in outcomes)
    if rank == 0:
        print(f"{right} of {len(outcomes)} cases right, {world} processes, torch {torch.__version__}, {problem}")
        if options.output:
            with open(options.output, "w") as file:
                json.dump({"outcomes": [asdict(each) for each in outcomes], "world": world}, file, indent=1)
    dist.destroy_process_group()
    return 0 if right == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
