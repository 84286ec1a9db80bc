"""bf16 where the tensor cores take fp16: the launch that finds by which power of two each head is scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, params, variants
from flash_attn_compat.backends.fused.launcher import Inputs, Launch
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine.call import AttentionCall


class Maxima:
    """Plan of ``absmax``: the largest finite magnitudes of q, k, v and, in a backward, of dout too."""

    def __init__(self, call: AttentionCall, kind: Kind, inputs: Inputs, fields: dict[str, params.Value]) -> None:
        """inputs, fields: of the launches that will read them; the number of splits goes into ``fields``"""
        self.place, device = call.q.device, inputs.device
        heads = call.batch * call.nheads_k
        longest = max(launcher.longest_rows(call), launcher.longest_keys(call))
        splits = variants.absmax_splits(longest, heads, launcher.processors(device))
        fields["absmax_splits"] = splits
        tensors = 4 if "dout" in inputs.names else 3
        self.size = 4 * heads * splits
        self.launch = Launch(variants.absmax(kind), device, tensors * heads * splits, fields, (*inputs.names, "absmax"))

    def run(self, addresses: list[int]) -> Tensor:
        """(4, batch, nheads_k, splits) fp32 for the addresses of the inputs."""
        maxima = torch.empty(self.size, dtype=torch.float32, device=self.place)
        self.launch(*addresses, maxima.data_ptr())
        return maxima
