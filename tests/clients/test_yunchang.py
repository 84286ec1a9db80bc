"""yunchang (long-context-attention) in two processes over gloo: ring, zigzag and Ulysses against the whole sequence."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.clients.ring_worker import BATCH, HEAD_DIM, NHEADS, SEQLEN, contiguous, whole, zigzag
from tests.interpreters import forked_group

WORLD = 2
# Name, processes of Ulysses and of the ring, implementation, how a tensor is cut, causal, whether backward.
CASES = (
    ("ring, causal", 1, WORLD, "basic", contiguous, True, True),
    ("ring, full", 1, WORLD, "basic", contiguous, False, True),
    ("zigzag, causal", 1, WORLD, "zigzag", zigzag, True, True),
    # Backward, its ring of one process sends to itself, which gloo cannot.
    ("ulysses, causal", WORLD, 1, "basic", contiguous, True, False),
)


def worker(rank: int, store: str) -> None:
    import flash_attn_compat

    flash_attn_compat.patch()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    import yunchang
    from yunchang.kernels import AttnType

    for name, ulysses, ring, implementation, shard, causal, backward in CASES:
        yunchang.set_seq_parallel_pg(ulysses, ring, rank, WORLD)
        attention = yunchang.LongContextAttention(ring_impl_type=implementation, attn_type=AttnType.FA)
        torch.manual_seed(0)
        q, k, v, dout = (torch.randn(BATCH, SEQLEN, NHEADS, HEAD_DIM).bfloat16().double() for _ in range(4))
        exact_inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        exact = [whole(*exact_inputs, causal)]
        inputs = [shard(x, rank, WORLD, 1).bfloat16().contiguous().requires_grad_() for x in (q, k, v)]
        got = [attention(*inputs, causal=causal)]
        if backward:
            exact += torch.autograd.grad(exact[0], exact_inputs, dout)
            got += torch.autograd.grad(got[0], inputs, shard(dout, rank, WORLD, 1).bfloat16().contiguous())
        for a, b in zip(got, exact):
            error = (a.detach().double() - shard(b.detach(), rank, WORLD, 1)).abs().max() / b.detach().abs().max()
            # bf16 rounds to 4e-3 and each partial gradient is rounded; a mistake would show as 0.1 and more.
            assert error <= 2e-2, f"{name}: {float(error):.1e}"
    assert sum(flash_attn_compat.backend_counts().values()) >= 2 * len(CASES)


@pytest.mark.skipif(importlib.util.find_spec("yunchang") is None, reason="yunchang is not installed")
def test_every_variant_gives_output_and_gradients_of_the_whole_sequence(tmp_path: Path) -> None:
    forked_group(worker, str(tmp_path / "store"), world=WORLD)
