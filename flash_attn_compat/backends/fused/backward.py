"""Gradients by three kernels: delta, then dkdv for tiles of keys, then dq for tiles of rows.

For calls with few keys dkdv computes all of it. No kernel uses atomics, so gradients have the same bits in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import BF16_AS_FP16, FP16, Kind
from flash_attn_compat.backends.fused.judging import self_test
from flash_attn_compat.backends.fused.launching import calls, grids, layouts, masks
from flash_attn_compat.backends.fused.launching.launcher import Plan, allocator
from flash_attn_compat.core import kernel_layout
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, BackwardResult, Gradients
from flash_attn_compat.core.entry import BackwardRun
from flash_attn_compat.core.inputs import Inputs, new_tuple
from flash_attn_compat.core.torch_state import note_written

_KERNELS = "delta", "dkdv", "dq"


def prepare(call: AttentionCall, upstream: BackwardInputs, into: Gradients | None) -> BackwardRun:
    """Return a function (run) that computes gradients for every backward with these arguments' cache key.

    Raises KernelError if a kernel fails.
    """
    shapes = [(tuple(x.shape), layouts.dense_strides(x.shape), x.dtype) for x in (call.q, call.k, call.v)]
    read = functools.partial(_prepare_inputs, layouts.find_strided_inputs(call), shapes)
    tensors, ready, targets = read(call, upstream, into)
    vec = layouts.vector_size((tensors.q, tensors.k, tensors.v, ready.dout, ready.out, *targets), in_place=False)
    copies = not vec or not all(map(_is_writable, targets))
    if copies:
        read = functools.partial(_prepare_inputs, layouts.find_strided_inputs(call), None)
        (tensors, ready, targets), vec = read(call, upstream, into), 8
    call = call.over(tensors)
    device, kind = call.q.get_device(), _choose_kind(call, vec)
    plan = _build_plan(call, ready, targets, kind)
    kernels = tuple(variant for variant in plan.variants if variant.entry in _KERNELS)
    shared_grid = tuple(map(variants.has_shared_grid, kernels))

    def run_tiny(call: AttentionCall, upstream: BackwardInputs, targets: Gradients) -> Gradients:
        _launch(_build_plan(call, upstream, targets, kind, 2, shared_grid), call, upstream, targets)
        return targets

    place = call.q.device
    self_test.check_kernels(kernels, device, lambda watch: self_test.find_backward_error(kind, place, run_tiny, watch))

    def run(tensors: Inputs, upstream: BackwardInputs, into: Gradients | None) -> BackwardResult:
        readable, upstream, targets = read(tensors, upstream, into)
        delta = _launch(plan, readable, upstream, targets)
        if copies:
            targets = Gradients(*(kernel_layout.narrowed(one, x.shape[-1]) for one, x in zip(targets, tensors)))
        if into is None:
            return BackwardResult(targets, delta)
        for place, gradient in zip(into, targets):
            if gradient is place:
                note_written((place,))
            else:
                place.copy_(gradient)
        return BackwardResult(into, delta)

    return run


def load_ahead(call: AttentionCall, vec: int) -> None:
    """Start to load the kernels that a call's backward will probably need, so they compile along with the forward's.

    vec: how many elements a kernel loads at once from the call's tensors
    """
    kind = _choose_kind(call, vec)
    nvrtc.load_ahead(variants.backward(kind), call.q.get_device())


def _choose_kind(call: AttentionCall, vec: int) -> Kind:
    kind, few_keys = calls.choose_kind(call, vec), 0
    if kind.type == FP16 and kind.number < 80 and (call.cu_seqlens_q is None) == (call.cu_seqlens_k is None):
        processors = calls.count_multiprocessors(call.q.get_device())
        sizes = calls.max_rows(call), calls.max_keys(call), kind.size
        few_keys = grids.choose_one_tile(*sizes, call.batch * call.nheads_k, processors)
    return calls.mark_long(call, calls.enable_copies(call, kind.replace(few_keys=few_keys), True))


def _launch(plan: Plan, tensors: Inputs | AttentionCall, upstream: BackwardInputs, targets: Gradients) -> Tensor:
    """Launch a plan, which writes gradients into ``targets``; return delta, rowsum(dout * out)."""
    dout, out, lse, _, saved, dlse = upstream
    _, *passes = saved or (None,)
    return plan.run(tensors, others=(dout, out, lse, dlse, *targets, *passes))["delta"]


def _prepare_inputs(
    strided: Collection[str],
    shapes: list[tuple[Any, Any, torch.dtype]] | None,
    tensors: Inputs | AttentionCall,
    upstream: BackwardInputs,
    into: Gradients | None,
) -> tuple[Inputs | AttentionCall, BackwardInputs, Gradients]:
    """Return inputs in the kernels' layout, and gradients to write into.

    strided: names of inputs to copy, because their last axis is not contiguous
    shapes: the shape, strides and dtype of new gradients; None if unaligned tensors must be copied
    """
    inputs: Any = tensors
    if strided:
        inputs = inputs._replace(**{name: layouts.copy_contiguous(getattr(inputs, name)) for name in strided})
    # Under causal ALiBi the reported LSE includes a position, which may be large: prefer the one that a forward saved.
    dout, out, _, rng_state, saved, dlse = upstream
    lse, *_ = saved or (upstream.lse,)
    dlse = None if dlse is None else dlse.contiguous()
    upstream = new_tuple(BackwardInputs, (dout, out, lse.contiguous(), rng_state, saved, dlse))
    if shapes is not None:
        if into is None:
            allocate = allocator(tensors.q.device, tensors.q.get_device())
            into = new_tuple(Gradients, [allocate(*one) for one in shapes])
        return inputs, upstream, into
    q, k, v, dout, out = map(layouts.align, (*inputs[:3], dout, out))
    targets = [
        place if place is not None and _is_writable(place) and layouts.is_aligned(place) else _empty_contiguous(x)
        for place, x in zip(into or (None, None, None), (q, k, v))
    ]
    return inputs._replace(q=q, k=k, v=v), upstream._replace(dout=dout, out=out), Gradients(*targets)


def _build_plan(
    call: AttentionCall, upstream: BackwardInputs, targets: Gradients, kind: Kind, splits: int | None = None,
    shared_grid: Sequence[bool] = (False,) * 3,
) -> Plan:  # fmt: skip
    """Return a plan of three launches: delta, dkdv and dq.

    If bf16 is converted to fp16, one more launch finds the maxima, unless the forward saved them. With copies there are
    two more: the same memory holds fp16 copies of q and dout for dkdv, then of k and v for dq.

    upstream.saved: empty; or the LSE without position, and perhaps the tensors of masks.saved_by_name
    splits: blocks that share the query heads of a tile of keys; None for the best number
    shared_grid: for each of the three launches, whether packed sequences share a grid even if that does not pay
    """
    saved = masks.saved_by_name(upstream.saved)
    results = {"dout": upstream.dout, "out": upstream.out, "lse": upstream.lse, "dlse": upstream.dlse}
    fields = calls.call_fields(call)
    fields |= {"out_s": layouts.kernel_strides(upstream.out), "dout_s": layouts.kernel_strides(upstream.dout)}
    fields |= {f"{name}_s": layouts.kernel_strides(target) for name, target in targets._asdict().items()}
    if upstream.saved:
        fields["lse_has_position"] = 0
    plan = Plan(call, kind, fields, has_mask="bias_map" in saved)
    if kind.type == BF16_AS_FP16:
        if "absmax" not in saved:
            plan.add_maxima_pass(of_rows=True)
        plan.add_output("absmax_dout", (2, call.batch, call.nheads_k), torch.int32, starts_as_zero=True)
    plan.add_output("delta", call.lse_shape, torch.float32)
    if kind.features.copied:
        elements = max(call.q.numel() + upstream.dout.numel(), call.k.numel() + call.v.numel())
        plan.add_output("copies", (elements,), torch.float16)
    rows = calls.max_rows(call), call.nheads, None if call.cu_seqlens_q is None else call.q.shape[0]
    keys = calls.max_keys(call), call.nheads_k, None if call.cu_seqlens_k is None else call.k.shape[0]
    for variant, shares in zip(variants.backward(kind), shared_grid):
        longest, heads, tokens = keys if variant.entry == "dkdv" else rows
        clears = variant.entry != "delta"
        grid = grids.choose_grid(longest, variant.rows, call.batch, heads, tokens, clears=clears, shares=shares)
        plan.add_tiled_launch(variant, grid, heads, splits if variant.entry == "dkdv" else 1)
    return plan.load(others={**results, **targets._asdict(), **saved})


def _empty_contiguous(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _is_writable(tensor: Tensor) -> bool:
    """Whether kernels can write the tensor: it has the kernel layout, and no two elements share memory."""
    is_disjoint = all(size <= 1 or stride > 0 for size, stride in zip(tensor.shape, tensor.stride()))
    return is_disjoint and layouts.has_kernel_layout(tensor)
