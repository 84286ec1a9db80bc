"""A sequence cut over GPUs by PyTorch's context parallelism, which makes a ring of F.scaled_dot_product_attention.

common.py says how to start it. It needs GPUs: the ring has only PyTorch's CUDA operators. Any other attention inside,
flash_attn too, would take this process's rows for the whole sequence, without an error.
"""

from __future__ import annotations

import sys

import common
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("PyTorch's ring has no operator for a CPU: without gradients its answers there are wrong")
    device = common.start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    positions = torch.arange(common.SEQLEN, device=device)  # token ids or labels are cut the same way
    ring = context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0])
    common.check("torch's context parallelism", attention, common.zigzag, torch.float16, device, ring)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
