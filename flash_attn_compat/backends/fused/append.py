"""New keys and values into a cache by one kernel, which rotates them and q on the way.

It also zeroes the counters that the decode kernel behind it needs: a step of decoding is two launches.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, loader, params, trial, variants
from flash_attn_compat.backends.fused.launcher import address, extent
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.engine.append import Append
from flash_attn_compat.engine.call import AttentionCall

_INT = torch.int32
_THREADS = 128


class Prepared(NamedTuple):
    """What append leaves for the forward that follows: ``workspace`` with its counters zeroed on ``stream``."""

    q: Tensor
    workspace: Tensor
    stream: int


class _Last(threading.local):
    prepared: Prepared | None = None


_last = _Last()


def take(q: Tensor, size: int, device: int) -> Tensor | None:
    """The workspace that the append before this call left for ``q``, if it did; it is handed out once."""
    prepared, _last.prepared = _last.prepared, None
    if prepared is None or prepared.q is not q or prepared.workspace.shape[0] != size:
        return None
    return prepared.workspace if prepared.stream == launcher.stream(device) else None


def append(call: AttentionCall, new: Append) -> Tensor:
    """Backend.append by the kernel; raises KernelError, before anything is written, where it cannot be used."""
    call, new = launcher.tidy(call), _tidy(new)
    k, v, cos = new.k, new.v, new.rotary_cos
    starts = new.cache_seqlens
    signature = (
        "append", *launcher.key(call), k.shape, k.stride(), v.stride(), (k.data_ptr() | v.data_ptr()) & 15,
        starts if isinstance(starts, int) else None, None if cos is None else (cos.shape, cos.stride()),
        new.rotary_interleaved, new.rows_have_own_position,
    )  # fmt: skip
    return launcher.planned(signature, lambda: _make_plan(call, new)).run(call, new)


def _make_plan(call: AttentionCall, new: Append) -> _Plan:
    device = call.q.get_device()
    target = loader.target(device)
    plan = _Plan(call, new, target)

    def tried() -> str | None:
        problem = trial.problem(plan.kind, call.q.device, few_rows=True, needs_grad=False)
        return trial.of_append(problem, lambda tiny, new: _Plan(tiny, new, target).run(tiny, new))

    trial.check((plan.variant,), target, device, tried)
    return plan


class _Plan:
    def __init__(self, call: AttentionCall, new: Append, target: Target) -> None:
        self.device = device = call.q.get_device()
        self.rotates = new.rotary_cos is not None
        tensors = (call.k, call.v, new.k, new.v, *((call.q,) if self.rotates else ()))
        vec = 8 if all(map(launcher.is_aligned, tensors)) else 1
        self.kind = launcher.kind_of(call, target, vec)
        self.variant, self.kernel = launcher.loaded(variants.append, self.kind, target, device)
        self.extents = tuple(map(extent, (call.q, call.k, call.v, new.k, new.v)))
        self.table = 0 if call.block_table is None else extent(call.block_table)
        self.q_shape = call.q.shape
        batch, seqlen_new = new.k.shape[:2]
        fields = launcher.described(call)
        fields |= {
            "k_new_s": launcher.strides(new.k),
            "v_new_s": launcher.strides(new.v),
            "seqlen_new": seqlen_new,
        }
        if isinstance(new.cache_seqlens, int):
            fields["seqlen_k"] = new.cache_seqlens + seqlen_new
        rows = batch * seqlen_new * call.nheads_k * 2
        if new.rotary_cos is not None:
            rows += batch * call.nheads * call.q.shape[1]
            fields |= {
                "q_rotated_s": launcher.contiguous_strides(call.q.shape),
                "rotary_dim": 2 * new.rotary_cos.shape[1],
                "rotary_interleaved": int(new.rotary_interleaved),
                "rotary_rows": new.rotary_cos.shape[0],
                "rotary_row_stride": new.rotary_cos.stride(0),
                "rotate_rows_apart": int(new.rows_have_own_position),
            }
        self.tables = 0 if new.rotary_cos is None else extent(new.rotary_cos)
        self.share = launcher.share(call, self.kind)
        if self.share is not None:
            fields |= {"tiles": self.share.tiles}
        self.workspace = 0 if self.share is None or self.share.splits == 1 else self.share.workspace
        pieces = rows * -(-max(call.q.shape[-1], call.v.shape[-1]) // vec)
        self.blocks = max(1, min(-(-pieces // _THREADS), 32 * launcher.processors(device)))
        self.template = params.pack(fields)

    def run(self, call: AttentionCall, new: Append) -> Tensor:
        device, q, k, v, cos, sin, starts = (
            self.device, call.q, call.k, call.v, new.rotary_cos, new.rotary_sin, new.cache_seqlens,
        )  # fmt: skip
        dtype, table, leftpad = q.dtype, call.block_table, call.leftpad_k
        q_extent, k_extent, v_extent, new_k_extent, new_v_extent = self.extents
        rotated = torch.empty(self.q_shape, dtype=dtype, device=q.device) if self.rotates else q
        workspace, counters = None, 0
        if self.workspace and self.share is not None:
            workspace = torch.empty(self.workspace, dtype=torch.uint8, device=q.device)
            counters = workspace.data_ptr() + self.share.counters
        arguments = launcher.arguments
        arguments.view[:] = self.template
        params.APPEND_ADDRESSES.pack_into(
            arguments.buffer, 0,
            address("q", q, dtype, device, q_extent) if self.rotates else 0,
            address("k_cache", k, dtype, device, k_extent),
            address("v_cache", v, dtype, device, v_extent),
            0, 0, 0, 0, 0,
            0 if isinstance(starts, int) else address("cache_seqlens", starts, _INT, device, q.shape[0]),
            0 if leftpad is None else address("cache_leftpad", leftpad, _INT, device, q.shape[0]),
            0 if table is None else address("block_table", table, _INT, device, self.table),
            0, 0, 0, 0, 0, counters,
            address("k", new.k, dtype, device, new_k_extent),
            address("v", new.v, dtype, device, new_v_extent),
            0 if cos is None else address("rotary_cos", cos, dtype, device, self.tables),
            0 if sin is None else address("rotary_sin", sin, dtype, device, self.tables),
            rotated.data_ptr() if self.rotates else 0,
        )  # fmt: skip
        launcher.submit(self.kernel, self.blocks, device)
        launcher.note_written(k, v)
        _last.prepared = None if workspace is None else Prepared(rotated, workspace, launcher.stream(device))
        return rotated


def _tidy(new: Append) -> Append:
    """New keys as a kernel can read them, cos and sin with the same steps."""
    if not launcher.is_readable(new.k):
        new = new._replace(k=new.k.contiguous())
    if not launcher.is_readable(new.v):
        new = new._replace(v=new.v.contiguous())
    cos, sin = new.rotary_cos, new.rotary_sin
    if cos is not None and sin is not None and (cos.stride() != sin.stride() or cos.stride(-1) != 1):
        new = new._replace(rotary_cos=cos.contiguous(), rotary_sin=sin.contiguous())
    return new
