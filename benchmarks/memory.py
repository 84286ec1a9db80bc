"""Memory and the cost of windows: what a call holds beyond its inputs and outputs at 8k and 16k tokens, and how long a
window takes. `python -m benchmarks.memory [--device cuda] [--json FILE] [--only TEXT]`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.measure import Figure, arguments, interleaved, report
from flash_attn_compat import explain, flash_attn_func, use_backend
from verify.timing import Allocations, allocations

BACKENDS = ("chunked", "sdpa")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(256, 256)),
    "causal window": dict(causal=True, window_size=(256, 0)),
    "alibi": dict(alibi_slopes=[0.01]),
    "softcap": dict(softcap=20.0),
    "dropout": dict(dropout_p=0.1),
}
SHORT, LONG = 8192, 16384


def _inputs(seqlen: int, device: str, requires_grad: bool) -> list[Tensor]:
    return [torch.randn(1, seqlen, 1, 32, device=device, requires_grad=requires_grad) for _ in range(3)]


def _attention(backend: str, inputs: list[Tensor], feature: dict[str, Any]) -> Callable[[], Tensor]:
    kwargs = dict(feature)
    if "alibi_slopes" in kwargs:
        kwargs["alibi_slopes"] = torch.tensor(kwargs["alibi_slopes"], device=inputs[0].device)

    def call() -> Tensor:
        with use_backend(backend):
            return flash_attn_func(*inputs, **kwargs)

    return call


def _serves(backend: str, feature: str, device: str) -> bool:
    call = _attention(backend, _inputs(16, device, True), FEATURES[feature])
    return explain(call).backend is not None


def _beyond(backend: str, feature: str, seqlen: int, with_backward: bool, device: str) -> Allocations:
    """What is held on top of inputs, output, LSE and gradients."""
    inputs = _inputs(seqlen, device, with_backward)
    forward = _attention(backend, inputs, FEATURES[feature])
    outputs = inputs[0].nbytes + 4 * seqlen
    if not with_backward:
        held = allocations(forward, device)
        return Allocations(held.peak - outputs, held.largest)
    held = allocations(lambda: torch.autograd.grad(forward().sum(), inputs), device)
    return Allocations(held.peak - outputs - sum(x.nbytes for x in inputs), held.largest)


def growth(backend: str, feature: str, with_backward: bool, device: str) -> Iterator[Figure]:
    if not _serves(backend, feature, device):
        return
    short, long = (_beyond(backend, feature, n, with_backward, device) for n in (SHORT, LONG))
    mib = 2.0**20
    detail = f"{short.peak / mib:.1f} -> {long.peak / mib:.1f} MiB, all scores would be {4 * LONG**2 / mib:.0f}"
    yield Figure(
        f"{backend}: memory beyond inputs and outputs",
        f"{feature}, {'forward + backward' if with_backward else 'forward'}",
        f"{LONG} over {SHORT} tokens", long.peak / max(short.peak, 1), at_most=2.2, detail=detail,
    )  # fmt: skip


def window_time(backend: str, with_backward: bool, device: str, repeats: int) -> Iterator[Figure]:
    """Twice the length costs twice the time, twice the window about twice, and both far less than no window."""
    short, long = (_inputs(n, device, with_backward) for n in (SHORT, LONG))
    cases = {
        "short": (short, 256), "narrow": (long, 256), "wide": (long, 512), "widest": (long, 2048), "none": (long, -1),
    }  # fmt: skip
    calls: dict[str, Callable[[], Any]] = {}
    for name, (inputs, window) in cases.items():
        forward = _attention(backend, inputs, dict(causal=True, window_size=(window, 0)))
        calls[name] = _timed(forward, inputs, with_backward, device)
    taken = interleaved(calls, repeats)
    group = f"{backend}: time of a causal window, {'forward + backward' if with_backward else 'forward'}"

    def figure(case: str, above: str, below: str, at_most: float) -> Figure:
        detail = f"{1e3 * taken[below]:.1f} -> {1e3 * taken[above]:.1f} ms"
        return Figure(group, case, "time over time", taken[above] / taken[below], at_most=at_most, detail=detail)

    yield figure(f"window 256, {LONG} over {SHORT} tokens", "narrow", "short", 2.5)
    yield figure(f"{LONG} tokens, window 512 over 256", "wide", "narrow", 2.5)
    yield figure(f"{LONG} tokens, window 2048 over 256", "widest", "narrow", 10.0)
    yield figure(f"{LONG} tokens, window 256 over no window", "narrow", "none", 0.25)


def _timed(forward: Callable[[], Tensor], inputs: list[Tensor], with_backward: bool, device: str) -> Callable[[], Any]:
    def call() -> None:
        out = forward()
        if with_backward:
            torch.autograd.grad(out.sum(), inputs)
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    return call


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    device = options.device
    runs: list[tuple[str, Callable[[], Iterator[Figure]]]] = []
    for backend in BACKENDS:
        for feature in FEATURES:
            for with_backward in (False, True):
                label = f"{backend} memory {feature} {'backward' if with_backward else 'forward'}"
                runs.append((label, lambda b=backend, f=feature, w=with_backward: growth(b, f, w, device)))
    for backend in BACKENDS:
        for with_backward in (False, True):
            label = f"{backend} time {'backward' if with_backward else 'forward'}"
            runs.append((label, lambda b=backend, w=with_backward: window_time(b, w, device, min(options.repeats, 3))))
    wanted = [run for label, run in runs if options.only in label]
    figures = [figure for run in track(wanted, "measuring") for figure in run()]
    return report(f"Memory and windows on {device}", figures, options)


if __name__ == "__main__":
    sys.exit(main())
