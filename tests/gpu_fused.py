"""What only a GPU shows of the fused backend: `python -m tests.gpu_fused`, with --every for each variant (an hour).

Prints a line for each check and exits with 1 if one failed. Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for Turing's code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused import loader
from tests import fused_coverage

FIRST_CALL, FROM_DISK = 1.5, 0.05  # seconds that a call may take for each kernel it is the first to use


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", action="store_true", help="each variant rather than each feature")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child_times()
        return 0
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    name, target = torch.cuda.get_device_name(), loader.target(torch.cuda.current_device())
    print(f"{name}, torch {torch.__version__}, NVRTC {loader.compiler().version}, kernels for {target.architecture}")
    checks = {name: check for name, check in CHECKS.items() if options.only in name}
    if options.only in "variants":
        place = torch.device("cuda", torch.cuda.current_device())
        checks |= dict(fused_coverage.checks(place, options.every))
    failed = [name for name, check in checks.items() if not passes(name, check)]
    print(f"{len(checks) - len(failed)} of {len(checks)} passed" + "".join(f"\n  FAILED {name}" for name in failed))
    return 1 if failed else 0


def passes(name: str, check: Callable[[], str | None]) -> bool:
    start = time.perf_counter()
    try:
        said = check()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  (the others are still to be checked)
        print(f"FAIL  {name}: {error if isinstance(error, AssertionError) else traceback.format_exc()}", flush=True)
        return False
    print(f"ok    {name}  {said or ''} ({time.perf_counter() - start:.2f} s)", flush=True)
    return True


# ---- problems


def half(*shape: int, seed: int = 0, device: int | str = "cuda") -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, torch.float16)


def close(got: Tensor, right: Tensor, bound: float = 4e-3) -> None:
    error = float((got.double() - right.double()).abs().max())
    assert error <= bound, f"off by {error:.2g}"


def dense(device: int | str = "cuda", seqlen: int = 100) -> Callable[[], Tensor]:
    q, k = half(2, seqlen, 4, 64, device=device), half(2, seqlen, 2, 64, seed=1, device=device)
    return lambda: flash_attn_func(q, k, k, causal=True)


def varlen(device: int | str = "cuda") -> Callable[[], Tensor]:
    q, k = half(100, 4, 64, device=device), half(100, 2, 64, seed=1, device=device)
    starts = torch.tensor([0, 30, 100], dtype=torch.int32, device=device)
    return lambda: flash_attn_varlen_func(q, k, k, starts, starts, 70, 70, causal=True)


def decode(device: int | str = "cuda") -> Callable[[], Tensor]:
    k_cache, v_cache = (half(2, 1000, 2, 64, seed=seed, device=device) for seed in (0, 3))
    new = half(2, 1, 2, 64, seed=1, device=device)
    q, table = half(2, 1, 8, 64, device=device), half(1000, 16, seed=2, device=device)
    lengths = torch.tensor([5, 700], dtype=torch.int32, device=device)

    def step() -> Tensor:
        out = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, table, table, lengths, causal=True)
        assert isinstance(out, Tensor)
        return out

    return step


PROBLEMS: dict[str, Callable[..., Callable[[], Tensor]]] = {
    "dense": dense,
    "varlen": varlen,
    "decode with append": decode,
}


def on_chunked(call: Callable[[], Tensor]) -> Tensor:
    with use_backend("chunked"):
        return call()


def on_fused(call: Callable[[], Tensor]) -> Tensor:
    with use_backend("fused"):
        return call()


# ---- in this process


def another_device() -> str:
    if torch.cuda.device_count() < 2:
        return "skipped: one GPU"
    other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    before = torch.cuda.current_device()
    for make in PROBLEMS.values():
        call = make(other)
        close(on_fused(call), on_chunked(call))
    leaf = half(2, 100, 4, 64, device=other).requires_grad_()
    with use_backend("fused"):
        flash_attn_func(leaf, leaf, leaf).sum().backward()
    assert torch.cuda.current_device() == before
    return f"tensors on cuda:{other}, current cuda:{before}"


def threads() -> str:
    """Sixteen at once, each on a stream of its own; the first call of each thread is one of the backend's."""
    calls = [make() for make in PROBLEMS.values()] + [dense(seqlen=length) for length in (1, 40, 300, 1000)]
    expected = [on_chunked(call) for call in calls]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), use_backend("fused"):
                for turn in range(40):
                    index = (number + turn) % len(calls)
                    found = calls[index]()
                    torch.cuda.current_stream().synchronize()
                    close(found, expected[index])
        except Exception:  # noqa: BLE001  (told by the main thread)
            failures.append(traceback.format_exc())

    workers = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]
    return "16 threads"


def graphs() -> str:
    """Captured after one call each, replayed over other numbers."""
    for make in PROBLEMS.values():
        call = make()
        on_fused(call)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream), use_backend("fused"):
            out = call()
        for cell in call.__closure__ or ():
            if isinstance(cell.cell_contents, Tensor) and cell.cell_contents.dtype == torch.float16:
                cell.cell_contents.mul_(0.5)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        close(out, on_chunked(call))
    return "dense, varlen, decode"


def graph_of_a_new_variant() -> str:
    """Loads while the stream is captured, or says what to do before."""
    q = half(1, 50, 2, 32)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph), use_backend("fused"):
            out = flash_attn_func(q, q, q, softcap=3.0, window_size=(9, 5))
    except RuntimeError as error:
        if "once before the capture" not in str(error):
            raise
        torch.cuda.synchronize()
        return f"refused: {error}"
    graph.replay()
    with use_backend("chunked"):
        close(out, flash_attn_func(q, q, q, softcap=3.0, window_size=(9, 5)))
    return "loaded while captured"


# ---- in processes of their own


def child(folder: str | Path) -> str:
    """What a child with this cache folder prints."""
    environment = {**os.environ, "FLASH_ATTN_COMPAT_CACHE": str(folder)}
    command = [sys.executable, "-m", "tests.gpu_fused", "--child"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def first_calls() -> str:
    """What a user waits for in a new process whose GPU is awake."""
    with tempfile.TemporaryDirectory() as path:
        compiled, loaded = (json.loads(child(path)) for _ in range(2))
    told, slow = [], []
    for how, calls, bound in (("compiled", compiled, FIRST_CALL), ("from disk", loaded, FROM_DISK)):
        for name, (seconds, kernels) in calls.items():
            told.append(f"{how}, {name}: {seconds:.3f} s for {kernels} new kernels")
            slow += [name] if seconds > bound * max(1, kernels) else []
    assert not slow, "; ".join(told)
    return "; ".join(told)


def child_times() -> None:
    torch.ones(8, device="cuda").sum().item()
    problems = {name: make() for name, make in PROBLEMS.items()}
    leaf = half(2, 100, 4, 64).requires_grad_()
    problems["training step"] = lambda: torch.autograd.grad(flash_attn_func(leaf, leaf, leaf).sum(), leaf)[0]
    torch.cuda.synchronize()
    found = {}
    for name, call in problems.items():
        before, start = len(loader._kernels), time.perf_counter()
        on_fused(call)
        torch.cuda.synchronize()
        found[name] = time.perf_counter() - start, len(loader._kernels) - before
    print(json.dumps(found))


CHECKS: dict[str, Callable[[], str | None]] = {
    "another device than the current one": another_device,
    "threads": threads,
    "CUDA graphs": graphs,
    "a CUDA graph of a variant that is not loaded": graph_of_a_new_variant,
    "first calls": first_calls,
}

if __name__ == "__main__":
    sys.exit(main())
