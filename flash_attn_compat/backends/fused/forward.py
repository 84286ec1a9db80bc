"""A call's forward: the forward kernel for tiles of rows, the decode kernel for few rows over many keys."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, loader, params, probe, trial, variants
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.backends.fused.maxima import Maxima
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine import dropout
from flash_attn_compat.engine.call import AttentionCall, Result

_FLOAT = torch.float32


def forward(call: AttentionCall) -> Result:
    """One call; raises KernelError where a kernel cannot be used."""
    prepared = take_prepared(call)
    if prepared is not None:
        return prepared.plan.launch(*prepared[4:])
    call = launcher.tidy(call) if call.alibi_slopes is not None or call.block_table is not None else call
    return launcher.planned(("forward", *launcher.key(call)), call.q.get_device(), lambda: make_plan(call)).run(call)


class Prepared(NamedTuple):
    """What an append leaves for the call behind it: a plan, and addresses that were checked for both."""

    q: Tensor
    k: Tensor
    stream: int
    plan: Attention
    tensors: tuple[int, ...]
    rest: tuple[int, ...]
    workspace: Tensor | None


class _Last(threading.local):
    prepared: Prepared | None = None


_last = _Last()


def prepare(prepared: Prepared | None) -> None:
    """For the next call of this thread, if it has that q and k."""
    _last.prepared = prepared


def take_prepared(call: AttentionCall) -> Prepared | None:
    prepared = _last.prepared
    if prepared is None:
        return None
    _last.prepared = None
    is_meant = prepared.q is call.q and prepared.k is call.k
    return prepared if is_meant and prepared.stream == launcher.stream(prepared.plan.device) else None


class Copied:
    """Unaligned rows are copied into place first."""

    def run(self, call: AttentionCall) -> Result:
        q, k, v = map(launcher.aligned, (call.q, call.k, call.v))
        result = forward(call._replace(q=q, k=k, v=v))
        if v.shape[-1] == call.v.shape[-1]:
            return result
        return result._replace(out=result.out[..., : call.v.shape[-1]])


class Attention:
    """A launch of the forward or the decode kernel."""

    def __init__(self, call: AttentionCall, kind: Kind, target: Target, device: int) -> None:
        self.device, self.dtype, self.place = device, call.q.dtype, call.q.device
        self.out_shape, self.lse_shape = call.out_shape, call.lse_shape
        self.keeps_lse = call.return_lse or call.needs_grad
        self.keeps_true_lse = call.needs_grad and call.lse_carries_alibi_position
        self.inputs = launcher.Inputs(call)
        fields = launcher.described(call)
        fields["out_s"] = launcher.contiguous_strides(call.out_shape)
        self.splits = launcher.splits_of(call, kind)
        # The decode kernel scales what it converts step by step.
        converts = kind.type == variants.BF16_AS_FP16 and self.splits is None
        self.maxima = Maxima(call, kind, target) if converts else None
        if self.maxima is not None:
            fields["absmax_splits"] = self.maxima.splits
        make = variants.forward if self.splits is None else variants.decode
        self.variant, self.kernel = launcher.loaded(make, kind, target, device)
        # With packed rows, one slab more sets what lies outside of all sequences to 0.
        sequences = call.batch + (call.cu_seqlens_q is not None)
        if self.splits is None:
            fields["tiles"] = tiles = -(-launcher.longest_rows(call) // self.variant.rows)
            self.blocks = tiles * call.nheads * sequences
        else:
            fields |= {"tiles": self.splits.tiles, "splits": self.splits.each}
            self.blocks = self.splits.each * self.splits.tiles * call.nheads_k * sequences
        self.pack, self.template = params.template(fields, 17)

    def run(self, call: AttentionCall) -> Result:
        rng_state = call.rng_state
        if rng_state is None and call.dropout_p:
            rng_state = dropout.new_rng_state(self.place)
        workspace = self.workspace()
        if workspace is not None and self.splits is not None:
            loader.driver().clear(workspace.data_ptr() + self.splits.counters, self.splits.total, self.device)
        return self.launch(*self.inputs.of(call, rng_state), workspace, rng_state)

    def workspace(self) -> Tensor | None:
        """Memory in which the blocks that share a tile's keys meet."""
        if self.splits is None or self.splits.each == 1:
            return None
        return torch.empty(self.splits.workspace, dtype=torch.uint8, device=self.place)

    def launch(
        self,
        tensors: tuple[int, ...],
        rest: tuple[int, ...],
        workspace: Tensor | None,
        rng_state: Tensor | None = None,
    ) -> Result:
        """The launch itself; counters in the workspace are zeroed earlier on the stream."""
        place, splits, partials = self.place, self.splits, (0, 0, 0)
        maxima = None if self.maxima is None else self.maxima.run(tensors, rest)
        out = torch.empty(self.out_shape, dtype=self.dtype, device=place)
        lse = torch.empty(self.lse_shape, dtype=_FLOAT, device=place) if self.keeps_lse else None
        true_lse = torch.empty(self.lse_shape, dtype=_FLOAT, device=place) if self.keeps_true_lse else None
        if workspace is not None and splits is not None:
            start = workspace.data_ptr()
            partials = start, start + splits.part_ml, start + splits.counters
        self.pack(
            launcher.arguments.buffer, 0, *tensors, out.data_ptr(), 0 if lse is None else lse.data_ptr(),
            0 if true_lse is None else true_lse.data_ptr(), *rest,
            0 if maxima is None else maxima.data_ptr(), *partials, self.template,
        )  # fmt: skip
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
