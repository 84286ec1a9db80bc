"""One process of a ring-flash-attn run: every variant against the whole sequence in fp64, errors written as JSON.

Started by torchrun under flash-attn-compat, on CPUs over gloo by test_ring_flash_attn.py, or by hand on GPUs:

    flash-attn-compat run -m torch.distributed.run --nproc-per-node 2 -m tests.clients.ring_worker FILE --device cuda
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NHEADS, NHEADS_K, HEAD_DIM = 4, 2, 16
BATCH, SEQLEN = 2, 64
LENGTHS = (32, 8, 24)  # of packed sequences; divisible by twice the processes, as zigzag asks


def ring_flash_attn() -> Any:
    """The package as it came. Its adapter for transformers 4 must find one to import; attention does not use it."""
    for name in ("transformers", "transformers.modeling_flash_attention_utils", "transformers.modeling_utils"):
        sys.modules[name] = types.ModuleType(name)
    utilities = sys.modules["transformers.modeling_flash_attention_utils"]
    utilities.is_flash_attn_greater_or_equal_2_10 = lambda: True  # type: ignore[attr-defined]
    sys.modules["transformers"].modeling_flash_attention_utils = utilities  # type: ignore[attr-defined]
    return importlib.import_module("ring_flash_attn")


def whole(q: Tensor, k: Tensor, v: Tensor, causal: bool, groups: int = NHEADS // NHEADS_K) -> Tensor:
    """Attention over (batch, seqlen, nheads, head_dim), plainly; `groups` query heads share one of keys."""
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * HEAD_DIM**-0.5
    if causal:
        scores = scores + torch.full(scores.shape[-2:], float("-inf"), dtype=q.dtype).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def whole_packed(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    parts = zip(*(x.split(LENGTHS) for x in (q, k, v)))
    return torch.cat([whole(*(x[None] for x in part), causal)[0] for part in parts])


def contiguous(x: Tensor, rank: int, world: int, dim: int) -> Tensor:
    return x.chunk(world, dim)[rank]


def zigzag(x: Tensor, rank: int, world: int, dim: int) -> Tensor:
    chunks = x.chunk(2 * world, dim)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], dim)


def striped(x: Tensor, rank: int, world: int, dim: int) -> Tensor:
    return x.unflatten(dim, (-1, world)).select(dim + 1, rank)


def per_sequence(shard: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, rank, world, dim: torch.cat([shard(part, rank, world, dim) for part in x.split(LENGTHS, dim)], dim)


def cases(package: Any, rank: int, world: int, device: str) -> dict[str, tuple]:
    """Name -> (attention of a shard, its sharding, whether packed, causal)."""
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32).to(device)

    def packed(function: Callable[..., Tensor], causal: bool) -> Callable[..., Tensor]:
        local = cu_seqlens // world
        return lambda q, k, v: function(q, k, v, local, int(local.diff().max()), causal=causal)

    def llama3(causal: bool) -> Callable[..., Tensor]:
        # cu_seqlens of queries and keys, the longest of each, and the keys that this process needs.
        cu_q, cu_k, max_q, max_k, part = package.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, world)
        return lambda q, k, v: package.llama3_flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max_q, max_k, heads_k_stride=1, local_k_slice=part, causal=causal
        )

    def dense(function: Callable[..., Tensor], causal: bool) -> Callable[..., Tensor]:
        return lambda q, k, v: function(q, k, v, causal=causal)

    found = {
        "zigzag, causal": (dense(package.zigzag_ring_flash_attn_func, True), zigzag, False, True),
        "stripe, causal": (dense(package.stripe_flash_attn_func, True), striped, False, True),
        "zigzag varlen, causal": (
            packed(package.zigzag_ring_flash_attn_varlen_func, True),
            per_sequence(zigzag),
            True,
            True,
        ),
    }
    for causal in (True, False):
        word = "causal" if causal else "full"
        found[f"ring, {word}"] = (dense(package.ring_flash_attn_func, causal), contiguous, False, causal)
        ring = packed(package.ring_flash_attn_varlen_func, causal)
        found[f"ring varlen, {word}"] = (ring, per_sequence(contiguous), True, causal)
        found[f"llama3 varlen, {word}"] = (llama3(causal), contiguous, True, causal)
    return found


def errors_of(case: tuple, rank: int, world: int, dtype: torch.dtype, device: str) -> list[float]:
    """Largest errors of out, dq, dk, dv on this process, relative to the largest exact value."""
    attention, shard, is_packed, causal = case
    torch.manual_seed(0)
    leading = (sum(LENGTHS),) if is_packed else (BATCH, SEQLEN)
    dim = len(leading) - 1
    # Rounded to the dtype first, so that both sides start from the same numbers.
    q, k, v, dout = (
        torch.randn(*leading, heads, HEAD_DIM).to(dtype).double() for heads in (NHEADS, NHEADS_K, NHEADS_K, NHEADS)
    )
    exact_inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = (whole_packed if is_packed else whole)(*exact_inputs, causal)
    exact_all = [exact, *torch.autograd.grad(exact, exact_inputs, dout)]
    inputs = [shard(x, rank, world, dim).to(dtype).contiguous().to(device).requires_grad_() for x in (q, k, v)]
    out = attention(*inputs)
    got = [out, *torch.autograd.grad(out, inputs, shard(dout, rank, world, dim).to(dtype).contiguous().to(device))]
    return [
        float((a.detach().cpu().double() - shard(b.detach(), rank, world, dim)).abs().max() / b.detach().abs().max())
        for a, b in zip(got, exact_all)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", help="file for the errors, as JSON")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    # Half precision only: the package accumulates gradients in .to(float32) of a buffer, in fp32 the buffer itself.
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", timeout=timedelta(minutes=2))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{rank}" if options.device == "cuda" else "cpu"
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    package = ring_flash_attn()
    import flash_attn_compat

    errors = {}
    for name, case in cases(package, rank, world, device).items():
        worst = torch.tensor(errors_of(case, rank, world, getattr(torch, options.dtype), device), device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        errors[name] = dict(zip(("out", "dq", "dk", "dv"), worst.tolist()))
    calls = torch.tensor(sum(flash_attn_compat.backend_counts().values()), device=device)
    dist.all_reduce(calls)
    if rank == 0:
        with open(options.output, "w") as file:
            json.dump({"errors": errors, "calls": int(calls), "world": world}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
