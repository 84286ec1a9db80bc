"""The host's time of flex_attention on our kernels: a warm eager call, and a function's first call.

`python -m benchmarks.flex_host [--head-dim 64 128] [--only TEXT] [--warm] [--cores 2]` prints, for three pairs of
functions:
- microseconds of a warm eager forward by our kernels, and by a stub that returns ready tensors in place of PyTorch's
  composition. The stub's time is PyTorch's dispatch, and the difference is ours. The difference may be below 0, since
  our kernels skip PyTorch's autograd function in calls without gradients. Both take turns.
- seconds of the first forward and of the first forward with backward in a new process that may use ``--cores`` cores:
  with an empty cache, and again with the kernels on disk. Left out with ``--warm``.
Without a GPU our kernels serve CPU tensors and their launches do nothing: warm calls alone are timed, to be compared
with another time of the same machine. Needs PyTorch 2.6. FLASH_ATTN_COMPAT_CAPABILITY is 7.5 unless it is set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import flash_attn_compat
from benchmarks import flex
from benchmarks.host_time import serve_without_gpu
from flash_attn_compat import settings
from flash_attn_compat.torch_flex import override
from flash_attn_compat.torch_flex.policy import Policy

ENTRIES = ("causal", "softcap", "ALiBi, causal")
TOKENS, TURNS, CALLS = 256, 20, 50


def make_call(entry: flex.Entry, head_dim: int, device: str = "cuda") -> Callable[[bool], Any]:
    """Return a function that calls flex_attention eagerly; its argument says whether to run the backward too."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = flex.BATCH, flex.HEADS, TOKENS, head_dim
    q, k, v = (torch.randn(shape, device=device, dtype=torch.float16) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = entry.mask_mod and create_block_mask(entry.mask_mod, None, None, TOKENS, TOKENS, device=device)

    def call(with_backward: bool) -> Any:
        if not with_backward:
            return flex_attention(q, k, v, score_mod=entry.score_mod, block_mask=mask)
        out = flex_attention(*leaves, score_mod=entry.score_mod, block_mask=mask)
        return torch.autograd.grad(out, leaves, q)

    return call


def microseconds(call: Callable[[bool], Any], device: str) -> float:
    """Return the microseconds that the host takes to launch one forward."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(flex.SLEEP)
    begun = time.perf_counter()
    for _ in range(CALLS):
        call(False)
    return 1e6 * (time.perf_counter() - begun) / CALLS


def time_warm(entry: flex.Entry, head_dim: int, device: str) -> tuple[float, float]:
    """Return the microseconds of a warm eager forward by our kernels and by a stub in their place."""
    from torch._C import DispatchKey

    operator = torch.ops.higher_order.flex_attention
    key, autograd = (getattr(DispatchKey, prefix + device.upper()) for prefix in ("", "Autograd"))
    call = make_call(entry, head_dim, device)
    readings: list[tuple[float, float]] = []
    with override.applied(Policy(device)), torch.no_grad():
        ours = operator.py_kernels[key], operator.py_kernels[autograd]
        pytorchs = operator.py_kernels[DispatchKey.Autograd]
        ready: Any = None

        def keep(*arguments: Any, **named: Any) -> Any:
            nonlocal ready
            ready = ours[0](*arguments, **named)
            return ready

        def stub(*arguments: Any, **named: Any) -> Any:
            return ready

        def put(kernel: Any, under_autograd: Any) -> None:
            operator.py_kernels[key], operator.py_kernels[autograd] = kernel, under_autograd
            operator._dispatch_cache.clear()

        try:
            for kernels in ((keep, pytorchs), ours):
                put(*kernels)
                for _ in range(3):
                    call(False)
            for _ in range(TURNS):
                put(*ours)
                call(False)
                first = microseconds(call, device)
                put(stub, pytorchs)
                call(False)
                readings.append((first, microseconds(call, device)))
        finally:
            put(*ours)
    return statistics.median(a for a, _ in readings), statistics.median(b for _, b in readings)


def time_first(name: str, head_dim: int) -> list[float]:
    """Return the seconds of the first forward and of the first forward with backward, in this process."""
    torch.zeros(1, device="cuda")
    make_call(flex.Entry(), head_dim)(False)  # else the first reading includes PyTorch's own imports
    call = make_call(flex.entries(TOKENS, "cuda")[name], head_dim)
    seconds = []
    with flash_attn_compat.flex():
        for with_backward in (False, True):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call(with_backward)
            torch.cuda.synchronize()
            seconds.append(round(time.perf_counter() - begun, 2))
    return seconds


def time_first_in_child(name: str, head_dim: int, cores: int, cache: str) -> list[float]:
    code = (
        f"import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cores}])\n"
        f"import json; from benchmarks import flex_host; print(json.dumps(flex_host.time_first({name!r}, {head_dim})))"
    )
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        check=False, env={**os.environ, settings.CACHE: cache}, capture_output=True, text=True,
    )  # fmt: skip
    if told.returncode:
        raise RuntimeError(f"{name} at head_dim {head_dim}: {told.stderr.strip().splitlines()[-1]}")
    return list(json.loads(told.stdout.strip().splitlines()[-1]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flex_host", description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--only", default="", metavar="TEXT", help="only functions with this text in their name")
    parser.add_argument("--warm", action="store_true", help="leave out the first calls")
    parser.add_argument("--cores", type=int, default=2, help="for the first call of a function (2)")
    options = parser.parse_args(argv)
    os.environ.setdefault(settings.CAPABILITY, "7.5")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        serve_without_gpu()
    name = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    print(f"{name}, torch {torch.__version__}, {os.cpu_count()} cores")
    for head_dim in options.head_dim:
        for entry in [each for each in ENTRIES if options.only in each]:
            firsts = ""
            if device == "cuda" and not options.warm:
                with tempfile.TemporaryDirectory() as cache:
                    first, again = (time_first_in_child(entry, head_dim, options.cores, cache) for _ in range(2))
                firsts = f"; first call {first[0]} s, with backward {first[1]} s more"
                firsts += f"; kernels on disk {again[0]} s, {again[1]} s"
            ours, stub = time_warm(flex.entries(TOKENS, device)[entry], head_dim, device)
            told = f"d {head_dim} {entry}: warm {ours:.1f} us, stub {stub:.1f} us, ours {ours - stub:.1f} us"
            print(told + firsts, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
