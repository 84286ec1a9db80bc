"""A call's forward: the forward kernel for tiles of rows, the decode kernel for few rows over many keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends.base import NegatedView
from flash_attn_compat.backends.fused import grids, launcher, masks, self_test, tensor_cores, variants
from flash_attn_compat.backends.fused.plan_builder import PlanBuilder, choose_append_kind, enable_copies
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.core import dropout, kernel_layout
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import NO_TENSORS, RNG_STATE, TENSORS, AttentionCall, Result
from flash_attn_compat.core.prepared import Alike, Run, Tensors
from flash_attn_compat.core.torch_state import note_written

# Each block that sees new keys writes them all.
_MAX_NEW_KEYS = 16
# How some of a request's tensors are copied, by their places there.
_Copies = dict[int, Callable[[Tensor], Tensor]]


def prepare(alike: Alike) -> Run | None:
    """What computes all calls that are ``alike``; None where no kernel can read a cache as it lies.

    What kernels cannot read otherwise is copied into place at each call. Raises KernelError where a kernel cannot be
    used.
    """
    tensors, call, new = alike.tensors, alike.whole, alike.new
    few = variants.takes_decode(launcher.max_rows(call), call.nheads // call.nheads_k, call.bias is not None)
    in_place = not call.is_dense and call.cu_seqlens_k is None
    appended = range(len(TENSORS), len(tensors))
    read = [0, 1, 2]
    copies: _Copies = dict.fromkeys(launcher.find_strided_inputs(tensors), launcher.copy_unshared)
    if alike.is_over_cache:
        in_place = in_place or few
        if not launcher.has_kernel_layout(call.q):
            copies[0] = Tensor.contiguous
        if new is not None and not launcher.append_has_kernel_layout(new):
            copies |= {index: Tensor.contiguous for index in appended if tensors[index] is not None}
        if new is not None and few and new.k.shape[1] <= _MAX_NEW_KEYS:
            read += appended
    tensors = _apply_copies(tensors, copies)
    vec = launcher.vector_size([tensors[index] for index in read], in_place)
    if not vec:
        if alike.is_over_cache:
            return None
        copies |= dict.fromkeys(read, launcher.align)
        tensors, vec = _apply_copies(alike.tensors, copies), 8
    if copies:
        call = call.with_tensors(*tensors)
        new = new and new._replace(**dict(zip(Append._fields, tensors[len(TENSORS) :])))
    tensor_cores.warn_if_missing(call.q.get_device(), settings.gpu(call.q.device))
    kind = launcher.choose_kind(call, vec, decodes=few and not call.dropout_p)
    attention = ForwardPlan(call, kind if few or alike.is_over_cache else enable_copies(call, kind, False), new)
    attention.run_self_test()
    if new is not None and attention.has_append_launch:
        self_test_append(call, new)
    if not copies:
        return attention.run
    width = alike.call.head_dim_v

    def run(tensors: Tensors, length: int | None) -> Result:
        result = attention.run(_apply_copies(tensors, copies), length)
        return result._replace(out=kernel_layout.narrowed(result.out, width))

    return run


def _apply_copies(tensors: Tensors, copies: _Copies) -> Tensors:
    return tuple([copies[index](tensor) if index in copies else tensor for index, tensor in enumerate(tensors)])


def self_test_append(call: AttentionCall, new: Append) -> None:
    """Raises KernelError if the kernel that only appends turns out to be wrong."""
    kind, place = choose_append_kind(call, new), call.q.device

    def run_tiny(call: AttentionCall, new: Append) -> dict[str, Tensor]:
        launches = PlanBuilder(call, kind, launcher.call_fields(call) | launcher.append_fields(new))
        launches.append(new)
        made = launches.plan(new).run((*call.tensors, *new[:4]))
        return {"q": made.get("q_rotated", call.q)}

    def wrong(watch: self_test.Watch) -> str | None:
        return self_test.find_forward_error(kind, place, run_tiny, few_rows=True, appends=True, watch=watch)

    self_test.check_kernels((variants.append(kind),), call.q.get_device(), wrong)


class ForwardPlan:
    """A launch of the forward or the decode kernel; the latter writes a few ``new`` keys on its way.

    More of them, or those of more rows, are written by a launch before it.
    splits: blocks that share the keys of a tile of rows, None: as many as pay; in_seats: as shares in grids.py
    """

    def __init__(
        self,
        call: AttentionCall,
        kind: Kind,
        new: Append | None = None,
        splits: int | None = None,
        in_seats: bool = False,
    ) -> None:
        rows, group = launcher.max_rows(call), call.nheads // call.nheads_k
        self.kind, self.is_decode = kind, variants.takes_decode(rows, group, kind.dropout or kind.bias > 0)
        self.seqlen_new = 0 if new is None else new.k.shape[1]
        self.appends, self.has_append_launch = new is not None, False
        self.needs_grad, self.drops = call.needs_grad, call.dropout_p > 0.0
        self.kept = masks.SAVED[: 3 if kind.bias == variants.BOOLEANS else 1]
        fields = launcher.call_fields(call) | {"out_s": launcher.contiguous_strides(call.out_shape)}
        launches = PlanBuilder(call, kind, fields)
        if new is not None:
            fields |= launcher.append_fields(new)
            self.has_append_launch = not (self.is_decode and self.seqlen_new <= _MAX_NEW_KEYS)
            if self.has_append_launch:
                launches.append(new)
        launches.leave("out", call.out_shape, call.q.dtype)
        if call.return_lse or call.needs_grad:
            launches.leave("lse", call.lse_shape, torch.float32)
        if call.needs_grad and fields["lse_has_position"]:
            launches.leave("lse_true", call.lse_shape, torch.float32)
        # The decode kernel scales what it converts step by step.
        if kind.type == variants.BF16_AS_FP16 and not self.is_decode:
            launches.add_maxima_pass(of_rows=False)
        is_packed = call.cu_seqlens_q is not None
        if self.is_decode:  # the heads of a group are rows of one tile
            variant = (
                variants.decode_append(kind) if self.appends and not self.has_append_launch else variants.decode(kind)
            )
            heads, grid = call.nheads_k, grids.per_sequence_grid(rows * group, variant.rows, call.batch, is_packed)
        else:
            variant, heads, tokens = variants.forward(kind), call.nheads, call.q.shape[0] if is_packed else None
            grid = grids.choose_grid(rows, variant.rows, call.batch, heads, tokens, shares=in_seats)
        launches.add_tiled_launch(variant, grid, heads, splits)
        self.plan = launches.plan(new)

    def run_self_test(self) -> None:
        """Raises KernelError if the kernel turns out to be wrong."""
        kind, plan, appends = self.kind, self.plan, self.appends and not self.has_append_launch
        in_seats = variants.is_in_seats(plan.variants[-1])

        def run_tiny(call: AttentionCall, new: Append | None) -> dict[str, Tensor]:
            attention = ForwardPlan(call, kind, new, splits=2, in_seats=in_seats)
            result = attention.run((*call.tensors, *(() if new is None else new[:4])))
            return {"out": result.out, "softmax_lse": result.lse}

        asked = kind, plan.place, run_tiny, self.is_decode, appends
        self_test.check_kernels(
            plan.variants[-1:], plan.device, lambda watch: self_test.find_forward_error(*asked, watch)
        )

    def run(self, tensors: Sequence[Any], length: int | None = None) -> Result:
        """As Run of core/prepared.py."""
        rng_state = None
        if self.drops:
            if any([x.is_neg() for x in tensors[:3]]):  # before a random number is taken
                raise NegatedView("q, k and v must not be lazily negated views")
            rng_state = (*tensors, *NO_TENSORS)[RNG_STATE]
            rng_state = dropout.new_rng_state(self.plan.place) if rng_state is None else rng_state
            tensors = (*(*tensors, *NO_TENSORS)[:RNG_STATE], rng_state)
        made = self.plan.run(tensors, None if length is None else length + self.seqlen_new)
        if self.appends:
            note_written(tensors[1:3])
        out, lse = made["out"], made.get("lse")
        if not self.needs_grad:
            return tuple.__new__(Result, (out, lse, rng_state, ()))  # Result() takes three times as long
        # The backward takes the true LSE first, then the maxima, then what was found in a mask of booleans.
        true_lse, found = made.get("lse_true"), [made[name] for name in self.kept if name in made]
        if found:
            return Result(out, lse, rng_state, (lse if true_lse is None else true_lse, *found))
        return Result(out, lse, rng_state, () if true_lse is None else (true_lse,))
