"""bf16 where the tensor cores take fp16: the launch that finds by which power of two each head is scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, params, variants
from flash_attn_compat.backends.fused.launcher import Inputs, Launch
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine.call import AttentionCall


class Maxima:
    """Plan of ``absmax``: the largest finite magnitudes of q, k and v. fields: of struct Params, for the call."""

    def __init__(self, call: AttentionCall, kind: Kind, inputs: Inputs, fields: dict[str, params.Value]) -> None:
        heads, longest = call.batch * call.nheads_k, max(launcher.longest_rows(call), launcher.longest_keys(call))
        splits = variants.absmax_splits(longest, heads, launcher.processors(inputs.device))
        fields = {**fields, "splits": splits}
        given = *inputs.names, "seqlen_k", "absmax"
        self.shape, self.place = (3, call.batch, call.nheads_k), call.q.device
        self.launch = Launch(variants.absmax(kind), inputs.device, 3 * heads * splits, fields, given)

    def run(self, addresses: list[int], seqlen_k: int) -> Tensor:
        """(3, batch, nheads_k): the bits of fp32 numbers. addresses: of the inputs; seqlen_k: of struct Params"""
        maxima = zeros(self.shape, self.place)
        self.launch(*addresses, seqlen_k, maxima.data_ptr())
        return maxima


def zeros(shape: tuple[int, int, int], place: torch.device) -> Tensor:
    """int32, from which a kernel raises maxima."""
    return torch.empty(shape, dtype=torch.int32, device=place).zero_()
