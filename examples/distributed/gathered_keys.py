"""A sequence cut over processes, keys and values gathered by each: plain PyTorch, no engine.

common.py says how to start it. It takes memory for all keys of one layer. Masks are aligned at the bottom right, so a
process that hands over the keys up to its own last row need say no more than causal, or a window.
"""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
from flash_attn import flash_attn_func
from torch import Tensor


class Gather(torch.autograd.Function):
    """The rows of all processes. The gradient of a row is the sum of what all processes have for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.float()  # processes' shares are summed before they are rounded
        dist.all_reduce(total)
        return common.contiguous(total).to(gradient.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of this process's rows q (batch, rows, heads, head_dim); k and v are those of the same rows."""
    past = q.shape[1] * (dist.get_rank() + 1)  # later keys are in nobody's past here
    keys, values = (Gather.apply(x.contiguous())[:, :past] for x in (k, v))
    return flash_attn_func(q, keys, values, causal=True)


def main() -> None:
    device = common.start()
    common.check("keys gathered", attention, common.contiguous, torch.float16, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
