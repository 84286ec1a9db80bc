"""A call's gradients: delta, then dkdv for tiles of keys, then dq for tiles of rows.

Nothing is added by atomics: the same bits each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import converted, grids, launcher, trial, variants
from flash_attn_compat.backends.fused.launcher import Launch, Output, Plan
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine import alignment
from flash_attn_compat.engine.call import AttentionCall, Gradients, Upstream
from flash_attn_compat.engine.memory import BackwardRun, Tensors

# Launches for a request's tensors; writes the gradients, or some of them, into the last, and returns them.
_Launch = Callable[[Sequence[Any], Upstream, Gradients], Gradients]
_KERNELS = "delta", "dkdv", "dq"


def prepare(call: AttentionCall, upstream: Upstream, into: Gradients | None) -> BackwardRun:
    """What computes the gradients of all calls like ``call``, from what is like ``upstream``.

    Raises KernelError where a kernel cannot be used.
    """
    untidy = launcher.untidy(call.tensors)

    def tidy(tensors: Tensors) -> Sequence[Any]:
        return [launcher.tidied(tensor) if index in untidy else tensor for index, tensor in enumerate(tensors)]

    if untidy:
        call = call.with_tensors(*tidy(call.tensors))
    launch = _prepare(call, _read(upstream), into or _new_targets(call.tensors))

    def run(tensors: Tensors, upstream: Upstream, into: Gradients | None) -> Gradients:
        found = launch(tidy(tensors) if untidy else tensors, _read(upstream), into or _new_targets(tensors))
        if into is None:
            return found
        for target, gradient in zip(into, found):
            if gradient is target:
                launcher.note_written(target)
            else:
                target.copy_(gradient)
        return into

    return run


def _read(upstream: Upstream) -> Upstream:
    """As kernels read it. Under causal ALiBi the LSE has a position, maybe a large one, added: the true one is kept."""
    lse = upstream.saved[0] if upstream.saved else upstream.lse
    dlse = None if upstream.dlse is None else upstream.dlse.contiguous()
    return upstream._replace(softmax_lse=lse.contiguous(), dlse=dlse)


def _new_targets(tensors: Tensors) -> Gradients:
    return Gradients(*map(_empty, tensors[:3]))


def _prepare(call: AttentionCall, upstream: Upstream, targets: Gradients) -> _Launch:
    vec = launcher.vector_size((*call[:3], upstream.dout, upstream.out, *targets), in_place=False)
    if not vec or not all(map(_is_writable, targets)):
        return _prepare_copies(call, upstream, targets)
    device, kind = call.q.get_device(), converted.with_copies(call, launcher.kind_of(call, vec), True)
    plan = _plan(call, upstream, targets, kind)
    kernels = tuple(variant for variant in plan.variants if variant.entry in _KERNELS)
    in_seats = tuple(map(variants.is_in_seats, kernels))

    def run_tiny(call: AttentionCall, upstream: Upstream, targets: Gradients) -> Gradients:
        return _launch(_plan(call, upstream, targets, kind, 2, in_seats), call.tensors, upstream, targets)

    trial.check(kernels, device, lambda: trial.of_backward(kind, call.q.device, run_tiny))
    return functools.partial(_launch, plan)


def _launch(plan: Plan, tensors: Sequence[Any], upstream: Upstream, targets: Gradients) -> Gradients:
    dout, out, lse, _, saved, dlse = upstream
    plan.run((*tensors, dout, out, lse, dlse, *targets, *saved[1:]))
    return targets


def _prepare_copies(call: AttentionCall, upstream: Upstream, targets: Gradients) -> _Launch:
    """What is not on 16 bytes is copied into place first; gradients have the padding cut off."""
    copied = _copied(call.tensors, upstream, targets)
    launch = _prepare(call.with_tensors(*copied[0]), *copied[1:])

    def run(tensors: Sequence[Any], upstream: Upstream, targets: Gradients) -> Gradients:
        found = launch(*_copied(tensors, upstream, targets))
        return Gradients(*(alignment.narrowed(one, x.shape[-1]) for one, x in zip(found, tensors)))

    return run


def _copied(
    tensors: Sequence[Any], upstream: Upstream, targets: Gradients
) -> tuple[Sequence[Any], Upstream, Gradients]:
    q, k, v, dout, out = map(launcher.aligned, (*tensors[:3], upstream.dout, upstream.out))
    made = [
        target if target.shape == x.shape and _is_writable(target) and launcher.is_aligned(target) else _empty(x)
        for target, x in zip(targets, (q, k, v))
    ]
    return (q, k, v, *tensors[3:]), upstream._replace(dout=dout, out=out), Gradients(*made)


def _plan(
    call: AttentionCall,
    upstream: Upstream,
    targets: Gradients,
    kind: Kind,
    splits: int | None = None,
    in_seats: Sequence[bool] = (False,) * 3,
) -> Plan:
    """Three launches. For bf16 that is converted one more, if the forward kept no maxima, and two if it is copied: the
    same memory holds q and dout for dkdv, then k and v for dq.

    upstream.saved: nothing; or the forward's true LSE; or that and maxima
    splits: blocks that share the query heads of a tile of keys, None: as many as pay
    in_seats: as shares in grids.py, for each of the three
    """
    kept = dict(zip(("absmax",), upstream.saved[1:]))
    results = {"dout": upstream.dout, "out": upstream.out, "lse": upstream.lse, "dlse": upstream.dlse}
    others = {**results, **targets._asdict(), **kept}
    fields = launcher.described(call)
    fields |= {"out_s": launcher.strides(upstream.out), "dout_s": launcher.strides(upstream.dout)}
    fields |= {f"{name}_s": launcher.strides(target) for name, target in targets._asdict().items()}
    if upstream.saved:
        fields["lse_has_position"] = 0
    of_mask, launches = launcher.mask_pass(call, kind, fields)
    outputs: list[Output] = []
    if kind.type == variants.BF16_AS_FP16:
        if not kept:
            found, first = converted.maxima(call, kind._replace(copied=False), fields, of_rows=True)
            outputs.append(found)
            launches.append(first)
        outputs.append(Output("absmax_dout", (2, call.batch, call.nheads_k), torch.int32, starts_as_zero=True))
    outputs += [*of_mask, Output("delta", call.lse_shape, torch.float32)]
    if kind.copied:
        most = max(call.q.numel() + upstream.dout.numel(), call.k.numel() + call.v.numel())
        outputs.append(Output("copies", (most,), torch.float16))
    rows = launcher.longest_rows(call), call.nheads, None if call.cu_seqlens_q is None else call.q.shape[0]
    keys = launcher.longest_keys(call), call.nheads_k, None if call.cu_seqlens_k is None else call.k.shape[0]
    kernels, workspace = (variants.delta(kind), variants.dkdv(kind), variants.dq(kind)), 0
    for variant, (longest, heads, tokens), shares in zip(kernels, (rows, keys, rows), in_seats):
        clears, share = variant.entry != "delta", 1
        grid = grids.grid(longest, variant.rows, call.batch, heads, tokens, clears=clears, shares=shares)
        if grid.seats:
            variant = variants.in_seats(variant)
        elif variant.entry == "dkdv":
            tiles = grid.tiles * heads * call.batch
            share = splits or launcher.head_splits_of(call, variant, tiles)
            workspace = launcher.PARTS_AT + tiles * share * grids.part_bytes(variant) if share > 1 else 0
        dealt = {"tiles": grid.tiles, "splits": share, "seats": grid.seats}
        if clears:
            dealt["resident"] = launcher.gpu_of(call).holds(variant)
        launch = Launch(variant, grid.tiles * grid.slabs * heads * share, {**fields, **dealt})
        if kind.copied and clears:
            of_rows = variant.entry == "dkdv"
            launches.append(converted.to_half(call, kind, fields, of_rows))
            launch = converted.reads_copies(call, launch, of_rows)
        launches.append(launch)
    return Plan(call, outputs, launches, others=others, workspace=workspace)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _is_writable(tensor: Tensor) -> bool:
    """Whether a kernel can write it: readable, and no two elements in one place."""
    apart = all(size <= 1 or stride > 0 for size, stride in zip(tensor.shape, tensor.stride()))
    return apart and launcher.is_readable(tensor)
