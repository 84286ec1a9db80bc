"""New keys and values into a cache, and rotated rows of q, by a kernel of its own: where the decode kernel cannot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, trial, variants
from flash_attn_compat.backends.fused.launcher import Inputs, Launch
from flash_attn_compat.engine.append import Append, by_operators
from flash_attn_compat.engine.call import AttentionCall

_THREADS, _PIECE = 128, 8


def append(call: AttentionCall, new: Append) -> Tensor:
    """Backend.append by the kernel; raises KernelError, before anything is written, where it cannot be used."""
    starts = new.cache_seqlens
    call = launcher.tidy(call)._replace(seqused_k=None if isinstance(starts, int) else starts)
    new = launcher.tidy_new(new)
    return launcher.planned("append", lambda: _make_plan(call, new), call, *new)(call, new)


def _make_plan(call: AttentionCall, new: Append) -> Callable[[AttentionCall, Append], Tensor]:
    q = () if new.rotary_cos is None else (call.q,)
    vec = launcher.vector_size((*q, call.k, call.v, *new[:4]), in_place=True)
    if not vec:
        return by_operators
    plan = Plan(call, new, vec)

    def run_tiny(call: AttentionCall, new: Append) -> dict[str, Tensor]:
        return {"q": Plan(call, new, vec).run(call, new)}

    tried = (plan.launch.variant,)
    trial.check(
        tried,
        plan.inputs.device,
        lambda: trial.of_forward(plan.kind, call.q.device, run_tiny, few_rows=True, appends=True),
    )
    return plan.run


class Plan:
    """``call`` has the lengths before the append as its seqused_k, or none where they are one number for all."""

    def __init__(self, call: AttentionCall, new: Append, vec: int) -> None:
        self.kind, self.inputs = launcher.kind_of(call, vec), Inputs(call, new)
        self.rotates = new.rotary_cos is not None
        batch, seqlen_new = new.k.shape[:2]
        fields = launcher.described(call) | launcher.described_new(new)
        fields["q_rotated_s"] = launcher.contiguous_strides(call.q.shape)
        if isinstance(new.cache_seqlens, int):
            fields["seqlen_k"] = new.cache_seqlens + seqlen_new
        rows = 2 * batch * seqlen_new * call.nheads_k + self.rotates * batch * call.nheads * call.q.shape[1]
        pieces = rows * -(-max(call.q.shape[-1], call.v.shape[-1]) // _PIECE)
        blocks = max(1, min(-(-pieces // _THREADS), 32 * launcher.processors(self.inputs.device)))
        given = *self.inputs.names, "q_rotated"
        self.launch = Launch(variants.append(self.kind), self.inputs.device, blocks, fields, given)

    def run(self, call: AttentionCall, new: Append) -> Tensor:
        rotated = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device) if self.rotates else call.q
        addresses = self.inputs.addresses(launcher.tensors_of(call, None, new))
        self.launch(*addresses, rotated.data_ptr() if self.rotates else 0)
        launcher.note_written(call.k, call.v)
        return rotated
