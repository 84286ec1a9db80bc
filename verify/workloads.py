"""What is timed, as data: shapes and masks of well-known models, and their tensors. Nothing here computes attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from verify.call import Call

# flash-attn's own pages are multiples of this.
PAGE_SIZE = 256


@dataclass(frozen=True)
class Workload:
    """One attention problem. `packed` sequences lie end to end (varlen); a `decode` reads one query row for each
    sequence from a KV cache, in pages if `page_size` says so. One that `appends` rotates it and the last key, and
    writes that and the last value first, as a model's decoding step does.
    """

    name: str
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    nheads: int
    nheads_k: int
    head_dim: int
    packed: bool = False
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    dropout_p: float = 0.0
    decode: bool = False
    page_size: int | None = None
    appends: bool = False

    @property
    def batch(self) -> int:
        return len(self.seqlens_q)

    @property
    def max_seqlen_q(self) -> int:
        return max(self.seqlens_q)

    @property
    def max_seqlen_k(self) -> int:
        return max(self.seqlens_k)

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.nheads // self.nheads_k

    @property
    def bounds(self) -> tuple[int, int]:
        """The window with causal as what it is: nothing to the right. -1 for an open side."""
        left, right = self.window_size
        return left, 0 if self.causal else right

    @property
    def self_attention(self) -> bool:
        return self.seqlens_q == self.seqlens_k

    @property
    def full(self) -> bool:
        """Whether every sequence is as long as the longest, so that there is nothing to pad."""
        return len(set(self.seqlens_q)) == 1 and len(set(self.seqlens_k)) == 1

    def describe(self) -> str:
        longest = f"{self.max_seqlen_q}x{self.max_seqlen_k}" if not self.self_attention else str(self.max_seqlen_q)
        heads = f"{self.nheads}/{self.nheads_k} heads, head_dim {self.head_dim}"
        return f"{self.batch} x {'' if self.full else '<='}{longest}, {heads}"


# ---- the workloads --------------------------------------------------------------------------------------------------


def _packed(name: str, lengths: tuple[int, ...], nheads: int, head_dim: int, **more: Any) -> Workload:
    return Workload(name, lengths, lengths, nheads, nheads, head_dim, packed=True, **more)


def _dense(name: str, batch: int, seqlen: int, heads: tuple[int, int], head_dim: int, **more: Any) -> Workload:
    return Workload(name, (seqlen,) * batch, (seqlen,) * batch, *heads, head_dim, **more)


def _decode(batch: int, seqlen: int, heads: tuple[int, int], head_dim: int = 128) -> list[Workload]:
    """Reading a cache, reading pages, and a model's step: append, rotate and read, from either."""
    name = f"decode_{batch}x{seqlen}" + ("" if head_dim == 128 else f"_d{head_dim}")
    contiguous = Workload(name, (1,) * batch, (seqlen,) * batch, *heads, head_dim, causal=True, decode=True)
    both = [contiguous, replace(contiguous, name=f"{name}_paged", page_size=PAGE_SIZE)]
    return [*both, *(replace(each, name=f"{each.name}_append", appends=True) for each in both)]


def skewed_lengths(count: int, middle: float = 700.0, lowest: int = 16, highest: int = 8192) -> tuple[int, ...]:
    """Log-normal lengths as in text corpora: for 128 of them the mean is 998, the longest 6998."""
    draws = torch.randn(count, generator=torch.Generator().manual_seed(1))
    return tuple((draws * 0.9 + math.log(middle)).exp().int().clamp(lowest, highest).tolist())


FULL: tuple[Workload, ...] = (
    _packed("uniform_varlen", (4096,) * 32, 8, 64),
    _packed("skewed_varlen", skewed_lengths(128), 16, 64),
    _packed("skewed_causal", skewed_lengths(128), 16, 64, causal=True),
    _packed("ptv3_patches", (1024,) * 512, 4, 16),
    _dense("llm_gqa_causal", 8, 2048, (32, 8), 128, causal=True),
    _dense("mistral_window", 1, 16384, (32, 8), 128, causal=True, window_size=(1024, 0)),
    _packed("modernbert_local", (8192, 3000, 512, 6000) * 2, 12, 64, window_size=(64, 64)),
    _dense("alibi_causal", 4, 4096, (16, 16), 64, causal=True, alibi=True),
    _dense("alibi_bidirectional", 4, 2048, (16, 16), 64, alibi=True),
    _dense("gemma_softcap", 1, 4096, (8, 4), 128, causal=True, softcap=50.0),
    _dense("gemma_softcap_window", 1, 8192, (8, 4), 128, causal=True, softcap=50.0, window_size=(1024, 0)),
    _dense("dropout_train", 8, 1024, (16, 16), 64, causal=True, dropout_p=0.1),
    Workload("cross_short_q", (64,) * 16, (4096,) * 16, 16, 16, 64),
)

DECODE: tuple[Workload, ...] = (
    *_decode(1, 8192, (32, 8)),
    *_decode(32, 4096, (32, 8)),
    *_decode(8, 16384, (32, 32)),
    *_decode(64, 2048, (32, 8)),
    *_decode(8, 4096, (16, 16), head_dim=64),
    *_decode(8, 4096, (16, 8), head_dim=256),
)


def shrunk(workload: Workload, batch: int = 8, seqlen: int = 8, heads: int = 4) -> Workload:
    """The same kind of problem, so many times smaller: for a CPU."""

    def some(lengths: tuple[int, ...]) -> tuple[int, ...]:
        kept = max(1, len(lengths) // batch) if len(lengths) > batch else min(len(lengths), 2)
        return tuple(length if length == 1 else max(1, length // seqlen) for length in lengths[:kept])

    fewer = math.gcd(heads, workload.nheads_k)
    left, right = (bound if bound <= 0 else max(1, bound // seqlen) for bound in workload.window_size)
    return replace(
        workload,
        seqlens_q=some(workload.seqlens_q),
        seqlens_k=some(workload.seqlens_k),
        nheads=workload.nheads // fewer,
        nheads_k=workload.nheads_k // fewer,
        window_size=(left, right),
    )


SMALL: tuple[Workload, ...] = tuple(shrunk(workload) for workload in (*FULL, *DECODE))


# ---- tensors --------------------------------------------------------------------------------------------------------


def make_call(workload: Workload, device: str, dtype: torch.dtype, seed: int = 0) -> Call:
    """The workload as a call of flash-attn's function for it, with a dout like its output."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def tokens(lengths: tuple[int, ...]) -> tuple[int, ...]:
        return (sum(lengths),) if workload.packed else (len(lengths), max(lengths))

    heads_k = workload.nheads_k, workload.head_dim
    q = normal(*tokens(workload.seqlens_q), workload.nheads, workload.head_dim)
    args: dict[str, Any] = {"q": q, "causal": workload.causal}
    args |= {"window_size": workload.window_size, "softcap": workload.softcap}
    if workload.alibi:  # as the paper has the slopes for powers of two
        heads = torch.arange(1, workload.nheads + 1, device=device, dtype=torch.float32)
        args["alibi_slopes"] = 2.0 ** (-8.0 * heads / workload.nheads)
    if workload.decode:
        args |= _cache(workload, device, dtype, normal, seed)
        return Call("flash_attn_with_kvcache", args)
    args |= {name: normal(*tokens(workload.seqlens_k), *heads_k) for name in "kv"} | {"dropout_p": workload.dropout_p}
    dout = normal(*q.shape)
    if not workload.packed:
        return Call("flash_attn_func", args, dout)
    ends_q, ends_k = (
        torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)
        for lengths in (workload.seqlens_q, workload.seqlens_k)
    )
    # One tensor for both in self-attention, as models pass it: the lengths are known to be equal without a look.
    args |= {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_q if workload.self_attention else ends_k}
    args |= {"max_seqlen_q": workload.max_seqlen_q, "max_seqlen_k": workload.max_seqlen_k}
    return Call("flash_attn_varlen_func", args, dout)


def _cache(
    workload: Workload, device: str, dtype: torch.dtype, normal: Callable[..., Tensor], seed: int
) -> dict[str, Any]:
    heads = workload.nheads_k, workload.head_dim
    capacity, shape = workload.max_seqlen_k, (workload.batch, workload.max_seqlen_k, *heads)
    lengths = torch.tensor(workload.seqlens_k, dtype=torch.int32, device=device)
    args: dict[str, Any] = {"cache_seqlens": lengths - int(workload.appends)}
    if workload.page_size:
        each = -(-workload.max_seqlen_k // workload.page_size)
        capacity, shape = each * workload.page_size, (workload.batch * each, workload.page_size, *heads)
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
        args["block_table"] = order.view(workload.batch, each).to(device, torch.int32)
    args |= {"k_cache": normal(*shape), "v_cache": normal(*shape)}
    if workload.appends:
        frequency = 1e4 ** (-torch.arange(0, workload.head_dim, 2, dtype=torch.float64) / workload.head_dim)
        angles = torch.arange(capacity, dtype=torch.float64)[:, None] * frequency
        args |= {name: normal(workload.batch, 1, *heads) for name in "kv"}
        args |= {"rotary_cos": angles.cos().to(device, dtype), "rotary_sin": angles.sin().to(device, dtype)}
    return args
