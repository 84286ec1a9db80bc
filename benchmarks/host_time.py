"""The host time of one small call with this package's own kernels.

`python -m benchmarks.host_time [--only TEXT] [--profile NAME [--backend NAME]]`
`python -m benchmarks.host_time --packed [--turns N]`

On a CUDA device calls are real. Without one, the fused backend serves CPU tensors and its launches do nothing: the time
is Python's and the allocator's, to be compared with another time of the same machine.

`--packed` times a packed call of 64 tokens by the backends that serve it without flash-attn, as they are and as on
compute capability 7.5, beside flash-attn if that is installed. All take turns; the figures are medians.
"""

from __future__ import annotations

import contextlib
import cProfile
import importlib.util
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.runner import Contest, forward_only, make_parser, run, time_one_by_one
from flash_attn_compat import (
    BackendNotSupported,
    backend_counts,
    flash_attn_interface,
    reset_backend_counts,
    settings,
    use_backend,
)
from verify.environment import describe
from verify.output import announce, console
from verify.timing import Clock, Failed, Job, Timing, attempt, synchronize

Call = Callable[[], object]
BATCHES, CALLS = 600, 10
PACKED = "packed", "packed, recorded", "packed, recorded, with backward"
# For each contestant the backend of a packed call (None: the first that serves it), and the compute capability that the
# backend sees (None: the GPU's own).
CONTESTANTS = {
    "default": (None, None),
    "torch_flash": ("torch_flash", None),
    "fused": ("fused", None),
    "default as 7.5": (None, "7.5"),
    "fused as 7.5": ("fused", "7.5"),
}
FLASH_ATTN = "flash-attn"


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
    *rows, dout_rows = (torch.randn(64, heads, dim, **half) for _ in range(4))
    leaf_rows = [tensor.clone().requires_grad_() for tensor in rows]
    uneven = torch.tensor([0, 24, 31, 64], dtype=torch.int32, device=device)
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

    def train_packed() -> object:
        out = flash_attn_varlen_func(*leaf_rows, uneven, uneven, 33, 33, causal=True)
        return torch.autograd.grad(out, leaf_rows, dout_rows)

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
        "packed": lambda: flash_attn_varlen_func(*rows, uneven, uneven, 33, 33, causal=True),
        "packed, recorded": lambda: flash_attn_varlen_func(*leaf_rows, uneven, uneven, 33, 33, causal=True),
        "packed, recorded, with backward": train_packed,
    }  # fmt: skip


def contests(device: str) -> Iterator[Contest]:
    """Yield contests: our kernels and, if flash-attn is installed, flash-attn alone and our functions on top of it."""
    ours = make_calls(device, flash_attn_interface)
    own: dict[str, Call] = {}
    if device == "cuda" and importlib.util.find_spec("flash_attn"):
        own = make_calls(device, importlib.import_module("flash_attn.flash_attn_interface"))
    for name, call in ours.items():
        jobs = {"ours": Job(call, partial(use_backend, "fused"))}
        jobs |= {"flash-attn": Job(own[name]), "ours by flash-attn": Job(call)} if own else {}
        yield Contest(name, partial(forward_only, jobs))


def milliseconds(job: Job, device: str, clock: Clock = time.perf_counter) -> float:
    """Return the milliseconds of one call in the fastest batch of calls: other programs disturb the slower batches."""
    fastest = float("inf")
    job.run()
    for _ in range(BATCHES):
        begin = clock()
        for _ in range(CALLS):
            job.run()
        fastest = min(fastest, clock() - begin)
        synchronize(device)
    return fastest / CALLS * 1e3


# ---- a packed call, by each backend ----------------------------------------------------------------------------------


@contextlib.contextmanager
def served_as(backend: str | None, capability: str | None) -> Iterator[None]:
    """Force ``backend`` (None: any but flash-attn's) and a compute capability (None: the GPU's) during a block."""
    variables = {} if backend else {settings.DISABLE_OFFICIAL: "1"}
    variables |= {settings.CAPABILITY: capability} if capability else {}
    with mock.patch.dict(os.environ, variables), use_backend(backend) if backend else contextlib.nullcontext():
        yield


def packed_jobs(device: str) -> dict[str, dict[str, Job]]:
    """Return the jobs of each packed call, by contestant; flash-attn's own last, if it is installed."""
    ours = make_calls(device, flash_attn_interface)
    jobs = {
        name: {each: Job(ours[name], partial(served_as, *how)) for each, how in CONTESTANTS.items()} for name in PACKED
    }
    if device == "cuda" and importlib.util.find_spec("flash_attn"):
        own = make_calls(device, importlib.import_module("flash_attn.flash_attn_interface"))
        for name in PACKED:
            jobs[name][FLASH_ATTN] = Job(own[name])
    return jobs


def time_in_turns(
    jobs: Mapping[str, Job], device: str, turns: int, clock: Clock = time.perf_counter
) -> dict[str, Timing | Failed]:
    """Return each job's host time of one call: the median of ``turns`` batches of CALLS calls."""
    readings: dict[str, list[float]] = {name: [] for name in jobs}
    failed: dict[str, Timing | Failed] = {}
    for _ in range(turns):
        for name in [name for name in jobs if name not in failed]:
            found = attempt(device, batch, jobs[name], device, clock)
            if isinstance(found, Failed):
                failed[name] = found
            else:
                readings[name].append(found)
    return {name: failed.get(name) or Timing.of(readings[name]) for name in jobs}


def batch(job: Job, device: str, clock: Clock) -> float:
    """Return the milliseconds of host time of one call, the mean of CALLS calls after an untimed one."""
    with job.around():
        job.run()
        synchronize(device)
        begin = clock()
        for _ in range(CALLS):
            job.run()
        elapsed = clock() - begin
        synchronize(device)
    return elapsed / CALLS * 1e3


def served_by(job: Job, device: str) -> str:
    """Return the backends that serve a job, after three calls that compile and prepare it."""
    reset_backend_counts()
    with job.around():
        for _ in range(3):
            job.run()
        synchronize(device)
    return ", ".join(backend_counts())


def print_packed(device: str, turns: int) -> int:
    """Print the host time of each packed call by contestant; returns 1 if a call failed other than by a refusal."""
    announce(describe([device]), console())
    code = 0
    for name, jobs in packed_jobs(device).items():
        backends = {each: attempt(device, served_by, job, device) for each, job in jobs.items()}
        served = {each: job for each, job in jobs.items() if not isinstance(backends[each], Failed)}
        timings = time_in_turns(served, device, turns)
        own = timings.get(FLASH_ATTN)
        print(f"\n{name + ', 64 tokens':45} {'us of host time':>18} {'quartiles':>15} {'/ flash-attn':>13}")
        for each, backend in backends.items():
            timing = timings.get(each, backend)
            if isinstance(timing, Timing):
                ratio = f"{timing.median_ms / own.median_ms:.2f}" if isinstance(own, Timing) else ""
                quartiles = f"{timing.low_ms * 1e3:.0f} to {timing.high_ms * 1e3:.0f}"
                print(f"  {each:16} {backend:16} {timing.median_ms * 1e3:29.0f} {quartiles:>15} {ratio:>13}")
            else:
                reason = timing.reason if isinstance(timing, Failed) else "no time"
                print(f"  {each:16} {reason}")
                code = code or int(not reason.startswith(BackendNotSupported.__name__))
    return code


def serve_without_gpu() -> None:
    """Make the fused backend serve CPU tensors for the rest of this process, with launches that do nothing."""
    import pytest

    from flash_attn_compat.backends.fused.building import nvrtc
    from tests.kernels import fused_on_cpu

    patch = pytest.MonkeyPatch()
    fused_on_cpu.record(patch, number=90)
    patch.setattr(nvrtc.driver(), "launch", lambda kernel, blocks, device, arguments: None)


def print_profile(call: Call, backend: str) -> None:
    profile = cProfile.Profile()
    with use_backend(backend), torch.autograd.set_multithreading_enabled(False):  # cProfile sees only this thread
        call()
        profile.enable()
        for _ in range(2000):
            call()
        profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main(argv: list[str] | None = None) -> int:
    arguments = make_parser("host_time", __doc__)
    arguments.add_argument("--profile", metavar="NAME", help="profile one call by functions instead")
    arguments.add_argument("--backend", default="fused", help="the profiled call's backend (default fused)")
    arguments.add_argument("--packed", action="store_true", help="time a packed call by each backend instead")
    arguments.add_argument("--turns", type=int, default=60, metavar="N", help="readings with --packed (default 60)")
    options = arguments.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        serve_without_gpu()
    torch.set_grad_enabled(True)
    if options.profile:
        print_profile(make_calls(device, flash_attn_interface)[options.profile], options.backend)
        return 0
    if options.packed:
        return print_packed(device, options.turns)
    clock = time_one_by_one(device, partial(milliseconds, device=device))
    return run("host_time", contests(device), options, device, clock)


if __name__ == "__main__":
    sys.exit(main())
