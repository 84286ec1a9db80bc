"""A call's gradients: delta, then dkdv for tiles of keys, then dq for tiles of rows.

Nothing is added by atomics: the same bits each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, trial, variants
from flash_attn_compat.backends.fused.launcher import Launch, Output, Plan
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine import alignment
from flash_attn_compat.engine.call import AttentionCall, Gradients, Upstream

# Writes the gradients, or some of them, into what it is given, and returns them.
_Run = Callable[[AttentionCall, Upstream, Gradients], Gradients]


def backward(call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
    """Gradients, written through ``into`` where given; raises KernelError where a kernel cannot be used."""
    call = launcher.tidy(call)
    # Reported under causal ALiBi is LSE plus a position, which may be large beside it: the true one was kept.
    lse = upstream.saved[0] if upstream.saved else upstream.lse
    dlse = None if upstream.dlse is None else upstream.dlse.contiguous()
    upstream = upstream._replace(softmax_lse=lse.contiguous(), dlse=dlse)
    found = _run(call, upstream, into or Gradients(*map(_empty, call[:3])))
    if into is None:
        return found
    for target, gradient in zip(into, found):
        if gradient is target:
            launcher.note_written(target)
        else:
            target.copy_(gradient)
    return into


def _run(call: AttentionCall, upstream: Upstream, places: Gradients) -> Gradients:
    others = upstream.dout, upstream.out, upstream.lse, upstream.dlse, *places, len(upstream.saved)
    plan = launcher.planned("backward", lambda: _make_plan(call, upstream, places), call, *others)
    return plan(call, upstream, places)


def _make_plan(call: AttentionCall, upstream: Upstream, places: Gradients) -> _Run:
    vec = launcher.vector_size((*call[:3], upstream.dout, upstream.out, *places), in_place=False)
    if not vec or not all(map(_is_writable, places)):
        return _on_copies
    device, kind = call.q.get_device(), launcher.kind_of(call, vec)
    plan = _plan(call, upstream, places, kind)

    def run_tiny(call: AttentionCall, upstream: Upstream, places: Gradients) -> Gradients:
        return _launched(_plan(call, upstream, places, kind, splits=2), call, upstream, places)

    trial.check(plan.variants[-3:], device, lambda: trial.of_backward(kind, call.q.device, run_tiny))
    return functools.partial(_launched, plan)


def _launched(plan: Plan, call: AttentionCall, upstream: Upstream, places: Gradients) -> Gradients:
    others = upstream.dout, upstream.out, upstream.lse, upstream.dlse, *places, *upstream.saved[1:]
    plan.run((*launcher.tensors_of(call, call.rng_state), *others))
    return places


def _on_copies(call: AttentionCall, upstream: Upstream, places: Gradients) -> Gradients:
    """What is not on 16 bytes is copied into place first; gradients have the padding cut off."""
    q, k, v, dout, out = map(launcher.aligned, (*call[:3], upstream.dout, upstream.out))
    given = [
        place if place.shape == tensor.shape and _is_writable(place) and launcher.is_aligned(place) else _empty(tensor)
        for place, tensor in zip(places, (q, k, v))
    ]
    found = _run(call._replace(q=q, k=k, v=v), upstream._replace(dout=dout, out=out), Gradients(*given))
    return Gradients(*(alignment.narrowed(one, x.shape[-1]) for one, x in zip(found, call[:3])))


def _plan(call: AttentionCall, upstream: Upstream, places: Gradients, kind: Kind, splits: int | None = None) -> Plan:
    """Three launches, four for bf16 that is converted and of which the forward kept no maxima.

    upstream.saved: nothing; or the forward's true LSE; or that and maxima
    splits: blocks that share the query heads of a tile of keys; None: as many as pay
    """
    kept = dict(zip(("absmax",), upstream.saved[1:]))
    results = {"dout": upstream.dout, "out": upstream.out, "lse": upstream.lse, "dlse": upstream.dlse}
    others = {**results, **places._asdict(), **kept}
    fields = launcher.described(call)
    fields |= {"out_s": launcher.strides(upstream.out), "dout_s": launcher.strides(upstream.dout)}
    fields |= {f"{name}_s": launcher.strides(place) for name, place in places._asdict().items()}
    if upstream.saved:
        fields["lse_has_position"] = 0
    outputs, launches = [], []
    if kind.type == variants.BF16_AS_FP16:
        if not kept:
            found, first = launcher.maxima(call, kind, fields)
            outputs.append(found)
            launches.append(first)
        outputs.append(Output("absmax_dout", (2, call.batch, call.nheads_k), torch.int32, begins_as_zero=True))
    outputs.append(Output("delta", call.lse_shape, torch.float32))
    rows, keys = launcher.longest_rows(call), launcher.longest_keys(call)
    # With packed tokens, one slab more sets the gradients of those outside of all sequences to 0.
    all_rows, all_keys = call.batch + (call.cu_seqlens_q is not None), call.batch + (call.cu_seqlens_k is not None)
    dkdv, parts = variants.dkdv(kind), variants.dkdv_parts(kind)
    key_tiles = -(-keys // dkdv.rows) * call.nheads_k * call.batch
    if splits is None:
        splits = launcher.head_splits_of(call, dkdv, key_tiles * parts)
    for variant, length, times, shared in (
        (variants.delta(kind), rows, call.nheads * call.batch, 1),
        (dkdv, keys, call.nheads_k * parts * all_keys, splits),
        (variants.dq(kind), rows, call.nheads * all_rows, 1),
    ):
        tiles = -(-length // variant.rows)
        launches.append(Launch(variant, tiles * times * shared, {**fields, "tiles": tiles, "splits": shared}))
    workspace = launcher.PARTS_AT + key_tiles * splits * variants.part_bytes(dkdv) if splits > 1 else 0
    return Plan(call, outputs, launches, others=others, workspace=workspace)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _is_writable(tensor: Tensor) -> bool:
    """Whether a kernel can write it: readable, and no two elements in one place."""
    apart = all(size <= 1 or stride > 0 for size, stride in zip(tensor.shape, tensor.stride()))
    return apart and launcher.is_readable(tensor)
