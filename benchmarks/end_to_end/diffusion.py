"""Blocks of a diffusion transformer, whose attention goes through diffusers."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.end_to_end.program import NotHere, Prepared, Setting

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention and MLP, modulated by the time step's embedding."""

    def __init__(self, nheads: int, head_dim: int) -> None:
        super().__init__()
        width = nheads * head_dim
        self.nheads = nheads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, time: Tensor, attend: Attend) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(F.silu(time))[:, None].chunk(6, -1)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        q, k, v = self.qkv(normed).unflatten(-1, (3, self.nheads, -1)).unbind(2)
        x = x + gate * self.out(attend(q, k, v).flatten(2))
        out: Tensor = x + mlp_gate * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + mlp_scale) + mlp_shift)
        return out


def prepare(setting: Setting) -> Prepared:
    """Four blocks over image tokens and, behind them, a text that is padded: `flash_varlen`, or `native` and a mask."""
    if importlib.util.find_spec("diffusers") is None:
        raise NotHere("diffusers is not installed")
    from diffusers.models import attention_dispatch

    nheads, head_dim, image, text = (2, 16, 24, 8) if setting.tiny else (24, 64, 4096, 256)
    torch.manual_seed(0)
    with torch.device(setting.device):
        blocks = nn.ModuleList(Block(nheads, head_dim) for _ in range(4)).to(setting.dtype)
        x = torch.randn(2, image + text, nheads * head_dim, dtype=setting.dtype)
        time = torch.randn(2, nheads * head_dim, dtype=setting.dtype)
        used = torch.tensor([image + text, image + text // 3])
        mask = torch.arange(image + text) < used[:, None]
    is_flash = setting.implementation.is_flash
    backend = "flash_varlen" if is_flash else "native"
    given = mask if is_flash else mask[:, None, None]
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    if setting.implementation.kind == "eager":
        around = lambda: sdpa_kernel(SDPBackend.MATH)  # noqa: E731  the other branch's name

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention_dispatch.dispatch_attention_fn(q, k, v, attn_mask=given)
        return out

    @torch.inference_mode()
    def run() -> Tensor:
        hidden = x
        with attention_dispatch.attention_backend(backend), around():
            for block in blocks:
                hidden = block(hidden, time, attend)
        return hidden

    return Prepared(run, lambda hidden: {"hidden": hidden[mask][::8]})
