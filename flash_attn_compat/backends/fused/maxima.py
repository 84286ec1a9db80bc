"""bf16 where the tensor cores take fp16: the launch that finds by which power of two each head is scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, params, variants
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine.call import AttentionCall


class Maxima:
    """Plan of ``absmax``: the largest finite magnitudes of q, k, v and, with ``dout``, of that too."""

    def __init__(self, call: AttentionCall, kind: Kind, target: Target, dout: Tensor | None = None) -> None:
        self.device, self.place = call.q.get_device(), call.q.device
        _, self.kernel = launcher.loaded(variants.absmax, kind, target, self.device)
        heads = call.batch * call.nheads_k
        longest = max(launcher.longest_rows(call), launcher.longest_keys(call))
        self.splits = variants.absmax_splits(longest, heads, launcher.processors(self.device))
        self.size, self.blocks = 4 * heads * self.splits, (3 if dout is None else 4) * heads * self.splits
        fields = {**launcher.described(call), "absmax_splits": self.splits}
        if dout is not None:
            fields["dout_s"] = launcher.strides(dout)
        self.pack, self.template = params.template(fields, 23)

    def run(self, tensors: tuple[int, ...], rest: tuple[int, ...], dout: int = 0) -> Tensor:
        """(4, batch, nheads_k, splits) fp32 for the addresses of launcher.Inputs."""
        maxima = torch.empty(self.size, dtype=torch.float32, device=self.place)
        nothing = (0,) * 8
        addresses = *tensors, 0, 0, 0, *rest, maxima.data_ptr(), *nothing, dout
        self.pack(launcher.arguments.buffer, 0, *addresses, self.template)
        launcher.submit(self.kernel, self.blocks, self.device)
        return maxima
