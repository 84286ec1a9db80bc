"""A sequence cut over processes, which exchange rows for heads around attention: DeepSpeed's Ulysses.

common.py says how to start it. Each process computes some heads of the whole sequence: no more processes than heads.
"""

from __future__ import annotations

from functools import partial

import common
import torch
import torch.distributed as dist
from deepspeed import init_distributed
from deepspeed.sequence.layer import DistributedAttention
from flash_attn import flash_attn_func


def main() -> None:
    device = common.start()
    init_distributed(dist.get_backend(), verbose=False)
    layer = DistributedAttention(partial(flash_attn_func, causal=True), dist.group.WORLD)
    attention = lambda q, k, v: layer(q, k, v, 0)  # noqa: E731  # 0: the batch axis
    common.check("DeepSpeed Ulysses", attention, common.contiguous, torch.float16, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
