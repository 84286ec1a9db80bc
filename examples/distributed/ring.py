"""A sequence cut over processes; keys and values go around in a ring. Engines: ring-flash-attn and yunchang.

common.py says how to start it. The processes share the memory and work of attention equally.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import common
import torch
import torch.distributed as dist

# The adapter of ring-flash-attn 0.1.8 fails to import beside transformers 5. No code below uses it.
adapters = ModuleType("ring_flash_attn.adapters")
adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
sys.modules[adapters.__name__] = adapters

import ring_flash_attn
import yunchang
from yunchang.kernels import AttnType


def main() -> None:
    device = common.start()
    zigzag = partial(ring_flash_attn.zigzag_ring_flash_attn_func, causal=True)
    # Not in fp32: there ring-flash-attn overwrites its gradients, with any flash-attn.
    common.check("ring-flash-attn, zigzag", zigzag, common.zigzag, torch.float16, device)

    yunchang.set_seq_parallel_pg(1, dist.get_world_size(), dist.get_rank(), dist.get_world_size())  # one ring
    layer = yunchang.LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.FA)
    common.check("yunchang, zigzag", partial(layer, causal=True), common.zigzag, torch.bfloat16, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
