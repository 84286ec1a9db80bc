"""Our kernels over 8-bit caches beside 16-bit ones: `python -m benchmarks.eight_bit`, on a GPU.

Steps of decoding are replays of a CUDA graph, prefills are called. Both caches hold the same values. A ratio below its
least fails. Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for the PTX that Turing gets.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.runner import DTYPES, Contest, forward_only, make_parser, run
from flash_attn_compat import flash_attn_with_kvcache, use_backend
from verify.bench_run import Jobs
from verify.graphs import capture
from verify.timing import Job

CACHES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DECODING = (32, 1, 4096), (8, 1, 16384), (1, 1, 65536)  # batch, rows, keys
PREFILLS = (4, 2048, 4096), (1, 512, 32768)
HEADS = (32, 8), (32, 32)


class Shape(NamedTuple):
    """The shape of one call. page: slots of a page, 0 for a cache without pages"""

    batch: int
    rows: int
    keys: int
    heads: tuple[int, int]
    head_dim: int
    page: int


def jobs(shape: Shape, dtype: torch.dtype, cache: torch.dtype) -> Mapping[str, Jobs]:
    batch, rows, keys, (nheads, nheads_k), head_dim, page = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda", dtype=dtype)

    slots = (batch * keys // page, page) if page else (batch, keys)
    q, k, v = numbers(batch, rows, nheads, head_dim), *(numbers(*slots, nheads_k, head_dim).to(cache) for _ in range(2))
    table, lengths = None, torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    if page:
        order = torch.randperm(slots[0], generator=generator, device="cuda")
        table = order.view(batch, -1).to(torch.int32)

    def attend(k: Tensor, v: Tensor) -> object:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=rows > 1)

    calls = {"8 bits": partial(attend, k, v), "16 bits": partial(attend, k.to(dtype), v.to(dtype))}
    return forward_only({name: Job(replayed(call) if rows == 1 else call) for name, call in calls.items()})


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays the call from a CUDA graph, and returns its result."""
    replay, out = capture(Job(call), "cuda")
    return partial(replay_graph, replay, out, call)


def replay_graph(replay: Callable[[], None], out: object, call: Callable[[], object]) -> object:
    """Replay a CUDA graph and return its result. call: unused, but it keeps the tensors alive that the graph reads"""
    replay()
    return out


def contests(head_dims: list[int], pages: list[int], dtype: str, cache: str) -> Iterator[Contest]:
    """Yield a contest for each shape. It fails below the least ratio of the time over 16 bits to that over 8 bits."""
    for (batch, rows, keys), heads, head_dim, page in itertools.product(
        (*DECODING, *PREFILLS), HEADS, head_dims, pages
    ):
        shape = Shape(batch, rows, keys, heads, head_dim, page)
        size = f"{batch} x {keys:,}" if rows == 1 else f"{batch} x {rows:,} over {keys:,}"
        name = f"{'decode' if rows == 1 else 'prefill'} {size}, {heads[0]}/{heads[1]} heads of {head_dim}"
        name += f", pages of {page}" * (page > 0) + f", {dtype}, {cache}"
        least = {"16 bits": 1.6 if rows == 1 else 0.9}
        yield Contest(name, partial(jobs, shape, DTYPES[dtype], CACHES[cache]), DTYPES[dtype], least)


def main(argv: list[str] | None = None) -> int:
    arguments = make_parser("eight_bit", __doc__)
    arguments.add_argument("--head-dims", type=int, nargs="+", default=[128])
    arguments.add_argument("--pages", type=int, nargs="+", default=[0, 16], help="slots of a page; 0: no pages")
    arguments.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="of q")
    arguments.add_argument("--cache", choices=list(CACHES), default="e4m3")
    options = arguments.parse_args(argv)
    with use_backend("fused"):
        return run(
            "eight_bit", contests(options.head_dims, options.pages, options.dtype, options.cache), options, "cuda"
        )


if __name__ == "__main__":
    sys.exit(main())
