"""Images to patch embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn

from flash_attn_compat.ops.fused_dense import FusedDense


class PatchEmbed(nn.Module):
    """Cut an image into patches and project each by one linear layer (Dosovitskiy et al. 2021).

    The interface is timm's; the projection is a linear layer over (channel, row, column), with a 2-D weight.

    Args:
        img_size, patch_size: pixels, one number or (height, width).
        norm_layer: called with embed_dim.
        flatten: return (batch, patches, embed_dim) rather than (batch, rows, columns, embed_dim).
        fused_bias_fc: use `FusedDense`; the values are the same.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        norm_layer: Callable[[int], nn.Module] | None = None,
        flatten: bool = True,
        bias: bool = True,
        fused_bias_fc: bool = False,
    ) -> None:
        super().__init__()
        self.img_size = _pair(img_size)
        self.patch_size = _pair(patch_size)
        self.grid_size = (self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1])
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.flatten = flatten
        linear = FusedDense if fused_bias_fc and bias else nn.Linear
        self.proj = linear(in_chans * self.patch_size[0] * self.patch_size[1], embed_dim, bias=bias)
        self.norm = norm_layer(embed_dim) if norm_layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, in_chans, height, width), of exactly img_size."""
        for side, ours, theirs in zip(("height", "width"), self.img_size, x.shape[-2:]):
            torch._assert(ours == theirs, f"Input image {side} ({theirs}) doesn't match model ({ours}).")
        rows, columns = self.patch_size
        patches = rearrange(x, "b c (h p1) (w p2) -> b h w (c p1 p2)", p1=rows, p2=columns)
        out: Tensor = self.proj(patches)
        normed: Tensor = self.norm(out.flatten(1, 2) if self.flatten else out)
        return normed


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
