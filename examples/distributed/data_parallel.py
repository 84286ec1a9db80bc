"""A batch cut over processes, with all weights (DDP) or a share (FSDP2) in each. Attention needs no change.

common.py says how to start it.
"""

from __future__ import annotations

import copy

import common
import torch
import torch.distributed as dist
from flash_attn import flash_attn_qkvpacked_func
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WIDTH, STEPS = common.HEADS * common.HEAD_DIM, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like x (batch, seqlen, width). On a GPU attention runs in fp16."""
        qkv = self.qkv(x).unflatten(-1, (3, common.HEADS, common.HEAD_DIM))
        mixed = flash_attn_qkvpacked_func(qkv.half() if x.is_cuda else qkv, causal=True)
        return x + self.out(mixed.flatten(2).to(x.dtype))


def train(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check(name: str, found: nn.Module, expected: nn.Module) -> None:
    """Compare each weight with the weight of one process that trained on the whole batch."""
    whole = (x.detach() for x in found.parameters())
    whole = (x.full_tensor() if isinstance(x, DTensor) else x for x in whole)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(whole, expected.state_dict().values()))
    if dist.get_rank() == 0:
        print(f"{name:32} weights {error:.1e}", flush=True)
    if not error < (1e-3 if torch.cuda.is_available() else 1e-5):
        raise SystemExit(f"{name}: not the weights of one process")


def main() -> None:
    device = common.start()
    torch.manual_seed(0)
    alone = nn.Sequential(Layer(), Layer()).to(device)
    x = torch.randn(2 * dist.get_world_size(), 64, WIDTH).to(device)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]

    replicated = DistributedDataParallel(copy.deepcopy(alone))
    sharded = copy.deepcopy(alone)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)

    train(alone, x)
    train(replicated, mine)
    check("DDP", replicated.module, alone)
    train(sharded, mine)
    check("FSDP2", sharded, alone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
