"""The inputs of all tests: tensors of any layout, and small problems with names, each a promise of flash-attn's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from verify.problems import Problem


def seed_random_numbers(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, which takes a millisecond without a GPU: it records its caller for each that is unused."""
    (torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed)(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000 * sum(shape))).to(dtype)


def qkv(
    b: int = 2,
    sq: int = 7,
    sk: int = 7,
    h: int = 2,
    hk: int | None = None,
    d: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    hk = hk or h
    return (
        randn(b, sq, h, d, seed=1, dtype=dtype),
        randn(b, sk, hk, d, seed=2, dtype=dtype),
        randn(b, sk, hk, d, seed=3, dtype=dtype),
    )


def lengths_of(q: tuple[int, ...], k: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of packed sequences; k: as q where it is None."""
    k = q if k is None else k
    return cumulative(*q), cumulative(*k), max(q), max(k)


def packed(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...] | None = None, h: int = 2, hk: int | None = None, d: int = 16
) -> tuple[list[Tensor], tuple[Tensor, Tensor, int, int]]:
    """q, k and v of packed sequences, and their lengths."""
    totals = sum(lengths_q), sum(lengths_q if lengths_k is None else lengths_k)
    q, k, v = qkv(1, *totals, h, hk, d)
    return [q[0], k[0], v[0]], lengths_of(lengths_q, lengths_k)


def heads_first(*shape: int, dtype: torch.dtype = torch.float16, **sizes: int) -> list[Tensor]:
    """``qkv`` as PyTorch's attention takes it, leaves that ask for gradients; in memory heads lie first too."""
    made = qkv(*shape, dtype=dtype, **sizes)
    return [x.transpose(1, 2).contiguous().requires_grad_() for x in made]


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cumulative(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class OnGpu(Tensor):
    """A tensor in the host's memory that says it lies on a GPU."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


# Ways to write that leave the version of ``t`` as it is, or the tensor another one.
UNSEEN: dict[str, Callable[[Tensor, Tensor], object]] = {
    "numpy": lambda t, new: numpy.copyto(t.as_subclass(Tensor).numpy(), new.numpy()),
    "data": lambda t, new: t.data.copy_(new),
    "another tensor's data": lambda t, new: setattr(t, "data", new.as_subclass(type(t))),
    "in place": lambda t, new: t.copy_(new),
}


# ---------------------------------------------------------------- layouts

# Strides of sequences, rows, heads and channels; 8 is the number of channels, so that rows may touch.
STEPS = (0, 1, 3, 8)
PATTERNS = [*itertools.product(STEPS, STEPS, STEPS, (1, 0, 2))]
WITH_CHANNELS = [pattern for pattern in PATTERNS if pattern[3] == 1]
DTYPES = torch.float32, torch.float16, torch.float64, torch.bfloat16
HALVES = torch.float16, torch.bfloat16


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return normal numbers, seen through these strides."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return randn(extent, seed=seed, dtype=dtype).as_strided(shape, strides)


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


ORDINARY: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.empty(3, 5, 2, 8),
    "heads first": lambda: torch.empty(3, 2, 5, 8).transpose(1, 2),
    "every axis permuted": lambda: torch.empty(8, 2, 5, 3).permute(3, 2, 1, 0),
    "slices of every axis": lambda: torch.empty(9, 9, 9, 32)[1:7:2, 2:8, ::3, 3:30:3],
    "part of a packed qkv": lambda: torch.empty(3, 5, 3, 2, 8)[:, :, 1],
    "keys beside values, NHD": lambda: torch.empty(7, 2, 16, 2, 8)[:, 0],
    "keys beside values, HND": lambda: torch.empty(7, 2, 16, 16).transpose(1, 2)[..., 8:],
    "keys and values by turns": lambda: torch.empty(7, 16, 2, 8, 2)[..., 1],
    "pages of every second block": lambda: torch.empty(14, 16, 2, 8)[::2],
    "batch last": lambda: torch.empty(5, 2, 8, 3).permute(3, 0, 1, 2),
    "a single row of a broadcast batch": lambda: torch.empty(1, 5, 2, 8).expand(4, 5, 2, 8)[:1],
    "one element an axis, any strides": lambda: torch.empty(8).as_strided((1, 1, 1, 8), (0, 1, 3, 1)),
    "no elements": lambda: torch.empty(0).as_strided((3, 0, 2, 8), (0, 1, 1, 1)),
    "steps that mesh": lambda: torch.empty(99).as_strided((2, 3, 1, 1), (5, 2, 0, 0)),
    "steps that mesh over channels": lambda: torch.empty(99).as_strided((2, 3, 8), (40, 16, 1)),
    "steps that mesh over channels in a cache": lambda: torch.empty(99).as_strided((1, 2, 3, 8), (0, 40, 16, 1)),
    "more memory than there is": lambda: torch.empty(2**20, 2**20, 2**10, 128, device="meta").transpose(0, 2),
}  # fmt: skip

OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "a broadcast batch": lambda x: x[:1].expand_as(x),
    "broadcast rows": lambda x: x[:, :1].expand_as(x),
    "broadcast heads": lambda x: x[:, :, :1].expand_as(x),
    "sliding windows of rows": lambda x: x.as_strided(x.shape, (x.stride(1), *x.stride()[1:])),
    "rows that overlap by a channel": lambda x: x.as_strided(x.shape, (*[s - 1 for s in x.stride()[:3]], 1)),
    "equal strides": lambda x: x.as_strided(x.shape, (200, 1, 16, 1)),
    "strides without order": lambda x: x.as_strided(x.shape, (30, 10, 15, 1)),
}  # fmt: skip


# ---------------------------------------------------------------- problems; most differ in one thing from the first

DENSE = Problem(seqlens_q=(7, 7), seqlens_k=(11, 11), nheads_k=2, group=2, head_dim=16)
SQUARE = replace(DENSE, seqlens_k=(7, 7))
DENSE_PROBLEMS = {
    "query heads share key heads in consecutive groups": replace(DENSE, group=3),
    "the default scale is of the true head_dim": replace(DENSE, head_dim=5),
    "a single channel": replace(DENSE, head_dim=1),
    "more channels than flash-attn has": replace(DENSE, head_dim=264),
    "Gemma 4's channels": replace(DENSE, head_dim=512, causal=True),
    "values of another head_dim": replace(DENSE, head_dim_v=33, causal=True),
    "a scale of its own": replace(DENSE, softmax_scale=0.7),
    "a scale of 0": replace(DENSE, softmax_scale=0.0),
    "a negative scale": replace(DENSE, softmax_scale=-0.3),
    "causal, a scale of 0": replace(DENSE, softmax_scale=0.0, causal=True),
    "causal, a negative scale": replace(DENSE, softmax_scale=-0.3, causal=True),
    "softcap before ALiBi and mask": replace(DENSE, softcap=2.0, magnitude=4.0, causal=True, alibi="h"),
    "a softcap of -1 is none": replace(DENSE, softcap=-1.0),
    "ALiBi": replace(DENSE, alibi="h"),
    "ALiBi by sequence": replace(DENSE, alibi="bh", window=(3, 2)),
    "causal ALiBi by sequence": replace(DENSE, alibi="bh", causal=True),
    "causal ALiBi in a window": replace(DENSE, alibi="h", causal=True, window=(3, 0)),
    "causal rows that see no key": replace(DENSE, seqlens_q=(11, 11), seqlens_k=(4, 4), causal=True),
    "window rows that see no key": replace(DENSE, seqlens_q=(11, 11), seqlens_k=(4, 4), window=(0, 0)),
    "rows far before the keys, window on the right": replace(DENSE, seqlens_q=(40, 40), window=(-1, 20)),
    "rows far before the keys, window": replace(DENSE, seqlens_q=(40, 40), seqlens_k=(5, 5), window=(2, 20)),
    "no keys": replace(DENSE, seqlens_k=(0, 0)),
    "no queries": replace(DENSE, seqlens_q=(0, 0)),
    "heads first": replace(DENSE, layouts=("heads_first",) * 4, causal=True),
    "channels apart": replace(DENSE, layouts=("strided_dim",) * 4),
    "rows anywhere": replace(DENSE, layouts=("offset", "wide_rows", "sliced", "one_value"), causal=True),
    "keys and values in one": replace(DENSE, kind="kvpacked"),
    "all in one": replace(SQUARE, kind="qkvpacked", group=1, causal=True),
    "a window that hides one key of the last row": replace(SQUARE, window=(5, 0)),
    "windows that no 32 bits hold": replace(DENSE, window=(2**31, 2**33)),
    "a window that no 32 bits hold, causal": replace(DENSE, window=(2**32, 0)),
    "window as a list": replace(DENSE, window=(1, 0), window_as="list"),
    "window as a tensor": replace(DENSE, window=(1, 0), window_as="tensor"),
    "window as scalars": replace(DENSE, window=(1, 0), window_as="scalars"),
    "fp16": replace(DENSE, dtype="float16", causal=True),
    "bf16": replace(DENSE, dtype="bfloat16", window=(3, 1)),
    "fp64": replace(DENSE, dtype="float64"),
    "large scores": replace(DENSE, magnitude=30.0),
    "dropout": replace(DENSE, dropout_p=0.17),
    "dropout under ALiBi": replace(DENSE, dropout_p=0.5, alibi="h", causal=True),
    "dropout under softcap": replace(DENSE, dropout_p=0.9, softcap=3.0, window=(5, 3)),
    "deterministic": replace(DENSE, deterministic=True),
}
# Longer than any tile.
LONG = replace(DENSE, seqlens_q=(300,), seqlens_k=(1400,), nheads_k=1, head_dim=8)
LONG_PROBLEMS = {
    f"{feature}, {shape}": replace(LONG, **options, **lengths)
    for shape, lengths in (("more keys", {}), ("more rows", dict(seqlens_q=(1400,), seqlens_k=(300,))))
    for feature, options in {
        "causal": dict(causal=True),
        "window": dict(window=(100, 40)),
        "narrow causal window": dict(causal=True, window=(3, 0)),
        "window on the left": dict(window=(200, -1)),
        "window on the right": dict(window=(-1, 100)),
        "softcap": dict(softcap=3.0),
        "ALiBi": dict(alibi="h", window=(300, 5)),
        "dropout": dict(dropout_p=0.2, causal=True),
    }.items()
}
PACKED = Problem("varlen", (5, 17, 1, 9), (9, 4, 30, 9), nheads_k=2, group=2, head_dim=16)
TINY = tuple(1 + i % 4 for i in range(100))
PACKED_PROBLEMS = {
    "plain": PACKED,
    "causal, by each one's own lengths": replace(PACKED, causal=True),
    "window": replace(PACKED, window=(3, 1)),
    "window on the left": replace(PACKED, window=(2, -1)),
    "causal window": replace(PACKED, causal=True, window=(4, 0)),
    "softcap": replace(PACKED, softcap=2.0),
    "causal ALiBi": replace(PACKED, alibi="h", causal=True),
    "slopes by sequence": replace(PACKED, alibi="bh"),
    "dropout": replace(PACKED, dropout_p=0.5),
    "a sequence without keys": replace(PACKED, seqlens_k=(9, 0, 30, 9)),
    "a sequence without queries": replace(PACKED, seqlens_q=(5, 0, 1, 9)),
    "rows far before the keys": replace(PACKED, seqlens_q=(40, 3, 9, 30), seqlens_k=(5, 4, 9, 6), window=(-1, 10)),
    "no keys at all": replace(PACKED, seqlens_k=(0,) * 4),
    "no queries at all": replace(PACKED, seqlens_q=(0,) * 4),
    "tokens outside": replace(PACKED, gap=(0, 3), poison="nan", causal=True),
    "NaN in one sequence": replace(PACKED, stray=("v", 1, "nan")),
    "infinity in one sequence": replace(PACKED, stray=("k", 2, "inf"), causal=True),
    "NaN in one sequence's gradient": replace(PACKED, stray=("dout", 1, "nan")),
    "longest lengths as tensors": replace(PACKED, max_seqlen_as="tensor"),
    "longest lengths too large": replace(PACKED, max_seqlen_slack=50, causal=True),
    "single rows, one of them missing": replace(PACKED, seqlens_q=(1, 0, 1), seqlens_k=(5, 3, 8), group=3),
    "many tiny ones": replace(PACKED, seqlens_q=TINY, seqlens_k=TINY, head_dim=8, causal=True),
    "skewed": replace(PACKED, seqlens_q=(1, 600, 400), seqlens_k=(1, 600, 400), causal=True, window=(300, 0)),
    "keys and values in one": replace(PACKED, kind="varlen_kvpacked"),
    "all in one": replace(PACKED, kind="varlen_qkvpacked", seqlens_k=PACKED.seqlens_q, group=1, causal=True),
    "pages": replace(PACKED, kind="paged", page_size=16, causal=True, poison="nan"),
    "pages of one token": replace(PACKED, kind="paged", page_size=1, causal=True, poison="nan"),
    "pages of 256": replace(PACKED, kind="paged", page_size=256, poison="nan"),
    "keys in use": replace(PACKED, kind="private_varlen", seqused=(5, 0, 30, 2), poison="nan", causal=True),
    "left padding": replace(PACKED, kind="private_varlen", leftpad=(2, 4, 0, 8), poison="nan", causal=True),
    "keys in use of pages": replace(PACKED, kind="private_varlen", page_size=16, seqused=(5, 0, 30, 2), poison="nan"),
    "keys in use behind left padding": replace(
        PACKED, kind="private_varlen", seqused=(8, 4, 20, 2), leftpad=(2, 4, 0, 1), poison="inf"
    ),
}
CACHE = Problem("kvcache", (3, 3), (7, 20), nheads_k=2, group=2, head_dim=32, capacity=32, causal=True, poison="nan")
STEP = replace(CACHE, new_keys=3)
CACHE_PROBLEMS = {
    "rows of their own length": CACHE,
    "an int for every row": replace(CACHE, seqlens_k=(9, 9), lengths_as="int"),
    "an int counts queries rather than cache rows": replace(
        CACHE, seqlens_k=(9, 9), lengths_as="int", batch_idx=True
    ),
    "without lengths the capacity": replace(CACHE, seqlens_k=(32, 32), lengths_as="none"),
    "without lengths all pages": replace(CACHE, seqlens_k=(32, 32), lengths_as="none", page_size=8),
    "an empty row": replace(CACHE, seqlens_k=(0, 4)),
    "left padding": replace(CACHE, leftpad=(0, 5)),
    "chosen rows": replace(CACHE, batch_idx=True, causal=False),
    "slopes by sequence of chosen rows": replace(CACHE, alibi="bh", batch_idx=True),
    "one row of many heads": replace(CACHE, seqlens_q=(1, 1), seqlens_k=(650, 700), capacity=700, group=4),
    "one row, softcap": replace(CACHE, seqlens_q=(1, 1), softcap=3.0),
    "one row, window": replace(CACHE, seqlens_q=(1, 1), window=(9, -1)),
    "one row, splits": replace(CACHE, seqlens_q=(1, 1), num_splits=3),
    "append": STEP,
    "append fewer than rows": replace(STEP, new_keys=1),
    "append more than rows": replace(STEP, new_keys=5),
    "append to chosen rows": replace(STEP, batch_idx=True),
    "append left of every window": replace(STEP, seqlens_q=(1, 1), new_keys=12, window=(2, 0)),
    "append through strides": replace(STEP, layouts=("sliced",) * 4),
    "append at odd addresses": replace(STEP, layouts=("offset", "offset", "contiguous", "contiguous"), rotary_dim=16),
    "more rows than a step takes": replace(STEP, seqlens_q=(70, 70), capacity=90, seqlens_k=(7, 80)),
    "more rows than a step takes, behind an int": replace(
        STEP, seqlens_q=(70, 70), capacity=90, seqlens_k=(9, 9), lengths_as="int"
    ),
    "half precision": replace(STEP, dtype="bfloat16"),
    "append to pages": replace(STEP, page_size=4),
    "append to pages of one token": replace(STEP, page_size=1),
    "append behind an int": replace(STEP, seqlens_k=(9, 9), lengths_as="int", rotary_dim=16),
    "append behind an int to an empty cache": replace(STEP, seqlens_k=(0, 0), lengths_as="int", seqlens_q=(5, 5)),
    "append behind an int to pages": replace(STEP, seqlens_k=(9, 9), lengths_as="int", page_size=4, rotary_dim=16),
    "append behind an int to chosen rows": replace(STEP, seqlens_k=(9, 9), lengths_as="int", batch_idx=True),
    "append behind an int and left padding": replace(STEP, seqlens_k=(9, 9), lengths_as="int", leftpad=(1, 3)),
    "ALiBi in a window that the capacity makes idle": replace(
        CACHE, seqlens_k=(9, 9), lengths_as="int", alibi="h", window=(32, 0)
    ),
    "ALiBi in a window that no key fills": replace(
        CACHE, seqlens_k=(9, 9), lengths_as="int", alibi="h", window=(20, 0)
    ),
    "no LSE": replace(STEP, return_attn_probs=False),
    "append behind left padding": replace(STEP, leftpad=(2, 6), rotary_dim=16),
    **{
        f"rotary, {'pairs' if interleaved else 'halves'} of {dim} channels, {name}": replace(
            STEP, rotary_dim=dim, rotary_interleaved=interleaved, causal=causal, window=window
        )
        for (interleaved, dim), masks in {
            (True, 16): {"causal": (True, (-1, -1)), "no mask": (False, (-1, -1)), "right": (False, (-1, 0))},
            (False, 16): {"window": (False, (5, 1)), "no mask": (False, (-1, -1))},
            (True, 32): {"left": (False, (5, -1)), "an idle window": (False, (32, 99))},
            (False, 32): {"causal": (True, (-1, -1)), "an idle window": (False, (40, 99))},
        }.items()
        for name, (causal, window) in masks.items()
    },
}  # fmt: skip
GROUPS = {"dense": DENSE_PROBLEMS, "long": LONG_PROBLEMS, "packed": PACKED_PROBLEMS, "cache": CACHE_PROBLEMS}
PROBLEMS = {f"{group}: {name}": problem for group, some in GROUPS.items() for name, problem in some.items()}


# Sequences that are read and computed alone, as a view, gathered or padded.
LENGTHS = {
    "skewed": [(n, n) for n in (22, 300, 48, 1, 79)],
    "runs of one length": [(8, 8)] * 5 + [(30, 30)] * 3,
    "one length, apart": [(8, 8), (5, 5), (8, 8), (8, 9), (5, 5)],
    "empty on either side": [(5, 5), (0, 7), (7, 0), (9, 9)],
    "a decode step": [(1, n) for n in (12, 5, 9, 12)],
    "more keys than rows": [(4, 9), (9, 9), (3, 20)],
    "more rows than keys": [(9, 4), (20, 3), (9, 9), (9, 4)],
    "many": [(1 + i % 16, 1 + i % 16) for i in range(40)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"dtype": "bfloat16"},
    "causal": dict(window=(-1, 0)),
    "wide window": dict(window=(400, 0), dtype="float16"),
    "window": dict(window=(5, 0), stray=("v", 1, "nan")),
    "ALiBi": dict(causal=True, alibi="bh", dtype="float16"),
    "softcap and dropout": dict(softcap=5.0, dropout_p=0.3, dtype="bfloat16"),
    "strided": dict(layouts=("contiguous", "strided_dim", "strided_dim", "one_value"), gap=(0, 3)),
}
TOGETHER = {
    f"{lengths}, {options}": Problem("varlen", *zip(*LENGTHS[lengths]), group=2, **OPTIONS[options])
    for i, lengths in enumerate(LENGTHS)
    for j, options in enumerate(OPTIONS)
    if (i + j) % 2  # every other pair; which ones does not matter
} | {
    "cache": Problem("kvcache", (3,) * 4, (12, 0, 40, 12), capacity=48, group=2, causal=True, poison="nan"),
    "cache, left padding": Problem(
        "kvcache", (1,) * 4, (12, 5, 40, 12), capacity=40, alibi="bh", leftpad=(0, 3, 7, 0), poison="nan"
    ),
    "pages": Problem("paged", (3, 9, 9, 1), (12, 9, 40, 12), group=2, window=(7, 2), page_size=16, poison="nan"),
}
