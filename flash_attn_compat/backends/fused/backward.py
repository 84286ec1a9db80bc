"""A call's gradients: delta, then dkdv for tiles of keys, then dq for tiles of rows.

Nothing is added by atomics: the same bits each time.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import launcher, loader, params, probe, trial, variants
from flash_attn_compat.backends.fused.launcher import address, reach
from flash_attn_compat.backends.fused.loader import Kernel, Target
from flash_attn_compat.backends.fused.maxima import Maxima
from flash_attn_compat.backends.fused.variants import Kind, Variant
from flash_attn_compat.engine.call import AttentionCall, Gradients, Upstream

_FLOAT = torch.float32
_TILES, _ONE_INT = params.offsets()["tiles"], struct.Struct("<i")


def backward(call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
    """Gradients, written through ``into`` where given; raises KernelError where a kernel cannot be used."""
    call = launcher.tidy(call)
    # A gradient of sum() is one number for all rows, and one that is transposed is common too: copies that cost little.
    out, dout = map(_in_rows, (upstream.out, upstream.dout))
    upstream = upstream._replace(out=out, dout=dout)
    place = (
        into if into is not None and all(map(_is_writable, into)) else Gradients(*map(_empty, (call.q, call.k, call.v)))
    )
    tensors = (call.q, call.k, call.v, out, dout, *place)
    readable = all(map(launcher.is_readable, tensors))
    if readable and all(map(launcher.is_aligned, tensors)):
        found = _run(call, upstream, place, 8)
    elif readable and sum(tensor.numel() for tensor in tensors) <= launcher.SMALL:
        found = _run(call, upstream, place, 1)
    else:
        found = _on_copies(call, upstream)
    if into is None:
        return found
    for target, gradient in zip(into, found):
        if gradient is not target:
            target.copy_(gradient)
    if found is into:
        launcher.note_written(*into)
    return into


def _on_copies(call: AttentionCall, upstream: Upstream) -> Gradients:
    """Unaligned rows are copied into place first; their gradients have the padding cut off."""
    q, k, v, out, dout = map(launcher.aligned, (call.q, call.k, call.v, upstream.out, upstream.dout))
    wide = call._replace(q=q, k=k, v=v)
    found = _run(wide, upstream._replace(out=out, dout=dout), Gradients(*map(_empty, (q, k, v))), 8)
    sources = (call.q, call.k, call.v)
    return Gradients(*(gradient[..., : source.shape[-1]] for gradient, source in zip(found, sources)))


def _run(call: AttentionCall, upstream: Upstream, gradients: Gradients, vec: int) -> Gradients:
    # Reported under causal ALiBi is LSE plus a position, which may be large beside it: the true one was kept.
    is_true = bool(upstream.saved)
    lse = upstream.saved[0] if is_true else upstream.softmax_lse
    assert lse is not None
    dout, out = upstream.dout, upstream.out
    signature = (
        "backward", *launcher.key(call), vec, is_true, dout.stride(), out.stride(),
        *[gradient.stride() for gradient in gradients],
    )  # fmt: skip
    plan = launcher.planned(
        signature, call.q.get_device(), lambda: _make_plan(call, dout, out, gradients, vec, is_true)
    )
    return plan.run(call, dout, out, lse if lse.is_contiguous() else lse.contiguous(), gradients)


def _make_plan(call: AttentionCall, dout: Tensor, out: Tensor, gradients: Gradients, vec: int, is_true: bool) -> Plan:
    device = call.q.get_device()
    target = loader.target(device)
    kind = launcher.kind_of(call, target, vec)
    probe.check(kind, call, "backward", device)
    plan = Plan(call, dout, out, gradients, kind, target, is_true)

    def run(tiny: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        places = Gradients(*map(_empty, (tiny.q, tiny.k, tiny.v)))
        return Plan(tiny, dout, out, places, kind, target, True).run(tiny, dout, out, lse, places)

    def tried() -> str | None:
        return trial.of_backward(trial.problem(kind, call.q.device, few_rows=False, needs_grad=True), run)

    trial.check(plan.variants, target, device, tried)
    return plan


class Plan:
    def __init__(
        self,
        call: AttentionCall,
        dout: Tensor,
        out: Tensor,
        gradients: Gradients,
        kind: Kind,
        target: Target,
        is_true: bool,
    ) -> None:
        self.device = call.q.get_device()
        self.inputs, self.sizes = launcher.Inputs(call), tuple(map(reach, (out, dout, *gradients)))
        self.lse_shape, self.lse_size = call.lse_shape, 4 * (call.q.numel() // call.q.shape[-1])
        fields = launcher.described(call)
        fields |= {"out_s": launcher.strides(out), "dout_s": launcher.strides(dout)}
        fields |= {f"d{name}_s": launcher.strides(gradient) for name, gradient in zip("qkv", gradients)}
        fields["lse_has_position"] = int(call.lse_carries_alibi_position and not is_true)
        self.maxima = Maxima(call, kind, target, dout) if kind.type == variants.BF16_AS_FP16 else None
        if self.maxima is not None:
            fields["absmax_splits"] = self.maxima.splits
        self.pack, self.template = params.template(fields, 27)
        self.launches = self._launches(call, kind, target)

    def _launches(self, call: AttentionCall, kind: Kind, target: Target) -> tuple[tuple[Kernel, int, int], ...]:
        """(kernel, tiles, blocks) in order."""
        found = []
        self.variants: tuple[Variant, ...] = ()
        rows, keys = launcher.longest_rows(call), launcher.longest_keys(call)
        # With packed tokens, one slab more sets the gradients of those outside of all sequences to 0.
        all_rows, all_keys = call.batch + (call.cu_seqlens_q is not None), call.batch + (call.cu_seqlens_k is not None)
        parts = variants.dkdv_parts(kind)
        makers = variants.delta, variants.dkdv, variants.dq
        loader.load_together([make(kind) for make in makers], target.architecture, self.device)
        for make, length, heads, sequences in (
            (variants.delta, rows, call.nheads, call.batch),
            (variants.dkdv, keys, call.nheads_k * parts, all_keys),
            (variants.dq, rows, call.nheads, all_rows),
        ):
            variant, kernel = launcher.loaded(make, kind, target, self.device)
            self.variants += (variant,)
            tiles = -(-length // variant.rows)
            found.append((kernel, tiles, tiles * heads * sequences))
        return tuple(found)

    def run(self, call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor, gradients: Gradients) -> Gradients:
        device, dtype = self.device, call.q.dtype
        out_size, dout_size, dq_size, dk_size, dv_size = self.sizes
        dq, dk, dv = gradients
        tensors, rest = self.inputs.of(call, call.rng_state)
        dout_at = address("dout", dout, dtype, device, dout_size)
        delta = torch.empty(self.lse_shape, dtype=_FLOAT, device=lse.device)
        maxima = None if self.maxima is None else self.maxima.run(tensors, rest, dout_at)
        buffer = launcher.arguments.buffer
        self.pack(
            buffer, 0, *tensors, address("out", out, dtype, device, out_size),
            address("softmax_lse", lse, _FLOAT, device, self.lse_size), 0, *rest,
            0 if maxima is None else maxima.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0, dout_at,
            address("dq", dq, dtype, device, dq_size),
            address("dk", dk, dtype, device, dk_size),
            address("dv", dv, dtype, device, dv_size),
            delta.data_ptr(), self.template,
        )  # fmt: skip
        for kernel, tiles, blocks in self.launches:
            _ONE_INT.pack_into(buffer, _TILES, tiles)
            launcher.submit(kernel, blocks, device)
        return gradients


def _in_rows(tensor: Tensor) -> Tensor:
    """``tensor``, or a contiguous copy where that alone puts its rows on 16 bytes."""
    if launcher.is_readable(tensor) and (launcher.is_aligned(tensor) or tensor.shape[-1] % 8):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _is_writable(tensor: Tensor) -> bool:
    """Whether a kernel can write it: readable, and no two elements in one place."""
    apart = all(size <= 1 or stride > 0 for size, stride in zip(tensor.shape, tensor.stride()))
    return apart and launcher.is_readable(tensor)
