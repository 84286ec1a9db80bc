"""Forwards by our kernels: the forward kernel works on tiles of rows, the decode kernel on few rows over many keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends.base import NegatedView
from flash_attn_compat.backends.fused import backward
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import BF16_AS_FP16, BOOLEANS, Kind
from flash_attn_compat.backends.fused.judging import self_test
from flash_attn_compat.backends.fused.launching import calls, grids, launcher, layouts, masks
from flash_attn_compat.backends.fused.launching.launcher import Plan
from flash_attn_compat.backends.fused.tuning import tuned
from flash_attn_compat.core import checks, dropout, kernel_layout
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import AttentionCall, Result
from flash_attn_compat.core.entry import Run
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import Inputs, new_tuple
from flash_attn_compat.core.torch_state import note_written

# With more new keys than this, the append kernel goes first. The decode kernel can append, but each of its blocks that
# sees new keys writes all of them.
_MAX_NEW_KEYS = 16
_APPENDED = "k_new", "v_new", "rotary_cos", "rotary_sin"
# For each tensor of a call that must be copied, by name, the function that copies it.
_Copies = dict[str, Callable[[Tensor], Tensor]]


def prepare(call: AttentionCall, new: Append | None, is_over_cache: bool) -> Run | None:
    """Return a function (run) for every call with call's cache key; None if no kernel supports the cache's strides.

    Inputs with unsupported strides are copied on every call. Raises KernelError if a kernel fails.

    Args:
        call: over a cache, it covers all slots; new: the keys and values to append, or None
    """
    given = tensors = launcher.with_append(call, new)
    few = variants.takes_decode(calls.max_rows(call), call.nheads // call.nheads_k, call.bias is not None)
    in_place = not call.is_dense and call.cu_seqlens_k is None
    appended = _APPENDED if new is not None else ()
    read = ["q", "k", "v"]
    copies: _Copies = dict.fromkeys(layouts.find_strided_inputs(tensors), layouts.copy_contiguous)
    if is_over_cache:
        in_place = in_place or few
        if not layouts.has_kernel_layout(call.q):
            copies["q"] = Tensor.contiguous
        if new is not None and not layouts.append_has_kernel_layout(new):
            copies |= {name: Tensor.contiguous for name in appended if getattr(tensors, name) is not None}
        if new is not None and few and new.k.shape[1] <= _MAX_NEW_KEYS:
            read += appended
    tensors = _apply_copies(tensors, copies)
    vec = layouts.vector_size([getattr(tensors, name) for name in read], in_place)
    if not vec:
        if is_over_cache:
            return None
        copies |= dict.fromkeys(read, layouts.align)
        tensors, vec = _apply_copies(given, copies), 8
    if copies:
        call = call.over(tensors)
        new = new and Append(tensors.k_new, tensors.v_new, tensors.rotary_cos, tensors.rotary_sin, *new[4:])
    head_dim_v = given.v.shape[-1]
    tuned.warn_if_slow(settings.gpu(call.q.device))
    if call.use & Feature.BACKWARD and call.q.is_cuda:
        backward.load_ahead(call, vec)
    kind = calls.choose_kind(call, vec, decodes=few and not call.dropout_p)
    if not (few or is_over_cache):
        kind = calls.mark_long(call, calls.enable_copies(call, kind, False))
    forward = _Forward(call, kind, new)
    forward.run_self_test()
    if new is not None and forward.appends_first:
        self_test_append(call, new)
    if not copies:
        return forward.run

    def run(tensors: Inputs, length: int | None, out: Tensor | None = None) -> Result:
        if out is not None:
            checks.is_writable_for(out, tensors.q, tensors.v)
        result = forward.run(_apply_copies(tensors, copies), length)
        return result._replace(out=kernel_layout.narrowed(result.out, head_dim_v))

    return run


def _apply_copies(tensors: Inputs, copies: _Copies) -> Inputs:
    return tensors._replace(**{name: copy(getattr(tensors, name)) for name, copy in copies.items()})


def self_test_append(call: AttentionCall, new: Append) -> None:
    """Self-test the kernel that only appends. Raises KernelError if it fails."""
    kind, place = calls.choose_append_kind(call, new), call.q.device

    def run_tiny(call: AttentionCall, new: Append) -> dict[str, Tensor]:
        plan = Plan(call, kind, calls.call_fields(call) | calls.append_fields(new))
        plan.add_append(new)
        outputs = plan.load(new).run(launcher.with_append(call, new))
        return {"q": outputs.get("q_rotated", call.q)}

    def find_error(watch: self_test.Watch) -> str | None:
        return self_test.find_forward_error(kind, place, run_tiny, few_rows=True, appends=True, watch=watch)

    self_test.check_kernels((variants.append(kind),), call.q.get_device(), find_error)


class _Forward:
    """The plan of a call's forward: the forward or the decode kernel, and the launches before it.

    The decode kernel itself appends a few new keys. The append kernel goes first if there are more, or more rows.
    splits: blocks that share the keys of a tile of rows; None for the best number
    shared_grid: whether packed sequences share a grid even if that does not pay
    """

    def __init__(
        self, call: AttentionCall, kind: Kind, new: Append | None = None, splits: int | None = None,
        shared_grid: bool = False,
    ) -> None:  # fmt: skip
        rows, group = calls.max_rows(call), call.nheads // call.nheads_k
        more = kind.features.dropout or kind.features.bias > 0
        self.kind, self.is_decode = kind, variants.takes_decode(rows, group, more)
        self.appends, self.appends_first = new is not None, False
        self.needs_grad, self.drops = bool(call.use & Feature.BACKWARD), call.dropout_p > 0.0
        self.saved = masks.SAVED[: 3 if kind.features.bias == BOOLEANS else 1]
        fields = calls.call_fields(call) | {"out_s": layouts.contiguous_strides(call.out_shape)}
        plan = Plan(call, kind, fields)
        if new is not None:
            fields |= calls.append_fields(new)
            self.appends_first = not (self.is_decode and new.k.shape[1] <= _MAX_NEW_KEYS)
            if self.appends_first:
                plan.add_append(new)
        plan.add_output("out", call.out_shape, call.q.dtype)
        if call.use & (Feature.LSE | Feature.BACKWARD):
            plan.add_output("lse", call.lse_shape, torch.float32)
        if self.needs_grad and fields["lse_has_position"]:
            plan.add_output("lse_true", call.lse_shape, torch.float32)
        # No pass for the decode kernel: it scales each of its steps by a maximum of its own.
        if kind.type == BF16_AS_FP16 and not (self.is_decode or kind.features.cache):
            plan.add_maxima_pass(of_rows=False)
        is_packed = call.cu_seqlens_q is not None
        if self.is_decode:  # its tiles hold the query heads of a group as further rows
            variant = (variants.decode_append if self.appends and not self.appends_first else variants.decode)(kind)
            heads, grid = call.nheads_k, grids.per_sequence_grid(rows * group, variant.rows, call.batch, is_packed)
        else:
            variant, heads, tokens = variants.forward(kind), call.nheads, call.q.shape[0] if is_packed else None
            grid = grids.choose_grid(rows, variant.rows, call.batch, heads, tokens, shares=shared_grid)
        plan.add_tiled_launch(variant, grid, heads, splits)
        self.plan = plan.load(new)

    def run_self_test(self) -> None:
        """Self-test the kernel of this plan. Raises KernelError if it fails."""
        kind, plan, appends = self.kind, self.plan, self.appends and not self.appends_first
        shared_grid = variants.has_shared_grid(plan.variants[-1])

        def run_tiny(call: AttentionCall, new: Append | None) -> dict[str, Tensor]:
            forward = _Forward(call, kind, new, splits=2, shared_grid=shared_grid)
            result = forward.run(launcher.with_append(call, new))
            return {"out": result.out, "softmax_lse": result.lse}

        arguments = kind, plan.torch_device, run_tiny, self.is_decode, appends
        find_error = functools.partial(self_test.find_forward_error, *arguments)
        self_test.check_kernels(plan.variants[-1:], plan.device, find_error)

    def run(self, tensors: Any, length: int | None = None, out: Tensor | None = None) -> Result:
        """Launch the call's kernels over its tensors and return the Result.

        tensors: the inputs by name; length: cache_seqlens where that is one int; out: the tensor that receives the
        output, or None for a new one
        """
        rng_state = None
        if self.drops:
            if any([x.is_neg() for x in (tensors.q, tensors.k, tensors.v)]):  # before the generator advances
                raise NegatedView("q, k and v must not be lazily negated views")
            rng_state = tensors.rng_state
            if rng_state is None:
                rng_state = dropout.new_rng_state(self.plan.torch_device)
                tensors = tensors._replace(rng_state=rng_state)
        outputs = self.plan.run(tensors, length, out)
        if self.appends:
            note_written((tensors.k, tensors.v))
        lse = outputs.get("lse")
        saved: tuple[Tensor | None, ...] = ()
        if self.needs_grad:
            # In this order: the LSE without position, the maxima of converted bf16, the results of the mask kernel.
            others = [outputs[name] for name in self.saved if name in outputs]
            if others or "lse_true" in outputs:
                saved = outputs.get("lse_true", lse), *others
        result: Result = new_tuple(Result, (outputs["out"], lse, rng_state, saved, None))  # a third of Result()'s time
        return result
