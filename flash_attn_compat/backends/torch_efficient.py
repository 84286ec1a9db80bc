"""PyTorch's memory-efficient kernel (aten::_efficient_attention_*): where our own kernels cannot be compiled.

One launch computes a dense or packed call, full or causal, with dropout; grouped heads get copies of their keys.
Windows are left to chunked, and so are calls in which a row may see no key: the kernel leaves some of those unwritten
and gets others wrong. Nothing waits for the GPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.backends.base import Backend, Capabilities, arguments_of, deliver, operator
from flash_attn_compat.engine import alignment, lengths, outside
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.features import Feature, Traits

_SERVES = (
    Feature.CAUSAL | Feature.DROPOUT | Feature.GQA | Feature.VALUE_HEAD_DIM | Feature.VARLEN | Feature.LSE
    | Feature.BACKWARD | Feature.GIVEN_LSE
)  # fmt: skip
NO_MASK, CAUSAL_BOTTOM_RIGHT = 0, 2
# The kernel pads each sequence's LSE to a multiple of this many rows, and its backward reads them.
_LSE_ROWS = 32
_ARGUMENTS = {
    "forward": {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "custom_mask_type"},
    "backward": {"cu_seqlens_q", "cu_seqlens_k", "logsumexp", "philox_seed", "custom_mask_type"},
}


class TorchEfficient(Backend):
    name = "torch_efficient"
    capabilities = Capabilities(
        features=_SERVES,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        min_capability=(5, 0),
    )

    def unavailable_reasons(self) -> list[str]:
        if torch.version.hip is not None:
            return ["its LSE layout on ROCm differs and is untested"]
        return [
            f"this PyTorch's aten::_efficient_attention_{name} lacks {', '.join(sorted(missing))}"
            for name, needed in _ARGUMENTS.items()
            if (missing := needed - arguments_of(_operator(name)))
        ]

    def extra_reasons(self, traits: Traits) -> list[str]:
        reasons = []
        if traits.dtype == torch.bfloat16 and traits.capability is not None and traits.capability < (8, 0):
            reasons.append("computes bfloat16 on GPUs of compute capability 8.0 and newer only")
        if traits.sq_vs_sk == "?":
            reasons.append("serves packed sequences only where cu_seqlens_q and cu_seqlens_k are known to be equal")
        if traits.sq_vs_sk == ">" and traits.features & Feature.CAUSAL:
            reasons.append("computes rows that see no key wrong: those of more queries than keys under a causal mask")
        return reasons

    def forward(self, call: AttentionCall) -> Result:
        out, launched = launch_forward(_launch(call), keep_lse=call.needs_grad or call.return_lse)
        lse = None
        if call.cu_seqlens_q is not None:
            out = out.squeeze(0)
            outside.clear(out, call.cu_seqlens_q)
            if call.return_lse:
                lse = lengths.packed_lse(launched.lse, call.cu_seqlens_q, call.q.shape[0])
        elif call.return_lse:
            lse = launched.lse[:, :, : call.q.shape[1]]
        return Result(alignment.narrowed(out, call.head_dim_v), lse, None, launched if call.needs_grad else ())

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        launch = _launch(call)
        launched = Launched(*upstream.saved) if upstream.saved else Launched(_padded_lse(launch, upstream.lse))
        dout, out = alignment.padded(upstream.dout), alignment.padded(upstream.out)
        if call.cu_seqlens_q is not None:
            dout, out = dout[None], out[None]
        dq, dk, dv = launch_backward(launch, dout, out, launched)
        found = Gradients(*map(_of_its_own_heads, (dq, dk, dv), (call.q, call.k, call.v)))
        if call.cu_seqlens_q is not None:
            for gradient in found:
                outside.clear(gradient, call.cu_seqlens_q)
        return deliver(found, call, into)


class Launch(NamedTuple):
    """The kernel's inputs.

    q: (batch, rows, heads, head_dim), k and v: (batch, keys, heads, head_dim of their own); batch is 1 with
        cu_seqlens, (n + 1,) int32 starts of queries and keys alike, whose longest sequence has max_seqlen tokens
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: int = NO_MASK
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    dropout_p: float = 0.0


class Launched(NamedTuple):
    """What a launch leaves for its backward: LSE (n, heads, rows rounded up to 32) and the dropout's state."""

    lse: Tensor
    seed: Tensor | None = None
    offset: Tensor | None = None


def launch_forward(launch: Launch, keep_lse: bool) -> tuple[Tensor, Launched]:
    """out (batch, rows, heads, head_dim of v)."""
    out, lse, seed, offset, _, _ = _operator("forward")(
        launch.q, launch.k, launch.v, None, launch.cu_seqlens, launch.cu_seqlens, launch.max_seqlen, launch.max_seqlen,
        launch.dropout_p, launch.mask, keep_lse, scale=launch.scale,
    )  # fmt: skip
    return out, Launched(lse, seed, offset)


def launch_backward(launch: Launch, dout: Tensor, out: Tensor, launched: Launched) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. The kernel reads ``out`` as if it were contiguous, whatever its strides say (2.11, fp16)."""
    longest_q = launch.max_seqlen or launch.q.shape[1]
    longest_k = launch.max_seqlen or launch.k.shape[1]
    seed = launched.seed if launched.seed is not None else torch.empty((), dtype=torch.int64, device=launch.q.device)
    # Blocks that share a head's keys add to dq atomically. For few rows one alone took a tenth of the time.
    splits = 1 if longest_q <= 2 * _LSE_ROWS else None
    dq, dk, dv, _ = _operator("backward")(
        alignment.ready(dout), launch.q, launch.k, launch.v, None, alignment.ready(out.contiguous()),
        launch.cu_seqlens, launch.cu_seqlens, longest_q, longest_k, launched.lse, launch.dropout_p, seed,
        launched.offset if launched.offset is not None else seed, launch.mask, False, scale=launch.scale,
        num_splits_key=splits,
    )  # fmt: skip
    return dq, dk, dv


@functools.cache
def _operator(direction: str) -> Any:
    return operator(f"_efficient_attention_{direction}")


def _launch(call: AttentionCall) -> Launch:
    q, k, v = map(alignment.padded, (call.q, call.k, call.v))
    if call.nheads != call.nheads_k:
        k, v = (tensor.repeat_interleave(call.nheads // call.nheads_k, dim=-2) for tensor in (k, v))
    mask = NO_MASK if call.mask.right is None else CAUSAL_BOTTOM_RIGHT
    launch = Launch(q, k, v, call.softmax_scale, mask, dropout_p=call.dropout_p)
    if call.cu_seqlens_q is None:
        return launch
    longest = max(1, min(call.max_seqlen_q, q.shape[0]))
    return launch._replace(q=q[None], k=k[None], v=v[None], cu_seqlens=call.cu_seqlens_q, max_seqlen=longest)


def _padded_lse(launch: Launch, lse: Tensor) -> Tensor:
    """flash-attn's LSE as the backward reads it: (n, heads, rows), contiguous, +inf behind the last row."""
    if launch.cu_seqlens is not None and launch.max_seqlen is not None:
        return lengths.padded_lse(lse, launch.cu_seqlens, launch.max_seqlen + -launch.max_seqlen % _LSE_ROWS)
    return F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf).contiguous()


def _of_its_own_heads(gradient: Tensor, source: Tensor) -> Tensor:
    """In the shape of ``source``: gradients of copies of a head summed in fp32, padded channels cut off."""
    gradient = gradient.view(*source.shape[:-2], *gradient.shape[-2:])
    if gradient.shape[-2] != source.shape[-2]:
        gradient = torch.unflatten(gradient, -2, (source.shape[-2], -1)).sum(-2, dtype=torch.float32).to(source.dtype)
    return gradient[..., : source.shape[-1]]
