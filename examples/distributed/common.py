"""Shared by these examples: the start of a process, a problem with a known answer, and the comparison with it.

Start an example on as many processes as there are GPUs, or on two without a GPU:

    flash-attn-compat run -m torch.distributed.run --standalone --nproc-per-node 2 examples/distributed/ring.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 512, 4, 64
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def start() -> torch.device:
    """Join the processes that torchrun has started: over NCCL on GPUs, over gloo on a CPU."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    # The first operation makes the communicator. A ring's own first operation is not a collective, and cannot.
    dist.all_reduce(torch.zeros(1, device=device))
    return device


def contiguous(x: Tensor) -> Tensor:
    """Return this process's rows of x (batch, seqlen, ...), one stretch."""
    return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def zigzag(x: Tensor) -> Tensor:
    """Return one stretch from the front and one from the back: under a causal mask, all processes have equal work."""
    rank, chunks = dist.get_rank(), x.chunk(2 * dist.get_world_size(), dim=1)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)


def check(
    name: str,
    attention: Attention,
    cut: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    device: torch.device,
    around: AbstractContextManager[object] | None = None,
) -> None:
    """Compare causal attention over all processes, and its gradients, with the whole sequence in fp64.

    attention: takes and returns this process's rows (batch, rows, heads, head_dim), as cut by ``cut``
    around: a context for the attention and its backward
    """
    generator = torch.Generator().manual_seed(0)
    shape = BATCH, SEQLEN, HEADS, HEAD_DIM
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(4))

    whole = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole), is_causal=True)
    expected = [exact.transpose(1, 2), *torch.autograd.grad(exact, whole, dout.double().transpose(1, 2))]

    part = [cut(x).contiguous().requires_grad_() for x in (q, k, v)]
    with around or nullcontext():
        out = attention(*part)
        found = [out, *torch.autograd.grad(out, part, cut(dout).contiguous())]

    errors = torch.stack([(ours - cut(right)).abs().max() / right.abs().max() for ours, right in zip(found, expected)])
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    told = "  ".join(f"{part} {error:.1e}" for part, error in zip(("out", "dq", "dk", "dv"), errors.tolist()))
    if dist.get_rank() == 0:
        print(f"{name:32} {told}", flush=True)
    # Each partial result is rounded once; a mistake gives errors of 0.1 and more.
    if not bool((errors < 10 * torch.finfo(dtype).eps).all()):
        raise SystemExit(f"{name}: not the answer of the whole sequence")
