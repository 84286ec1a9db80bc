"""The host time of one small call with this package's own kernels.

`python -m benchmarks.host_time [--only TEXT] [--profile NAME]`

On a CUDA device calls are real. Without one, the fused backend serves CPU tensors and its launches do nothing: the time
is Python's and the allocator's, to be compared with another time of the same machine.
"""

from __future__ import annotations

import cProfile
import importlib.util
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.runner import Contest, forward_only, make_parser, run, time_one_by_one
from flash_attn_compat import flash_attn_interface, use_backend
from verify.timing import Clock, Job, synchronize

Call = Callable[[], object]
BATCHES, CALLS = 600, 10


def make_calls(device: str, interface: Any) -> dict[str, Call]:
    """Return calls of so few tokens that the GPU's time is negligible. interface: our module or flash-attn's"""
    flash_attn_func, flash_attn_varlen_func = interface.flash_attn_func, interface.flash_attn_varlen_func
    flash_attn_with_kvcache, _flash_attn_forward = interface.flash_attn_with_kvcache, interface._flash_attn_forward
    _flash_attn_backward = interface._flash_attn_backward
    _flash_attn_varlen_forward = interface._flash_attn_varlen_forward
    half, heads, dim = dict(dtype=torch.float16, device=device), 4, 64
    q, k, v, dout = (torch.randn(2, 16, heads, dim, **half) for _ in range(4))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    packed = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    starts = torch.tensor([0, 16, 32], dtype=torch.int32, device=device)
    out, lse, _, rng_state = _flash_attn_forward(q, k, v, 0.0, 0.125, True, -1, -1, 0.0, None, False)
    gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]

    k_cache, v_cache = (torch.randn(2, 256, heads, dim, **half) for _ in range(2))
    new_q, new_k, new_v = (torch.randn(2, 1, heads, dim, **half) for _ in range(3))
    cos, sin = (torch.randn(256, dim // 2, **half) for _ in range(2))
    lengths = torch.tensor([100, 17], dtype=torch.int32, device=device)
    pages = torch.arange(2, dtype=torch.int32, device=device).unsqueeze(1)
    step = (new_q, k_cache, v_cache, new_k, new_v)
    prompt = torch.randn(2, 100, heads, dim, **half)

    return {
        "dense": lambda: flash_attn_func(q, k, v, causal=True),
        "dense, recorded": lambda: flash_attn_func(*leaves, causal=True),
        "varlen": lambda: flash_attn_varlen_func(*packed, starts, starts, 16, 16, causal=True),
        "decode": lambda: flash_attn_with_kvcache(new_q, k_cache, v_cache, cache_seqlens=lengths, causal=True),
        "decode, append": lambda: flash_attn_with_kvcache(*step, cos, sin, lengths, causal=True),
        "decode, append, int": lambda: flash_attn_with_kvcache(*step, cos, sin, 100, causal=True),
        "decode, append, pages": lambda: flash_attn_with_kvcache(
            *step, cos, sin, lengths, block_table=pages, causal=True
        ),
        "prefill, append": lambda: flash_attn_with_kvcache(
            prompt, k_cache, v_cache, prompt, prompt, cos, sin, lengths, causal=True
        ),
        "private forward": lambda: _flash_attn_forward(q, k, v, 0.0, 0.125, True, -1, -1, 0.0, None, False),
        "private varlen forward": lambda: _flash_attn_varlen_forward(
            *packed, starts, starts, 16, 16, 0.0, 0.125, True
        ),
        "private backward": lambda: _flash_attn_backward(
            dout, q, k, v, out, lse, *gradients, 0.0, 0.125, True, -1, -1, 0.0, None, False, rng_state
        ),
    }  # fmt: skip


def contests(device: str) -> Iterator[Contest]:
    """Yield contests of our calls and, if flash-attn is installed, of its own calls and of ours served by it."""
    ours = make_calls(device, flash_attn_interface)
    own: dict[str, Call] = {}
    if device == "cuda" and importlib.util.find_spec("flash_attn"):
        own = make_calls(device, importlib.import_module("flash_attn.flash_attn_interface"))
    for name, call in ours.items():
        jobs = {"ours": Job(call, partial(use_backend, "fused"))}
        jobs |= {"flash-attn": Job(own[name]), "ours by flash-attn": Job(call)} if own else {}
        yield Contest(name, partial(forward_only, jobs))


def milliseconds(job: Job, device: str, clock: Clock = time.perf_counter) -> float:
    """Return the milliseconds of one call in the fastest batch: other programs disturbed the slower ones."""
    fastest = float("inf")
    job.run()
    for _ in range(BATCHES):
        begin = clock()
        for _ in range(CALLS):
            job.run()
        fastest = min(fastest, clock() - begin)
        synchronize(device)
    return fastest / CALLS * 1e3


def serve_without_gpu() -> None:
    """Make the fused backend serve CPU tensors for the rest of this process, with launches that do nothing."""
    import pytest

    from flash_attn_compat.backends.fused import nvrtc
    from tests import fused_on_cpu

    patch = pytest.MonkeyPatch()
    fused_on_cpu.record(patch, number=90)
    patch.setattr(nvrtc.driver(), "launch", lambda kernel, blocks, device, arguments: None)


def print_profile(call: Call) -> None:
    profile = cProfile.Profile()
    with use_backend("fused"):
        call()
        profile.enable()
        for _ in range(2000):
            call()
        profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main(argv: list[str] | None = None) -> int:
    arguments = make_parser("host_time", __doc__)
    arguments.add_argument("--profile", metavar="NAME", help="profile one call by functions instead")
    options = arguments.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        serve_without_gpu()
    torch.set_grad_enabled(True)
    if options.profile:
        print_profile(make_calls(device, flash_attn_interface)[options.profile])
        return 0
    clock = time_one_by_one(device, partial(milliseconds, device=device))
    return run("host_time", contests(device), options, device, clock)


if __name__ == "__main__":
    sys.exit(main())
