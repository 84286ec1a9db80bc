"""One launch of PyTorch's memory-efficient attention kernel (aten::_efficient_attention_*), forward and backward.

What the kernel wants of its tensors, how it lays out its LSE, and the operators' long signatures are
known here only. Which launches make up a call is torch_efficient.py's business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.engine import lengths
from flash_attn_compat.engine.alignment import aligned_contiguous, ready

NO_MASK, CAUSAL_BOTTOM_RIGHT = 0, 2
# The kernel pads each sequence's LSE to a multiple of this many rows, and its backward reads them.
_LSE_ROWS = 32
_KEYS_PER_BLOCK = 64
_UNEVEN_SPLITS = 16
_FORWARD_ARGUMENTS = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "custom_mask_type", "window_size"}
_BACKWARD_ARGUMENTS = {"cu_seqlens_q", "cu_seqlens_k", "logsumexp", "philox_seed", "custom_mask_type", "window_size"}


def missing_reason() -> str | None:
    """Why this PyTorch's operators can't be called as here, or None."""
    for name, needed in (("forward", _FORWARD_ARGUMENTS), ("backward", _BACKWARD_ARGUMENTS)):
        op = getattr(torch.ops.aten, f"_efficient_attention_{name}", None)
        if op is None:
            return f"this PyTorch has no aten::_efficient_attention_{name}"
        lacking = needed - {argument.name for argument in op.default._schema.arguments}
        if lacking:
            return f"this PyTorch's aten::_efficient_attention_{name} lacks {', '.join(sorted(lacking))}"
    return None


class Launch(NamedTuple):
    """The kernel's inputs.

    q: (batch, rows, heads, head_dim), k and v: (batch, keys, heads, head_dim of their own); batch is 1 with
        cu_seqlens_q and cu_seqlens_k, (n + 1,) int32 starts
    window_size: how many keys a row sees under the causal mask, its own included
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: int = NO_MASK
    window_size: int | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    dropout_p: float = 0.0
    deterministic: bool = False


class Native(NamedTuple):
    """What a launch leaves for its backward: LSE (n, heads, rows rounded up to 32) and the dropout's state."""

    lse: Tensor
    seed: Tensor | None = None
    offset: Tensor | None = None


@functools.cache
def _operator(direction: str) -> Callable[..., tuple[Tensor, ...]]:
    operator: Callable[..., tuple[Tensor, ...]] = getattr(torch.ops.aten, f"_efficient_attention_{direction}").default
    return operator


def forward(launch: Launch, keep_lse: bool) -> tuple[Tensor, Native]:
    """out (batch, rows, heads, head_dim of v); rows without keys are 0, and 0 in the LSE."""
    out, lse, seed, offset, _, _ = _operator("forward")(
        launch.q, launch.k, launch.v, None, launch.cu_seqlens_q, launch.cu_seqlens_k, launch.max_seqlen_q,
        launch.max_seqlen_k, launch.dropout_p, launch.mask, keep_lse, scale=launch.scale,
        window_size=launch.window_size,
    )  # fmt: skip
    return out, Native(lse, seed, offset)


def backward(launch: Launch, dout: Tensor, out: Tensor, native: Native) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one launch, the window handed on explicitly: autograd's own formula drops it before 2.15.

    The kernel reads ``out`` as if it were contiguous, whatever its strides say (seen in 2.11, fp16).
    """
    packed = launch.cu_seqlens_q is not None
    seed = native.seed if native.seed is not None else _no_seed(launch.q.device)
    dq, dk, dv, _ = _operator("backward")(
        ready(dout), launch.q, launch.k, launch.v, None, aligned_contiguous(out), launch.cu_seqlens_q,
        launch.cu_seqlens_k,
        launch.max_seqlen_q if packed else launch.q.shape[1], launch.max_seqlen_k if packed else launch.k.shape[1],
        native.lse, launch.dropout_p, seed, native.offset if native.offset is not None else seed, launch.mask, False,
        scale=launch.scale, num_splits_key=_key_splits(launch), window_size=launch.window_size,
    )  # fmt: skip
    return dq, dk, dv


def _key_splits(launch: Launch) -> int:
    """Into how many parts the backward cuts the keys of one head, which then add to dq atomically.

    PyTorch's own choice (None) is a part for each block of keys, unless there are very many heads. The one from
    which the last part should be done the soonest is up to 30 % faster, for few rows 10 times. Where lengths differ,
    parts of every sequence are needed to even out the work, but not that many.
    """
    rows = launch.max_seqlen_q or launch.q.shape[1]
    if launch.deterministic or rows <= _LSE_ROWS * 2:
        return 1
    sequences, keys, are_even = launch.q.shape[0], launch.k.shape[1], True
    if launch.cu_seqlens_q is not None:
        sequences, keys = launch.cu_seqlens_q.shape[0] - 1, launch.max_seqlen_k or keys
        are_even = sequences * keys <= 1.5 * launch.k.shape[1]
    head_dim = max(launch.q.shape[-1], launch.v.shape[-1])
    at_once = _blocks_at_once(launch.q.device, head_dim, launch.q.dtype)
    heads, blocks = sequences * launch.q.shape[2], -(-keys // _KEYS_PER_BLOCK)
    if are_even:
        return _best_splits(heads, blocks, at_once)
    return min(max(1, blocks), max(_UNEVEN_SPLITS, -(-8 * at_once // heads)))


@functools.lru_cache(maxsize=4096)
def _best_splits(heads: int, blocks: int, at_once: int) -> int:
    """How many parts to make of ``blocks`` of keys for each of ``heads``; ``at_once`` are worked on at a time."""

    def price(splits: int) -> float:
        rounds = -(-heads * splits // at_once) * -(-blocks // splits)
        # Several parts add to the same dq, which costs a third more; of equals the fewest.
        return rounds * (1.0 if splits == 1 else 1.3) * (1.0 + splits / 2000)

    return min(range(1, min(blocks, at_once) + 1), key=price, default=1)


@functools.cache
def _blocks_at_once(device: torch.device, head_dim: int, dtype: torch.dtype) -> int:
    """How many blocks of the backward kernel a GPU holds, by the warps the kernel is compiled for."""
    properties = torch.cuda.get_device_properties(device)
    warps = 12 if properties.major >= 8 and dtype != torch.float32 else 8
    return properties.multi_processor_count * (warps // 4 if head_dim <= 64 else 1)


def skips_empty_rows(launch: Launch) -> bool:
    """Whether the kernel leaves rows without keys unwritten: beyond 128 channels it accumulates in memory."""
    return max(launch.q.shape[-1], launch.v.shape[-1]) > 128


def pad_channels(tensor: Tensor) -> Tensor:
    """Zero channels up to a multiple of 8, the alignment of the tensor-core kernels."""
    missing = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, missing)) if missing else tensor


def lse_to_native(lse: Tensor) -> Tensor:
    """(batch, heads, rows) as the backward reads it: contiguous, rows padded with +inf."""
    missing = -lse.shape[-1] % _LSE_ROWS
    return F.pad(lse, (0, missing), value=torch.inf) if missing else lse.clone(memory_format=torch.contiguous_format)


def packed_lse_to_native(lse: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> Tensor:
    """(heads, total) as (n, heads, rows)."""
    return lengths.padded_lse(lse, cu_seqlens_q, max_seqlen_q + (-max_seqlen_q % _LSE_ROWS))


def _no_seed(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)
