"""New keys and values into a cache, and rotated rows of q, by a kernel of its own: where the decode kernel cannot."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, loader, params, trial, variants
from flash_attn_compat.backends.fused.launcher import address
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.engine.append import Append
from flash_attn_compat.engine.call import AttentionCall

_INT = torch.int32
_THREADS, _PIECE = 128, 8


def append(call: AttentionCall, new: Append) -> Tensor:
    """Backend.append by the kernel; raises KernelError, before anything is written, where it cannot be used."""
    if call.alibi_slopes is not None or call.block_table is not None:
        call = launcher.tidy(call)
    if not launcher.is_tidy(new):
        new = new._replace(
            k=new.k.contiguous(),
            v=new.v.contiguous(),
            rotary_cos=None if new.rotary_cos is None else new.rotary_cos.contiguous(),
            rotary_sin=None if new.rotary_sin is None else new.rotary_sin.contiguous(),
        )
    starts, cos, sin = new.cache_seqlens, new.rotary_cos, new.rotary_sin
    signature: tuple[Hashable, ...] = (
        "append", *launcher.key(call._replace()), new.k.shape, new.k.stride(), new.v.stride(),
        launcher.new_vector_size(new), starts if isinstance(starts, int) else None, new.rotary_interleaved,
        new.rows_have_own_position, None if cos is None or sin is None else (cos.shape, cos.stride(), sin.stride()),
    )  # fmt: skip
    return launcher.planned(signature, call.q.get_device(), lambda: _make_plan(call, new)).run(call, new)


def _make_plan(call: AttentionCall, new: Append) -> Plan:
    target = loader.target(call.q.get_device())
    plan = Plan(call, new, target)

    def tried() -> str | None:
        problem = trial.problem(plan.kind, call.q.device, few_rows=True, needs_grad=False)
        return trial.of_append(problem, lambda tiny, new: Plan(tiny, new, target).run(tiny, new))

    trial.check((plan.variant,), target, plan.device, tried)
    return plan


class Plan:
    def __init__(self, call: AttentionCall, new: Append, target: Target) -> None:
        self.device = device = call.q.get_device()
        self.rotates = new.rotary_cos is not None
        tensors = (call.q, call.k, call.v) if self.rotates else (call.k, call.v)
        vec = launcher.new_vector_size(new) if all(map(launcher.is_aligned, tensors)) else 1
        self.kind = launcher.kind_of(call, target, vec)
        self.variant, self.kernel = launcher.loaded(variants.append, self.kind, target, device)
        self.inputs, self.new_inputs = launcher.Inputs(call), launcher.NewInputs(new)
        self.lengths = 4 * call.batch
        batch, seqlen_new = new.k.shape[:2]
        fields = launcher.described(call)
        fields |= launcher.described_new(new)
        fields["q_rotated_s"] = launcher.contiguous_strides(call.q.shape)
        if isinstance(new.cache_seqlens, int):
            fields["seqlen_k"] = new.cache_seqlens + seqlen_new
        rows = 2 * batch * seqlen_new * call.nheads_k + self.rotates * batch * call.nheads * call.q.shape[1]
        pieces = rows * -(-max(call.q.shape[-1], call.v.shape[-1]) // _PIECE)
        self.blocks = max(1, min(-(-pieces // _THREADS), 32 * launcher.processors(device)))
        self.pack, self.template = params.template(fields, 22)

    def run(self, call: AttentionCall, new: Append) -> Tensor:
        device, starts = self.device, new.cache_seqlens
        rotated = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device) if self.rotates else call.q
        (q_at, k_at, v_at), rest = self.inputs.of(call)
        self.pack(
            launcher.arguments.buffer, 0, q_at, k_at, v_at, 0, 0, 0, 0, 0,
            0 if isinstance(starts, int) else address("cache_seqlens", starts, _INT, device, self.lengths),
            rest[3], rest[4], 0, 0, 0, 0, 0, 0, *self.new_inputs.of(*new[:4]),
            rotated.data_ptr() if self.rotates else 0, self.template,
        )  # fmt: skip
        launcher.submit(self.kernel, self.blocks, device)
        launcher.note_written(call.k, call.v)
        return rotated
