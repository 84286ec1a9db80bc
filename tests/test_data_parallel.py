"""Data parallel training, in two processes over gloo: the gradients of the whole batch."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import flash_attn_compat
from flash_attn_compat import flash_attn_qkvpacked_func
from tests.interpreters import forked_group, free_port
from tests.support import randn

BATCH, SEQLEN, HEADS, HEAD_DIM = 4, 6, 2, 8
WIDTH = HEADS * HEAD_DIM


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = flash_attn_qkvpacked_func(self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)), causal=True)
        assert isinstance(out, Tensor)
        return self.out(out.flatten(-2))


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer().double()


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    module(x).square().mean().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(layer())


def fsdp2() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = layer()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return module


WAYS = {"DDP": ddp, "FSDP2": fsdp2}


def process(rank: int, way: str, port: int) -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    dist.init_process_group("gloo")
    x = randn(BATCH, SEQLEN, WIDTH, dtype=torch.float64)
    expected = gradients(layer(), x)
    flash_attn_compat.reset_backend_counts()
    found = gradients(WAYS[way](), x[rank * BATCH // 2 :][: BATCH // 2])
    assert sum(flash_attn_compat.backend_counts().values()) == 1
    for one, other in zip(found, expected, strict=True):
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        torch.testing.assert_close(whole, other)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
def test_the_gradients_are_those_of_the_whole_batch(way: str) -> None:
    if way == "FSDP2" and not hasattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("PyTorch has this name from 2.6 on")
    forked_group(process, way, free_port())
