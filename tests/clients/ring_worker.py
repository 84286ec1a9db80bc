"""ring-flash-attn, unmodified, on this package: every variant against the whole sequence in fp64.

On two GPUs over NCCL, one line for each case; set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for Turing's code:

    flash-attn-compat run -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m tests.clients.ring_worker --device cuda

test_examples.py runs it on the CPU over gloo.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.forms.plain import attention

NHEADS, NHEADS_K, BATCH = 4, 2, 2
# Largest errors of the output and of a gradient, as parts of the largest exact value. Rounding once costs 5e-4 in fp16
# and 4e-3 in bf16, and ring attention rounds each partial gradient, dq to bf16 in any case; a mistake shows as 0.1.
BOUNDS = {torch.float16: (1e-3, 5e-3), torch.bfloat16: (8e-3, 3e-2)}
Function = Callable[..., Any]


class Case(NamedTuple):
    """attention(q, k, v) of a shard, the cut of the sequence into shards, and the attention of the whole sequence."""

    attention: Function
    cut: Function
    packed: bool
    causal: bool


def ring_flash_attn() -> Any:
    """The package as it came. Its adapter for transformers 4 must find one to import; attention does not use it."""
    for name in ("transformers", "transformers.modeling_flash_attention_utils", "transformers.modeling_utils"):
        sys.modules[name] = types.ModuleType(name)
    utilities = sys.modules["transformers.modeling_flash_attention_utils"]
    utilities.is_flash_attn_greater_or_equal_2_10 = lambda: True  # type: ignore[attr-defined]
    sys.modules["transformers"].modeling_flash_attention_utils = utilities  # type: ignore[attr-defined]
    return importlib.import_module("ring_flash_attn")


# How a tensor is cut: cut(x, dim), the part of this process.


def contiguous(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def zigzag(x: Tensor, dim: int) -> Tensor:
    rank, chunks = dist.get_rank(), x.chunk(2 * dist.get_world_size(), dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


def striped(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(dim, (-1, dist.get_world_size())).select(dim + 1, dist.get_rank())


def cases(package: Any, lengths: list[int], device: str) -> dict[str, Case]:
    """``lengths`` of packed sequences are divisible by twice the processes, as zigzag asks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)

    def each(cut: Function) -> Function:
        return lambda x, dim: torch.cat([cut(part, dim) for part in x.split(lengths, dim)], dim)

    def packed(function: Function, causal: bool) -> Function:
        return lambda q, k, v: function(q, k, v, starts // world, max(lengths) // world, causal=causal)

    def llama3(causal: bool) -> Function:
        *given, part = package.llama3_flash_attn_prepare_cu_seqlens(starts, causal, rank, world)
        return lambda q, k, v: package.llama3_flash_attn_varlen_func(
            q, k, v, *given, heads_k_stride=1, local_k_slice=part, causal=causal
        )

    def dense(function: Function, causal: bool) -> Function:
        return lambda q, k, v: function(q, k, v, causal=causal)

    found = {
        "zigzag, causal": Case(dense(package.zigzag_ring_flash_attn_func, True), zigzag, False, True),
        "stripe, causal": Case(dense(package.stripe_flash_attn_func, True), striped, False, True),
        "zigzag varlen, causal": Case(
            packed(package.zigzag_ring_flash_attn_varlen_func, True), each(zigzag), True, True
        ),
    }
    for causal, word in ((True, "causal"), (False, "full")):
        ring = packed(package.ring_flash_attn_varlen_func, causal)
        found[f"ring, {word}"] = Case(dense(package.ring_flash_attn_func, causal), contiguous, False, causal)
        found[f"ring varlen, {word}"] = Case(ring, each(contiguous), True, causal)
        found[f"llama3 varlen, {word}"] = Case(llama3(causal), contiguous, True, causal)
    return found


def check(
    case: Case, lengths: list[int], head_dim: int, dtype: torch.dtype, bounds: tuple[float, float],
    device: str = "cpu", nheads_k: int = NHEADS_K, backward: bool = True,
) -> str:  # fmt: skip
    """The errors of this process; raises where one is beyond its bound."""
    leading, dim = ((sum(lengths),), 0) if case.packed else ((BATCH, sum(lengths)), 1)
    generator = torch.Generator().manual_seed(0)
    # Rounded to the dtype first, so that both sides start from the same numbers.
    q, k, v, dout = (
        torch.randn(*leading, heads, head_dim, generator=generator).to(dtype).to(device).double()
        for heads in (NHEADS, nheads_k, nheads_k, NHEADS)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    window = (-1, 0 if case.causal else -1)
    parts = zip(*(x.split(lengths) for x in leaves)) if case.packed else [leaves]
    wholes = [attention(*(x[None] if case.packed else x for x in part), window=window) for part in parts]
    exact = torch.cat(wholes, dim=1)[0] if case.packed else wholes[0]

    def local(x: Tensor) -> Tensor:
        return case.cut(x.detach(), dim).to(dtype).contiguous()

    inputs = [local(x).requires_grad_() for x in (q, k, v)]
    out = case.attention(*inputs)
    found, expected = [out.detach()], [exact]
    if backward:
        found += torch.autograd.grad(out, inputs, local(dout))
        expected += torch.autograd.grad(exact, leaves, dout)
    told = []
    for name, ours, right in zip(("out", "dq", "dk", "dv"), found, expected):
        error = float((ours.double() - case.cut(right.detach(), dim)).abs().max() / right.detach().abs().max())
        told.append(f"{name} {error:.1e}")
        assert error <= bounds[name != "out"], told  # NaN is not
    return " ".join(told)


def check_all(device: str, dtype: torch.dtype) -> None:
    import flash_attn_compat

    lengths, head_dim = ([32, 8, 24], 16) if device == "cpu" else ([1024, 256, 768], 64)
    for name, case in cases(ring_flash_attn(), lengths, device).items():
        flash_attn_compat.reset_backend_counts()
        told = check(case, lengths, head_dim, dtype, BOUNDS[dtype], device)
        served = {backend: calls for backend, calls in flash_attn_compat.backend_counts().items() if calls}
        assert sum(served.values()) >= 2, f"{name}: served by others than us"  # a forward and a backward at least
        print(f"process {dist.get_rank()}: {name:22} {told}  by {served}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cpu: over gloo, cuda: over NCCL")
    # Half precision only: ring-flash-attn accumulates gradients in .to(float32) of a buffer, in fp32 the buffer itself.
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: " + __doc__.split("\n\n")[2].strip())
    torch.set_num_threads(1)
    device = "cpu"
    if options.device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", timeout=timedelta(minutes=20))
    # The first operation creates the communicator, and ring attention's own first one is no collective.
    dist.all_reduce(torch.zeros(1, device=device))
    check_all(device, getattr(torch, options.dtype))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
