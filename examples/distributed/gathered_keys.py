"""A sequence cut over processes; each process gathers all keys and values. Plain PyTorch, no engine.

common.py says how to start it. It takes memory for all keys of one layer. Masks are aligned at the bottom right, so a
process passes the keys up to its own last row, and plain ``causal=True`` or a window.
"""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
from flash_attn import flash_attn_func
from torch import Tensor


class Gather(torch.autograd.Function):
    """Gather the rows of all processes. A row's gradient is the sum of its gradients in all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.float()  # fp32: sum the processes' shares before rounding
        dist.all_reduce(total)
        return common.contiguous(total).to(gradient.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of this process's rows. q, k, v: (batch, rows, heads, head_dim) of these rows"""
    past = q.shape[1] * (dist.get_rank() + 1)  # no row of this process sees later keys
    keys, values = (Gather.apply(x.contiguous())[:, :past] for x in (k, v))
    return flash_attn_func(q, keys, values, causal=True)


def main() -> None:
    device = common.start()
    common.check("keys gathered", attention, common.contiguous, torch.float16, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
