"""The timed workloads, as data: shapes and masks of well-known models. No attention is computed here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_attn_compat.card import Limits, count_flops

from .call import Call
from .problems import Problem

# Explains the text that Workload.describe returns.
SHAPE_NOTE = "sequences x length, or x queries x keys if they differ; <= the longest length. heads: of q / of k, v."
# flash-attn accepts only page sizes that are multiples of this.
PAGE_SIZE = 256
DECODING = "decode_"  # prefix of a workload that reads a cache
IN_GRAPH = " in a graph"  # suffix of a workload that replays its call from a CUDA graph


@dataclass(frozen=True, repr=False)
class Workload(Problem):
    """A named problem of kind "dense", "varlen" or "kvcache".

    "kvcache" has one query row for each sequence over a cache, in pages if `page_size` is set. With `new_keys` it first
    rotates the row and the new key and appends key and value, as a model's decoding step does.
    """

    name: str = ""

    @property
    def packed(self) -> bool:
        return self.kind == "varlen"

    @property
    def decode(self) -> bool:
        return self.kind == "kvcache"

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
    def self_attention(self) -> bool:
        return self.seqlens_q == self.seqlens_k

    @property
    def full(self) -> bool:
        """Whether all sequences have the longest length, so there is no padding."""
        return len(set(self.seqlens_q)) == 1 and len(set(self.seqlens_k)) == 1

    def describe(self) -> str:
        longest = f"{self.max_seqlen_q}x{self.max_seqlen_k}" if not self.self_attention else str(self.max_seqlen_q)
        said = [f"{self.batch} x {'' if self.full else '<='}{longest}", f"{self.nheads}/{self.nheads_k} heads"]
        features = {
            "packed": self.packed,
            "causal": self.causal,
            f"window {self.window}": self.window != (-1, -1),
            f"softcap {self.softcap:g}": self.softcap,
            "ALiBi": self.alibi,
            f"dropout {self.dropout_p:g}": self.dropout_p,
            f"pages of {self.page_size}": self.page_size,
            "a key appended": self.new_keys,
        }
        return ", ".join(
            [*said, f"head_dim {self.head_dim}", *(words for words, is_there in features.items() if is_there)]
        )

    def call(self, device: str, dtype: torch.dtype, seed: int = 0) -> Call:
        """Return a call of flash-attn's function, with a dout like its output, drawn on the device."""
        problem = replace(self, dtype=str(dtype).removeprefix("torch."), seed=seed)
        call = problem.build(device, drawn_there=True)
        if self.packed and self.self_attention:
            # One tensor for both, as models pass it: kernels then know that lengths are equal.
            call.args["cu_seqlens_k"] = call.args["cu_seqlens_q"]
        return call


# ---- the workloads --------------------------------------------------------------------------------------------------


def workload(
    name: str, lengths: tuple[int, ...], heads: tuple[int, int], head_dim: int, kind: str = "dense", **more: Any
) -> Workload:
    """Return a workload. heads: of queries, and of keys; seqlens_k: by default the queries' lengths"""
    given = {"seqlens_k": lengths, "return_attn_probs": False, **more}
    return Workload(kind, lengths, nheads_k=heads[1], group=heads[0] // heads[1], head_dim=head_dim, name=name, **given)


def decoding(batch: int, seqlen: int, heads: tuple[int, int], head_dim: int = 128) -> list[Workload]:
    """Return workloads over a cache and over pages: reading alone, and a step that also rotates and appends."""
    name = f"{DECODING}{batch}x{seqlen}" + ("" if head_dim == 128 else f"_d{head_dim}")
    lengths, before = (seqlen,) * batch, (seqlen - 1,) * batch
    contiguous = workload(
        name, (1,) * batch, heads, head_dim, "kvcache", seqlens_k=lengths, causal=True, capacity=seqlen
    )
    both = [contiguous, replace(contiguous, name=f"{name}_paged", page_size=PAGE_SIZE)]
    step: dict[str, Any] = {"seqlens_k": before, "new_keys": 1, "rotary_dim": head_dim}
    return [*both, *(replace(each, name=f"{each.name}_append", **step) for each in both)]


def skewed_lengths(count: int, middle: float = 700.0, lowest: int = 16, highest: int = 8192) -> tuple[int, ...]:
    """Return log-normal lengths as in text corpora: for 128 lengths the mean is 998, the longest 6998."""
    draws = torch.randn(count, generator=torch.Generator().manual_seed(1))
    return tuple((draws * 0.9 + math.log(middle)).exp().int().clamp(lowest, highest).tolist())


FULL: tuple[Workload, ...] = (
    workload("uniform_varlen", (4096,) * 32, (8, 8), 64, "varlen"),
    workload("skewed_varlen", skewed_lengths(128), (16, 16), 64, "varlen"),
    workload("skewed_causal", skewed_lengths(128), (16, 16), 64, "varlen", causal=True),
    workload("ptv3_patches", (1024,) * 512, (4, 4), 16, "varlen"),
    workload("llm_gqa_causal", (2048,) * 8, (32, 8), 128, causal=True),
    workload("mistral_window", (16384,), (32, 8), 128, causal=True, window=(1024, 0)),
    workload("modernbert_local", (8192, 3000, 512, 6000) * 2, (12, 12), 64, "varlen", window=(64, 64)),
    workload("alibi_causal", (4096,) * 4, (16, 16), 64, causal=True, alibi="powers"),
    workload("alibi_bidirectional", (2048,) * 4, (16, 16), 64, alibi="powers"),
    workload("gemma_softcap", (4096,), (8, 4), 128, causal=True, softcap=50.0),
    workload("gemma_softcap_window", (8192,), (8, 4), 128, causal=True, softcap=50.0, window=(1024, 0)),
    workload("dropout_train", (1024,) * 8, (16, 16), 64, causal=True, dropout_p=0.1),
    workload("cross_short_q", (64,) * 16, (16, 16), 64, seqlens_k=(4096,) * 16),
)

# For a user's kernel, which may serve only square problems. The last two show usual mistakes: at the end of a length
# that tiles do not divide, and in the causal mask of queries that follow a cached prefix.
PLAIN: tuple[Workload, ...] = (
    *(
        workload(f"plain_d{d}" + "_causal" * causal, (1024,) * 8, (16, 16), d, causal=causal)
        for d in (64, 128)
        for causal in (False, True)
    ),
    workload("plain_d64_odd", (1000,) * 8, (16, 16), 64),
    workload("plain_d64_chunk", (256,) * 8, (16, 16), 64, seqlens_k=(1024,) * 8, causal=True),
)

DECODE: tuple[Workload, ...] = (
    *decoding(1, 8192, (32, 8)),
    *decoding(32, 4096, (32, 8)),
    *decoding(8, 16384, (32, 32)),
    *decoding(64, 2048, (32, 8)),
    *decoding(8, 4096, (16, 16), head_dim=64),
    *decoding(8, 4096, (16, 8), head_dim=256),
)


def shrunk(workload: Workload, batch: int = 8, seqlen: int = 8, heads: int = 4) -> Workload:
    """Return the problem with batch, lengths and heads divided by these factors, for a CPU."""

    def some(lengths: tuple[int, ...]) -> tuple[int, ...]:
        kept = max(1, len(lengths) // batch) if len(lengths) > batch else min(len(lengths), 2)
        return tuple(length if length == 1 else max(1, length // seqlen) for length in lengths[:kept])

    left, right = (bound if bound <= 0 else max(1, bound // seqlen) for bound in workload.window)
    return _renamed(
        workload,
        seqlens_q=some(workload.seqlens_q),
        seqlens_k=some(workload.seqlens_k),
        nheads_k=workload.nheads_k // math.gcd(heads, workload.nheads_k),
        window=(left, right),
        capacity=workload.capacity // seqlen,
    )


def _renamed(given: Workload, **changes: Any) -> Workload:
    """Return a workload with changes. If it decodes, its name gets the new batch size and number of keys."""
    workload = replace(given, **changes)
    shape = f"{DECODING}{workload.batch}x{workload.capacity}"
    return replace(workload, name=re.sub(rf"^{DECODING}\d+x\d+", shape, workload.name))


def visible_scores(workload: Workload) -> float:
    """Return the number of visible scores of one head."""
    left, right = workload.window
    right = 0 if workload.causal else right
    band = math.inf if left < 0 or right < 0 else left + right + 1
    share = 0.5 if workload.causal and band == math.inf else 1.0
    return sum(share * sq * min(sk, band) for sq, sk in zip(workload.seqlens_q, workload.seqlens_k))


def bytes_of(workload: Workload) -> float:
    """Return roughly the bytes of our call: its tensors in half precision, twice, and in fp32 while they are drawn."""
    keys = workload.capacity * workload.batch if workload.decode else sum(workload.seqlens_k)
    tensors = 2 * (sum(workload.seqlens_q) * workload.nheads + keys * workload.nheads_k) * workload.head_dim
    return 2.0 * tensors * (2 if workload.decode else 4) + 4.0 * tensors


def fitted(workload: Workload, limits: Limits) -> Workload:
    """Return the workload, or half, a quarter, ... of it, if it exceeds the GPU's memory or the time of one launch."""
    share, given = 1, workload
    while (workload.batch > 1 or workload.max_seqlen_k > 1) and (
        bytes_of(workload) > limits.memory
        or count_flops(workload.nheads, workload.head_dim, visible_scores(workload), not workload.decode)
        > limits.flops_of_launch
    ):
        share, workload = 2 * share, _halved(workload)
    return given if share == 1 else replace(workload, name=f"{workload.name} (1/{share})")


def _halved(workload: Workload) -> Workload:
    """Return the workload with half its sequences; if it has one sequence, with half of its rows, keys and window."""
    kept = workload.batch // 2
    if kept:
        return _renamed(workload, seqlens_q=workload.seqlens_q[:kept], seqlens_k=workload.seqlens_k[:kept])
    left, right = (bound if bound <= 0 else max(1, bound // 2) for bound in workload.window)
    rows, keys = (tuple(max(1, n // 2) for n in lengths) for lengths in (workload.seqlens_q, workload.seqlens_k))
    return _renamed(workload, seqlens_q=rows, seqlens_k=keys, window=(left, right), capacity=workload.capacity // 2)


def of_lengths(lengths: Sequence[int], small: bool = False) -> list[Workload]:
    """Return a workload for each length, for a curve of time over length.

    Each has as many sequences as make up the same number of tokens, at least one.
    """
    tokens, heads, head_dim = (1024, (4, 2), 64) if small else (16384, (32, 8), 128)
    return [workload(f"causal_{n}", (n,) * max(1, tokens // n), heads, head_dim, causal=True) for n in lengths]


SMALL: tuple[Workload, ...] = tuple(shrunk(workload) for workload in (*FULL, *DECODE))
