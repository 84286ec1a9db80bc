"""What sdpa does about the versions of PyTorch's CPU kernel."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat import flash_attn_func, use_backend
from flash_attn_compat.backends import sdpa


@pytest.mark.parametrize("window_size", [(-1, -1), (9, 3)])
def test_key_heads_are_repeated_where_the_kernel_cannot_share_them(monkeypatch, window_size):
    q, k, v = torch.randn(2, 40, 4, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)
    found = {}
    for name, shares in (("sdpa", False), ("chunked", True)):
        monkeypatch.setattr(sdpa, "_SHARES_KEY_HEADS", shares)
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        with use_backend(name):
            out = flash_attn_func(*inputs, window_size=window_size)
            found[name] = (out, *torch.autograd.grad(out.square().sum(), inputs))
    for ours, expected in zip(*found.values()):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
