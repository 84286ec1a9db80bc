"""DeepSpeed's Ulysses, unmodified, in two processes over gloo: each has half the heads of the whole sequence."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.interpreters import forked_group, free_port
from tests.plain import attention

SHAPE = (2, 24, 4, 16)  # of the whole: batch, seqlen, heads, head_dim


def whole(name: str) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(ord(name)), dtype=torch.float64)


def worker(rank: int, port: int, output: str) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    import flash_attn_compat

    flash_attn_compat.patch()
    import deepspeed
    import torch.distributed as dist
    from deepspeed.sequence.layer import DistributedAttention
    from flash_attn import flash_attn_func

    deepspeed.init_distributed("gloo", verbose=False)
    q, k, v = (whole(name).chunk(2, dim=1)[rank].clone().requires_grad_() for name in "qkv")
    out = DistributedAttention(flash_attn_func, dist.group.WORLD)(q, k, v, 0, causal=True)
    out.backward(whole("d").chunk(2, dim=1)[rank])
    served = sum(flash_attn_compat.backend_counts().values())
    torch.save({"found": [out.detach(), q.grad, k.grad, v.grad], "served": served}, f"{output}{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_ulysses_gives_output_and_gradients_of_the_whole_sequence(tmp_path: Path) -> None:
    forked_group(worker, free_port(), str(tmp_path / "found"))
    parts = [torch.load(tmp_path / f"found{rank}") for rank in range(2)]
    assert all(part["served"] > 0 for part in parts)
    leaves = [whole(name).requires_grad_() for name in "qkv"]
    out = attention(*leaves, window=(-1, 0))
    right = [out.detach(), *torch.autograd.grad(out, leaves, whole("d"))]
    for found, expected in zip(zip(*(part["found"] for part in parts)), right, strict=True):
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)
