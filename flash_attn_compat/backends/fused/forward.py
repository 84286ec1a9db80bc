"""A call's forward: the forward kernel for tiles of rows, the decode kernel for few rows over many keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, probe, trial, variants
from flash_attn_compat.backends.fused.append import Writer
from flash_attn_compat.backends.fused.launcher import Inputs, Launch
from flash_attn_compat.backends.fused.maxima import Maxima
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine import alignment, dropout
from flash_attn_compat.engine.append import Append, Step
from flash_attn_compat.engine.call import AttentionCall, Result

# Each block that sees new keys writes them all.
_MOST_NEW = 16


def forward(call: AttentionCall) -> Result:
    """One call; raises KernelError where a kernel cannot be used."""
    call = launcher.tidy(call)
    return launcher.planned("forward", lambda: make_plan(call), call)(call)


def make_plan(call: AttentionCall) -> Callable[[AttentionCall], Result]:
    vec = launcher.vector_size(call[:3], in_place=not call.is_dense and call.cu_seqlens_k is None)
    if not vec:
        return _on_copies
    kind = launcher.kind_of(call, vec)
    plan = Attention(call, kind)
    if plan.splits is None:
        probe.check(kind, call, "forward", plan.inputs.device)
    plan.try_first()
    return plan.run


def _on_copies(call: AttentionCall) -> Result:
    """What is not on 16 bytes is copied into place first."""
    q, k, v = map(launcher.aligned, call[:3])
    result = forward(call._replace(q=q, k=k, v=v))
    return result._replace(out=alignment.narrowed(result.out, call.head_dim_v))


def make_step(call: AttentionCall, new: Append | None) -> Step | None:
    """How all calls over a cache like ``call`` are computed; None where no kernel can read the cache as it lies.

    call: one of them; where their lengths are ints it speaks of all the cache's slots
    """
    few = variants.takes_decode(launcher.longest_rows(call), call.nheads // call.nheads_k, False)
    as_given = launcher.tidy(call) is call and launcher.is_readable(call.q) and (new is None or launcher.is_tidy(new))
    if not as_given:
        slopes, table = _contiguous(call.alibi_slopes), _contiguous(call.block_table)
        call = call._replace(q=call.q.contiguous(), alibi_slopes=slopes, block_table=table)
        new = None if new is None else Append._make(map(_contiguous, new))
    read_at_once = new[:4] if new is not None and few and new.k.shape[1] <= _MOST_NEW else ()
    vec = launcher.vector_size((*call[:3], *read_at_once), in_place=few or not call.is_dense)
    if not vec:
        return None
    plan = Attention(call, launcher.kind_of(call, vec), new)
    if plan.splits is None:
        probe.check(plan.kind, call, "forward", plan.inputs.device)
    plan.try_first()
    return plan.step if as_given else plan.step_on_copies


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


class Attention:
    """Plan of a launch of the forward or the decode kernel; the latter writes a few ``new`` keys on its way.

    More of them, or those of more rows, are written by a launch before it.
    """

    def __init__(self, call: AttentionCall, kind: Kind, new: Append | None = None) -> None:
        self.kind, self.inputs = kind, Inputs(call, new)
        self.dtype, self.place = call.q.dtype, call.q.device
        self.out_shape, self.lse_shape = call.out_shape, call.lse_shape
        self.is_like_q = call.out_shape == call.q.shape and call.q.is_contiguous()
        self.keeps_lse = call.return_lse or call.needs_grad
        self.needs_grad = call.needs_grad
        self.keeps_true_lse = call.needs_grad and call.lse_carries_alibi_position
        self.seqlen_k, self.seqlen_new = launcher.longest_keys(call), 0 if new is None else new.k.shape[1]
        self.splits = launcher.splits_of(call, kind)
        fields = launcher.described(call)
        fields["out_s"] = launcher.contiguous_strides(call.out_shape)
        self.appends, self.writer = new is not None, None
        if new is not None:
            fields |= launcher.described_new(new)
            if self.splits is None or new.k.shape[1] > _MOST_NEW:
                self.writer = Writer(call, new, self.inputs, fields)
                if self.writer.rotates:
                    fields["q_s"] = launcher.contiguous_strides(call.q.shape)
        # The decode kernel scales what it converts step by step.
        converts = kind.type == variants.BF16_AS_FP16 and self.splits is None
        self.maxima = Maxima(call, kind, self.inputs, fields) if converts else None
        # With packed rows, one slab more sets what lies outside of all sequences to 0.
        sequences = call.batch + (call.cu_seqlens_q is not None)
        if self.splits is None:
            variant = variants.forward(kind)
            fields["tiles"] = tiles = -(-launcher.longest_rows(call) // variant.rows)
            blocks = tiles * call.nheads * sequences
        else:
            variant = variants.step(kind) if self.appends and self.writer is None else variants.decode(kind)
            fields |= {"tiles": self.splits.tiles, "splits": self.splits.each}
            blocks = self.splits.each * self.splits.tiles * call.nheads_k * sequences
        # As _launched gives them.
        given = [*self.inputs.names, "seqlen_k", "out"]
        given += ["lse"] * self.keeps_lse + ["lse_true"] * self.keeps_true_lse + ["absmax"] * converts
        if self.splits is not None and self.splits.each > 1:
            given += ["counters", "part_out", "part_ml"]
        self.launch = Launch(variant, self.inputs.device, blocks, fields, given)

    def try_first(self) -> None:
        """Raises KernelError if a kernel turns out to be wrong."""
        kind, device, is_decode = self.kind, self.inputs.device, self.splits is not None
        appends = self.appends and self.writer is None

        def run_tiny(call: AttentionCall, new: Append | None) -> dict[str, Tensor]:
            result = Attention(call, kind, new).run(call, new)
            return {"out": result.out, "softmax_lse": result.lse}

        tried = (self.launch.variant,)
        trial.check(tried, device, lambda: trial.of_forward(kind, self.place, run_tiny, is_decode, appends))
        if self.writer is not None:
            self.writer.try_first(device)

    def run(self, call: AttentionCall, new: Append | None = None) -> Result:
        rng_state = call.rng_state
        if rng_state is None and call.dropout_p:
            rng_state = dropout.new_rng_state(self.place)
        tensors = launcher.tensors_of(call, rng_state, new)
        return self._launched(call.q, self.inputs.addresses(tensors), self.seqlen_k, rng_state)

    def step(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rotary_cos: Tensor | None,
        rotary_sin: Tensor | None,
        cache_seqlens: int | Tensor | None,
        leftpad: Tensor | None,
        table: Tensor | None,
        slopes: Tensor | None,
    ) -> Result:
        """As Step of engine/append.py."""
        used, seqlen_k = cache_seqlens, self.seqlen_k
        if isinstance(cache_seqlens, int):
            used, seqlen_k = None, cache_seqlens + self.seqlen_new
        tensors = q, k_cache, v_cache, slopes, None, None, used, leftpad, table, None, k, v, rotary_cos, rotary_sin
        addresses = self.inputs.addresses(tensors)
        rotated = None if self.writer is None else self.writer.run(addresses, seqlen_k)
        if rotated is not None:
            addresses[0] = rotated.data_ptr()
        result = self._launched(q, addresses, seqlen_k, None)
        if self.appends:
            launcher.note_written(k_cache, v_cache)
        return result

    def step_on_copies(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any) -> Result:
        """The same for what is not laid out as kernels read it: contiguous copies of all but the cache."""
        return self.step(_contiguous(q), k_cache, v_cache, *map(_contiguous, others))

    def _launched(self, q: Tensor, addresses: list[int], seqlen_k: int, rng_state: Tensor | None) -> Result:
        place, splits, lse, true_lse, maxima = self.place, self.splits, None, None, None
        if self.is_like_q and type(q) is Tensor:  # in half the time
            out = torch.empty_like(q)
        else:
            out = torch.empty(self.out_shape, dtype=self.dtype, device=place)
        numbers = [*addresses, seqlen_k, out.data_ptr()]
        if self.keeps_lse:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=place)
            numbers.append(lse.data_ptr())
        if self.keeps_true_lse:
            true_lse = torch.empty(self.lse_shape, dtype=torch.float32, device=place)
            numbers.append(true_lse.data_ptr())
        if self.maxima is not None:
            maxima = self.maxima.run(addresses, seqlen_k)
            numbers.append(maxima.data_ptr())
        if splits is not None and splits.each > 1:
            workspace = launcher.workspace(splits.workspace, self.inputs.device, place)
            start = workspace.data_ptr()
            numbers += start, start + splits.part_out, start + splits.part_ml
        self.launch(*numbers)
        if not self.needs_grad:
            return Result(out, lse, rng_state)
        # The backward takes the true LSE first, then the maxima.
        saved = (lse if true_lse is None else true_lse, maxima) if maxima is not None else (true_lse,)
        return Result(out, lse, rng_state, saved if saved[-1] is not None else ())
