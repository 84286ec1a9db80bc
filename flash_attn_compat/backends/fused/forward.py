"""A call's forward: the forward kernel for tiles of rows, the decode kernel for few rows over many keys."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, loader, params, probe, trial, variants
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.backends.fused.maxima import Maxima
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine import dropout
from flash_attn_compat.engine.append import Append
from flash_attn_compat.engine.call import AttentionCall, Result

_FLOAT = torch.float32
_NOTHING_NEW = (0,) * 4
# Each block that sees new keys writes them all.
_MOST_NEW = 16
_SEQLEN_K, _ONE_INT = params.offsets()["seqlen_k"], struct.Struct("<i")


def forward(call: AttentionCall) -> Result:
    """One call; raises KernelError where a kernel cannot be used."""
    call = launcher.tidy(call) if call.alibi_slopes is not None or call.block_table is not None else call
    return launcher.planned(("forward", *launcher.key(call)), call.q.get_device(), lambda: make_plan(call)).run(call)


class Copied:
    """Unaligned rows are copied into place first."""

    def run(self, call: AttentionCall) -> Result:
        q, k, v = map(launcher.aligned, (call.q, call.k, call.v))
        result = forward(call._replace(q=q, k=k, v=v))
        if v.shape[-1] == call.v.shape[-1]:
            return result
        return result._replace(out=result.out[..., : call.v.shape[-1]])


class Attention:
    """A launch of the forward or the decode kernel, which may append ``new`` keys on its way."""

    def __init__(self, call: AttentionCall, kind: Kind, target: Target, device: int, new: Append | None = None) -> None:
        self.device, self.dtype, self.place = device, call.q.dtype, call.q.device
        self.out_shape, self.lse_shape = call.out_shape, call.lse_shape
        self.is_like_q = call.out_shape == call.q.shape and call.q.is_contiguous()
        self.keeps_lse = call.return_lse or call.needs_grad
        self.keeps_true_lse = call.needs_grad and call.lse_carries_alibi_position
        self.inputs = launcher.Inputs(call)
        self.new_inputs = None if new is None else launcher.NewInputs(new)
        fields = launcher.described(call)
        fields["out_s"] = launcher.contiguous_strides(call.out_shape)
        self.splits = launcher.splits_of(call, kind)
        # The decode kernel scales what it converts step by step.
        converts = kind.type == variants.BF16_AS_FP16 and self.splits is None
        self.maxima = Maxima(call, kind, target) if converts else None
        if self.maxima is not None:
            fields["absmax_splits"] = self.maxima.splits
        make = variants.forward if self.splits is None else variants.decode
        if new is not None:
            make = variants.step
            fields |= launcher.described_new(new)
        self.variant, self.kernel = launcher.loaded(make, kind, target, device)
        # With packed rows, one slab more sets what lies outside of all sequences to 0.
        sequences = call.batch + (call.cu_seqlens_q is not None)
        if self.splits is None:
            fields["tiles"] = tiles = -(-launcher.longest_rows(call) // self.variant.rows)
            self.blocks = tiles * call.nheads * sequences
        else:
            fields |= {"tiles": self.splits.tiles, "splits": self.splits.each}
            self.blocks = self.splits.each * self.splits.tiles * call.nheads_k * sequences
        self.pack, self.template = params.template(fields, 21)

    def run(self, call: AttentionCall, new: Append | None = None) -> Result:
        rng_state = call.rng_state
        if rng_state is None and call.dropout_p:
            rng_state = dropout.new_rng_state(self.place)
        tensors, rest = self.inputs.of(call, rng_state)
        added = _NOTHING_NEW if self.new_inputs is None or new is None else self.new_inputs.of(*new[:4])
        return self.launch(tensors, rest, added, call.q if call.signature is not None else None, rng_state)

    def step(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        rotary_cos: Tensor | None,
        rotary_sin: Tensor | None,
        cache_seqlens: int | Tensor | None,
        leftpad: Tensor | None,
        table: Tensor | None,
        slopes: Tensor | None,
    ) -> Result:
        """As Step of engine/append.py."""
        new, added, used, length = self.new_inputs, _NOTHING_NEW, None, None
        if not isinstance(cache_seqlens, int):
            used = cache_seqlens
        else:
            length = cache_seqlens if new is None else cache_seqlens + new.rows
        if new is not None:
            added = new.of(k, v, rotary_cos, rotary_sin)
        tensors, rest = self.inputs.of_tensors(q, k_cache, v_cache, slopes, None, None, used, leftpad, table, None)
        result = self.launch(tensors, rest, added, q, None, length)
        if new is not None:
            launcher.note_written(k_cache, v_cache)
        return result

    def launch(
        self,
        tensors: tuple[int, ...],
        rest: tuple[int, ...],
        added: tuple[int, ...],
        like: Tensor | None,
        rng_state: Tensor | None,
        length: int | None = None,
    ) -> Result:
        """The launch itself. like: q, if it is a plain tensor; length: keys of every sequence, if not as planned."""
        place, splits, partials = self.place, self.splits, (0, 0, 0)
        maxima = None if self.maxima is None else self.maxima.run(tensors, rest)
        if like is not None and self.is_like_q:  # in half the time
            out = torch.empty_like(like)
        else:
            out = torch.empty(self.out_shape, dtype=self.dtype, device=place)
        lse = torch.empty(self.lse_shape, dtype=_FLOAT, device=place) if self.keeps_lse else None
        true_lse = torch.empty(self.lse_shape, dtype=_FLOAT, device=place) if self.keeps_true_lse else None
        if splits is not None and splits.each > 1:
            workspace = launcher.workspace(splits.workspace, self.device, place)
            start = workspace.data_ptr()
            partials = start + splits.part_out, start + splits.part_ml, start
        buffer = launcher.arguments.buffer
        self.pack(
            buffer, 0, *tensors, out.data_ptr(), 0 if lse is None else lse.data_ptr(),
            0 if true_lse is None else true_lse.data_ptr(), *rest,
            0 if maxima is None else maxima.data_ptr(), *partials, *added, self.template,
        )  # fmt: skip
        if length is not None:
            _ONE_INT.pack_into(buffer, _SEQLEN_K, length)
        launcher.submit(self.kernel, self.blocks, self.device)
        return Result(out, lse, rng_state, () if true_lse is None else (true_lse,))


def make_plan(call: AttentionCall) -> Attention | Copied:
    device = call.q.get_device()
    in_cache = not call.is_dense and call.cu_seqlens_k is None
    vec = launcher.vector_size(call, in_cache)
    if not vec:
        return Copied()
    target = loader.target(device)
    kind = launcher.kind_of(call, target, vec)
    plan = Attention(call, kind, target, device)
    if plan.splits is None:
        probe.check(kind, call, "forward", device)

    def tried() -> str | None:
        problem = trial.problem(kind, call.q.device, plan.splits is not None, needs_grad=False)
        return trial.of_forward(problem, lambda tiny: Attention(tiny, kind, target, device).run(tiny)[:2])

    trial.check((plan.variant,), target, device, tried)
    return plan


def make_step(call: AttentionCall, new: Append | None) -> Attention | None:
    """For calls over a cache that the decode kernel can serve in one launch; ``call`` is one, over all of its slots."""
    rows, group = launcher.longest_rows(call), call.nheads // call.nheads_k
    if not variants.takes_decode(rows, group, False) or launcher.tidy(call) is not call:
        return None
    vec = launcher.vector_size(call, in_place=True)
    if new is not None:
        if new.k.shape[1] > _MOST_NEW or not launcher.is_tidy(new):
            return None
        vec = min(vec, launcher.new_vector_size(new))
    if not vec:
        return None
    device, target = call.q.get_device(), loader.target(call.q.get_device())
    kind = launcher.kind_of(call, target, vec)
    plan = Attention(call, kind, target, device, new)

    def tried() -> str | None:
        problem = trial.problem(kind, call.q.device, few_rows=True, needs_grad=False)
        if new is None:
            return trial.of_forward(problem, lambda tiny: Attention(tiny, kind, target, device).run(tiny)[:2])
        return trial.of_step(problem, lambda tiny, new: Attention(tiny, kind, target, device, new).run(tiny, new))

    trial.check((plan.variant,), target, device, tried)
    return plan
