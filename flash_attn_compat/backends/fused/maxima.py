"""bf16 where the tensor cores take fp16: the launch that finds by which power of two each head is scaled."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, params, variants
from flash_attn_compat.backends.fused.launcher import address, reach
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine.call import AttentionCall

_FLOAT, _INT = torch.float32, torch.int32


class Maxima:
    """Plan of ``absmax``: the largest finite magnitudes of q, k, v and, with ``dout``, of that too."""

    def __init__(self, call: AttentionCall, kind: Kind, target: Target, dout: Tensor | None = None) -> None:
        self.device, self.place = call.q.get_device(), call.q.device
        _, self.kernel = launcher.loaded(variants.absmax, kind, target, self.device)
        heads = call.batch * call.nheads_k
        longest = max(launcher.longest_rows(call), launcher.longest_keys(call))
        self.splits = variants.absmax_splits(longest, heads, launcher.processors(self.device))
        self.size, self.blocks = 4 * heads * self.splits, (3 if dout is None else 4) * heads * self.splits
        self.sizes = tuple(map(reach, (call.q, call.k, call.v, dout)))
        self.starts, self.lengths, self.table = 4 * (call.batch + 1), 4 * call.batch, reach(call.block_table)
        fields = {**launcher.described(call), "absmax_splits": self.splits}
        if dout is not None:
            fields["dout_s"] = launcher.strides(dout)
        self.template = params.pack(fields)

    def run(self, call: AttentionCall, dout: Tensor | None = None) -> Tensor:
        """(4, batch, nheads_k, splits) fp32."""
        device, dtype, starts, lengths = self.device, call.q.dtype, self.starts, self.lengths
        q_size, k_size, v_size, dout_size = self.sizes
        maxima = torch.empty(self.size, dtype=_FLOAT, device=self.place)
        cu_q, cu_k, used, leftpad = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.leftpad_k
        table = call.block_table
        arguments = launcher.arguments
        arguments.view[:] = self.template
        params.BACKWARD_ADDRESSES.pack_into(
            arguments.buffer, 0,
            address("q", call.q, dtype, device, q_size),
            address("k", call.k, dtype, device, k_size),
            address("v", call.v, dtype, device, v_size),
            0, 0, 0,
            0 if cu_q is None else address("cu_seqlens_q", cu_q, _INT, device, starts),
            0 if cu_k is None else address("cu_seqlens_k", cu_k, _INT, device, starts),
            0 if used is None else address("seqused_k", used, _INT, device, lengths),
            0 if leftpad is None else address("leftpad_k", leftpad, _INT, device, lengths),
            0 if table is None else address("block_table", table, _INT, device, self.table),
            0, 0, maxima.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0,
            0 if dout is None else address("dout", dout, dtype, device, dout_size),
            0, 0, 0, 0,
        )  # fmt: skip
        launcher.submit(self.kernel, self.blocks, device)
        return maxima
