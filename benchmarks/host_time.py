"""What one small call costs the host, with this package's own kernels.

`python -m benchmarks.host_time [--only TEXT] [--profile NAME]`

On a CUDA device calls are real. Without one the fused backend serves CPU tensors and its launches do nothing, so that
what is left is Python and the allocation of results: a figure to hold against another of the same machine.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch

from flash_attn_compat import flash_attn_interface, use_backend

Job = Callable[[], object]
_BATCHES, _CALLS = 600, 10


def jobs(device: str, interface: Any) -> dict[str, Job]:
    """Calls of so few tokens that a GPU has next to nothing to do; interface: ours or flash-attn's own."""
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


def microseconds(job: Job, device: str) -> float:
    """Of one call, in the fastest batch: the others met somebody else on the machine."""
    fastest = float("inf")
    job()
    for _ in range(_BATCHES):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            job()
        fastest = min(fastest, time.perf_counter() - begin)
        if device == "cuda":
            torch.cuda.synchronize()
    return fastest / _CALLS * 1e6


def _without_gpu() -> None:
    """Let the fused backend serve CPU tensors for the rest of this process, with launches that do nothing."""
    import pytest

    from flash_attn_compat.backends.fused import loader
    from tests import fused_on_cpu

    patch = pytest.MonkeyPatch()
    fused_on_cpu.record(patch, number=90)
    patch.setattr(loader.driver(), "launch", lambda kernel, blocks, device, arguments: None)


def main() -> None:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=description)
    parser.add_argument("--profile", metavar="NAME", help="where one call's time goes, function by function")
    parser.add_argument("--only", default="", metavar="TEXT", help="calls whose name holds it")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        _without_gpu()
    torch.set_grad_enabled(True)
    found = jobs(device, flash_attn_interface)
    if args.profile:
        profile = cProfile.Profile()
        job = found[args.profile]
        with use_backend("fused"):
            job()
            profile.enable()
            for _ in range(2000):
                job()
            profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    rivals = _flash_attn(device)
    for name, job in found.items():
        if args.only not in name:
            continue
        with use_backend("fused"):
            line = f"{name:24} {microseconds(job, device):6.1f} us"
        for rival, theirs in rivals.items():
            line += f", {rival} {microseconds(theirs[name], device):6.1f} us"
        print(line, flush=True)


def _flash_attn(device: str) -> dict[str, dict[str, Job]]:
    """The same calls by flash-attn, and by ours through it, where it is installed."""
    if device == "cpu" or importlib.util.find_spec("flash_attn") is None:
        return {}
    own = importlib.import_module("flash_attn.flash_attn_interface")
    return {"flash-attn": jobs(device, own), "ours by flash-attn": jobs(device, flash_attn_interface)}


if __name__ == "__main__":
    main()
