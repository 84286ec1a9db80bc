"""New keys and values into a cache by one kernel, which rotates them and q on the way.

It also zeroes the counters of the decode kernel behind it, and the addresses it was given serve that one too: a step
of decoding is two launches.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import forward, launcher, loader, params, trial, variants
from flash_attn_compat.backends.fused.forward import Attention, Prepared
from flash_attn_compat.backends.fused.launcher import address, reach
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.engine.append import Append
from flash_attn_compat.engine.call import AttentionCall

_INT = torch.int32
_THREADS, _PIECE = 128, 8


def append(call: AttentionCall, new: Append) -> Tensor:
    """Backend.append by the kernel; raises KernelError, before anything is written, where it cannot be used."""
    if call.alibi_slopes is not None or call.block_table is not None:
        call = launcher.tidy(call)
    k, v, cos, sin, starts = new.k, new.v, new.rotary_cos, new.rotary_sin, new.cache_seqlens
    signature: tuple[Hashable, ...] = ("append", *launcher.key(call))
    if call.signature is None or not call.signature.has_new_keys:
        signature += (
            k.shape, k.stride(), v.stride(), (k.data_ptr() | v.data_ptr()) & 15,
            starts if isinstance(starts, int) else None, new.rotary_interleaved, new.rows_have_own_position,
            None if cos is None or sin is None else (cos.shape, cos.stride(), sin.stride()),
        )  # fmt: skip
    return launcher.planned(signature, call.q.get_device(), lambda: _make_plan(call, new)).run(call, new)


def _make_plan(call: AttentionCall, new: Append) -> _Copied | Plan:
    if not _is_tidy(new):
        return _Copied()
    target = loader.target(call.q.get_device())
    plan = Plan(call, new, target)

    def tried() -> str | None:
        problem = trial.problem(plan.kind, call.q.device, few_rows=True, needs_grad=False)
        return trial.of_append(problem, lambda tiny, new: Plan(tiny, new, target).run(tiny, new))

    trial.check((plan.variant,), target, plan.device, tried)
    attention = forward.make_plan(call._replace(q=plan.like_q(call)))
    # Maxima are of what the cache holds afterwards, and copies of a cache are not prepared.
    plan.attention = attention if isinstance(attention, Attention) and attention.maxima is None else None
    return plan


class _Copied:
    """Unaligned new keys, cos or sin are copied into place first."""

    def run(self, call: AttentionCall, new: Append) -> Tensor:
        cos, sin = new.rotary_cos, new.rotary_sin
        tidy = new._replace(
            k=new.k.contiguous(),
            v=new.v.contiguous(),
            rotary_cos=None if cos is None else cos.contiguous(),
            rotary_sin=None if sin is None else sin.contiguous(),
        )
        return append(call._replace(), tidy)  # whose signature speaks of the others


class Plan:
    """attention: the plan of the call behind, where its addresses are the same."""

    attention: Attention | None = None

    def __init__(self, call: AttentionCall, new: Append, target: Target) -> None:
        self.device = device = call.q.get_device()
        cos = new.rotary_cos
        self.rotates = cos is not None
        tensors = (call.k, call.v, new.k, new.v, *((call.q,) if self.rotates else ()))
        self.kind = launcher.kind_of(call, target, 8 if all(map(launcher.is_aligned, tensors)) else 1)
        self.variant, self.kernel = launcher.loaded(variants.append, self.kind, target, device)
        self.inputs, self.sizes = launcher.Inputs(call), tuple(map(reach, (new.k, new.v, cos)))
        self.lengths, self.q_shape = 4 * call.batch, call.q.shape
        self.splits = launcher.splits_of(call, self.kind)
        batch, seqlen_new = new.k.shape[:2]
        fields = launcher.described(call)
        fields |= {
            "k_new_s": launcher.strides(new.k),
            "v_new_s": launcher.strides(new.v),
            "seqlen_new": seqlen_new,
            "tiles": 0 if self.splits is None else self.splits.tiles,
        }
        if isinstance(new.cache_seqlens, int):
            fields["seqlen_k"] = new.cache_seqlens + seqlen_new
        rows = 2 * batch * seqlen_new * call.nheads_k
        if cos is not None:
            rows += batch * call.nheads * call.q.shape[1]
            fields |= {
                "q_rotated_s": launcher.contiguous_strides(call.q.shape),
                "rotary_dim": 2 * cos.shape[1],
                "rotary_interleaved": int(new.rotary_interleaved),
                "rotary_rows": cos.shape[0],
                "rotary_row_stride": cos.stride(0),
                "rotate_rows_apart": int(new.rows_have_own_position),
            }
        pieces = rows * -(-max(call.q.shape[-1], call.v.shape[-1]) // _PIECE)
        self.blocks = max(1, min(-(-pieces // _THREADS), 32 * launcher.processors(device)))
        self.pack, self.template = params.template(fields, 22)

    def like_q(self, call: AttentionCall) -> Tensor:
        """What append returns: a new tensor where q is rotated."""
        return torch.empty(self.q_shape, dtype=call.q.dtype, device=call.q.device) if self.rotates else call.q

    def run(self, call: AttentionCall, new: Append) -> Tensor:
        device, attention, splits, dtype = self.device, self.attention, self.splits, call.q.dtype
        k_size, v_size, rotary_size = self.sizes
        starts, cos, sin = new.cache_seqlens, new.rotary_cos, new.rotary_sin
        rotated = self.like_q(call)
        workspace = None if attention is None else attention.workspace()
        (q_at, k_at, v_at), rest = self.inputs.of(call)
        starts_at = 0
        if not isinstance(starts, int):
            is_known = starts is call.seqused_k
            starts_at = rest[2] if is_known else address("cache_seqlens", starts, _INT, device, self.lengths)
        rotated_at = rotated.data_ptr() if self.rotates else 0
        counters_at = 0 if workspace is None or splits is None else workspace.data_ptr() + splits.counters
        self.pack(
            launcher.arguments.buffer, 0, q_at if self.rotates else 0, k_at, v_at, 0, 0, 0, 0, 0, starts_at, rest[3],
            rest[4], 0, 0, 0, 0, 0, counters_at,
            address("k", new.k, dtype, device, k_size),
            address("v", new.v, dtype, device, v_size),
            0 if cos is None else address("rotary_cos", cos, dtype, device, rotary_size),
            0 if sin is None else address("rotary_sin", sin, dtype, device, rotary_size),
            rotated_at, self.template,
        )  # fmt: skip
        launcher.submit(self.kernel, self.blocks, device)
        launcher.note_written(call.k, call.v)
        if attention is not None:
            tensors = rotated_at or q_at, k_at, v_at
            prepared = Prepared(rotated, call.k, launcher.stream(device), attention, tensors, rest, workspace)
            forward.prepare(prepared)
        return rotated


def _is_tidy(new: Append) -> bool:
    """Whether the kernel can read new keys, cos and sin as they are."""
    cos, sin = new.rotary_cos, new.rotary_sin
    if cos is not None and sin is not None and (cos.stride() != sin.stride() or cos.stride(-1) != 1):
        return False
    return launcher.is_readable(new.k) and launcher.is_readable(new.v)
