"""Time a function's forward and backward with torch.utils.benchmark, as flash-attn's scripts do.

The timed function gets ``inputs`` and ``kwinputs``. If it returns several outputs, the backward starts at the first. A
`torch.utils.benchmark.Timer` measures the times and waits for the GPU. autocast applies to the inputs' device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import benchmark

Timing = tuple[benchmark.Timer, benchmark.Measurement]


def benchmark_forward(
    fn: Callable[..., Any],
    *inputs: Any,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> Timing:
    """Time fn(*inputs, **kwinputs); returns the timer and its measurement, printed if verbose."""

    def run() -> None:
        with _autocast(inputs, amp, amp_dtype):
            fn(*inputs, **kwinputs)

    return _time(run, f"{desc} - Forward pass", repeats, verbose)


def benchmark_backward(
    fn: Callable[..., Any],
    *inputs: Any,
    grad: Tensor | None = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> Timing:
    """Time the backward alone, from `grad` (random by default). It leaves gradients in the inputs' .grad."""
    y = _run_forward(fn, inputs, kwinputs, amp, amp_dtype)
    upstream = _make_gradient(grad, y)

    def run() -> None:
        _clear_gradients(inputs)
        y.backward(upstream, retain_graph=True)

    return _time(run, f"{desc} - Backward pass", repeats, verbose)


def benchmark_combined(
    fn: Callable[..., Any],
    *inputs: Any,
    grad: Tensor | None = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> Timing:
    """Time forward and backward together; see `benchmark_backward`."""
    upstream = _make_gradient(grad, _run_forward(fn, inputs, kwinputs, amp, amp_dtype))

    def run() -> None:
        _clear_gradients(inputs)
        _run_forward(fn, inputs, kwinputs, amp, amp_dtype).backward(upstream, retain_graph=True)

    return _time(run, f"{desc} - Forward + Backward pass", repeats, verbose)


def benchmark_fwd_bwd(
    fn: Callable[..., Any],
    *inputs: Any,
    grad: Tensor | None = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> tuple[Timing, Timing]:
    """(`benchmark_forward`, `benchmark_backward`) of the same call."""
    options: dict[str, Any] = {"repeats": repeats, "desc": desc, "verbose": verbose, "amp": amp, "amp_dtype": amp_dtype}
    forward = benchmark_forward(fn, *inputs, **options, **kwinputs)
    return forward, benchmark_backward(fn, *inputs, grad=grad, **options, **kwinputs)


def benchmark_all(
    fn: Callable[..., Any],
    *inputs: Any,
    grad: Tensor | None = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> tuple[Timing, Timing, Timing]:
    """(`benchmark_forward`, `benchmark_backward`, `benchmark_combined`) of the same call."""
    options: dict[str, Any] = {"repeats": repeats, "desc": desc, "verbose": verbose, "amp": amp, "amp_dtype": amp_dtype}
    options |= kwinputs
    both = benchmark_fwd_bwd(fn, *inputs, grad=grad, **options)
    return (*both, benchmark_combined(fn, *inputs, grad=grad, **options))


def pytorch_profiler(
    fn: Callable[..., Any],
    *inputs: Any,
    trace_filename: str | None = None,
    backward: bool = False,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    cpu: bool = False,
    verbose: bool = True,
    **kwinputs: Any,
) -> None:
    """Profile one call after 30 others: print a table if verbose, write a Chrome trace to trace_filename.

    cpu: also profile the CPU. Without CUDA the CPU is always profiled.
    """
    grad: Tensor | None = None

    def run() -> None:
        nonlocal grad
        _clear_gradients(inputs if backward else ())
        y = _run_forward(fn, inputs, kwinputs, amp, amp_dtype)
        if backward:
            grad = torch.randn_like(y) if grad is None else grad
            y.backward(grad, retain_graph=True)

    for _ in range(30):
        run()
    activities = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    if cpu or not activities:
        activities.insert(0, torch.profiler.ProfilerActivity.CPU)
    # No stacks without CUDA: the table would then list Python functions.
    stack = torch.cuda.is_available()
    with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=stack) as profile:
        run()
    if verbose:
        print(profile.key_averages().table(row_limit=50))
    if trace_filename is not None:
        profile.export_chrome_trace(trace_filename)


def benchmark_memory(
    fn: Callable[..., Any], *inputs: Any, desc: str = "", verbose: bool = True, **kwinputs: Any
) -> float:
    """Return the peak of CUDA memory allocated during one call, in units of 1000 MiB, which flash-attn calls GB.

    Raises RuntimeError without CUDA, whose allocator does the counting.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("benchmark_memory reads CUDA's allocator, and PyTorch sees no CUDA device")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    fn(*inputs, **kwinputs)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / (2**20 * 1000)
    if verbose:
        print(f"{desc} max memory: {peak}GB")
    torch.cuda.empty_cache()
    return peak


def _time(run: Callable[[], None], title: str, repeats: int, verbose: bool) -> Timing:
    if verbose:
        print(title)
    timer = benchmark.Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    measurement = timer.timeit(repeats)
    if verbose:
        print(measurement)
    return timer, measurement


def _autocast(inputs: tuple[Any, ...], enabled: bool, dtype: torch.dtype) -> torch.autocast:
    devices = [value.device.type for value in inputs if isinstance(value, Tensor)]
    device_type = devices[0] if devices else "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(device_type=device_type, dtype=dtype, enabled=enabled)


def _run_forward(
    fn: Callable[..., Any], inputs: tuple[Any, ...], kwinputs: dict[str, Any], amp: bool, amp_dtype: torch.dtype
) -> Tensor:
    with _autocast(inputs, amp, amp_dtype):
        y: Any = fn(*inputs, **kwinputs)
    first: Tensor = y[0] if isinstance(y, tuple) else y
    return first


def _make_gradient(grad: Tensor | None, y: Tensor) -> Tensor:
    if grad is None:
        return torch.randn_like(y)
    if grad.shape != y.shape:
        raise RuntimeError(f"Grad shape {tuple(grad.shape)} does not match output shape {tuple(y.shape)}")
    return grad


def _clear_gradients(inputs: tuple[Any, ...]) -> None:
    for value in inputs:
        if isinstance(value, Tensor):
            value.grad = None
