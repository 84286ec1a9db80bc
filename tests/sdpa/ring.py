"""One of two processes of a ring: PyTorch's context parallelism, its attention served by ours. See test_on_gpu.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn_compat import backend_counts, reset_backend_counts
from flash_attn_compat.torch_sdpa.policy import Policy
from tests.sdpa import originals


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2,))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 4, 512, 64, generator=generator).to("cuda", torch.float16) for _ in range(3)]
    for causal in (False, True):
        leaves = [x.clone().requires_grad_() for x in whole]
        right = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        (dv,) = torch.autograd.grad(right.float().square().sum(), leaves[2])
        parts, wanted = [x.clone() for x in whole], [right.detach().clone(), dv.clone()]
        reset_backend_counts()
        ring = context_parallel(mesh, buffers=[*parts, *wanted], buffer_seq_dims=[2] * 5)
        with originals.override_on(Policy(least_products=0)), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), ring:
            for part in parts:
                part.requires_grad_()
            out = F.scaled_dot_product_attention(*parts, is_causal=causal)
            (found,) = torch.autograd.grad(out.float().square().sum(), parts[2])
            for got, exact in ((out.detach(), wanted[0]), (found, wanted[1])):
                error = float((got.double() - exact.double()).abs().max())
                assert error <= 2e-2 * max(1.0, float(exact.abs().max())), (causal, error)
            for part in parts:
                part.requires_grad_(False)
        assert backend_counts().get("fused", 0) >= 2, backend_counts()
    print("right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    main()
