"""layers.rotary of flash-attn 2.6: RotaryEmbedding's fifth argument is pos_idx_in_fp32."""

from __future__ import annotations

import torch

from flash_attn_compat.layers import rotary as _current
from flash_attn_compat.layers.rotary import *  # noqa: F403


class RotaryEmbedding(_current.RotaryEmbedding):  # type: ignore[no-redef]  # in place of 2.8's
    """`flash_attn_compat.layers.rotary.RotaryEmbedding` with the arguments in the order of 2.6."""

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None,
        pos_idx_in_fp32: bool = True, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, base, interleaved, scale_base, device, pos_idx_in_fp32)
