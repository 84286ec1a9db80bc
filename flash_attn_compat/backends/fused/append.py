"""New keys and values into a cache, and rotated rows of q, by a kernel of its own: where the decode kernel cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, params, trial, variants
from flash_attn_compat.backends.fused.launcher import Inputs, Launch
from flash_attn_compat.engine.append import Append
from flash_attn_compat.engine.call import AttentionCall

_THREADS, _PIECE = 128, 8


class Writer:
    """Plan of the launch that writes ``new`` keys; ``call`` has the lengths before the append, if any.

    fields: of struct Params, as the call and the new keys give them
    """

    def __init__(self, call: AttentionCall, new: Append, inputs: Inputs, fields: dict[str, params.Value]) -> None:
        self.rotates = new.rotary_cos is not None
        read = call.q if self.rotates else None, call.k, call.v, *new[:4]
        self.kind = launcher.kind_of(call, launcher.vector_size(read, in_place=True))
        self.q_shape, self.dtype, self.place = call.q.shape, call.q.dtype, call.q.device
        batch, seqlen_new = new.k.shape[:2]
        rows = 2 * batch * seqlen_new * call.nheads_k + self.rotates * batch * call.nheads * call.q.shape[1]
        pieces = rows * -(-max(call.q.shape[-1], call.v.shape[-1]) // _PIECE)
        blocks = max(1, min(-(-pieces // _THREADS), 32 * launcher.processors(inputs.device)))
        fields = {**fields, "q_rotated_s": launcher.contiguous_strides(call.q.shape)}
        given = *inputs.names, "seqlen_k", "q_rotated"
        self.launch = Launch(variants.append(self.kind), inputs.device, blocks, fields, given)

    def run(self, addresses: list[int], seqlen_k: int) -> Tensor | None:
        """q rotated, or None where that was not asked for. addresses: of the inputs; seqlen_k: of struct Params"""
        rotated = torch.empty(self.q_shape, dtype=self.dtype, device=self.place) if self.rotates else None
        self.launch(*addresses, seqlen_k, 0 if rotated is None else rotated.data_ptr())
        return rotated

    def try_first(self, device: int) -> None:
        """Raises KernelError if the kernel turns out to be wrong."""

        def run_tiny(call: AttentionCall, new: Append) -> dict[str, Tensor]:
            inputs = Inputs(call, new)
            tiny = Writer(call, new, inputs, launcher.described(call) | launcher.described_new(new))
            addresses = inputs.addresses(launcher.tensors_of(call, None, new))
            rotated = tiny.run(addresses, launcher.longest_keys(call))
            return {"q": call.q if rotated is None else rotated}

        trial.check(
            (self.launch.variant,),
            device,
            lambda: trial.of_forward(self.kind, self.place, run_tiny, few_rows=True, appends=True),
        )
