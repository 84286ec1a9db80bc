"""A numeric check of each backend on this machine's device, for doctor: a few seconds, not a test suite.

The expected results come from utils.testing's plain formula in fp64, which no backend uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat.backends import BACKENDS
from flash_attn_compat.core.features import dtype_name
from flash_attn_compat.utils.testing import attention_ref

# The largest allowed errors of out and of gradients, as multiples of the plain formula's error in the same dtype.
_FORWARD, _BACKWARD = 2.0, 3.0


@dataclass(frozen=True)
class Check:
    """The result of one case on one backend. detail: its errors, or why it failed"""

    backend: str
    case: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class _Case:
    name: str
    nheads_k: int = 4
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0


_CASES = (
    _Case("causal"),
    _Case("grouped heads, window, softcap", nheads_k=2, window=(20, 0), softcap=5.0),
    _Case("full", causal=False),
)


@dataclass(frozen=True)
class Part:
    """One check to run: a case in one dtype on one backend."""

    backend: str
    case: _Case
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.case.name}, {dtype_name(self.dtype)}"


def list_parts(device: torch.device) -> list[Part]:
    """Return each case, in half precision and fp32, for each backend."""
    halves = (torch.bfloat16,) if device.type == "cpu" else (torch.float16, torch.bfloat16)
    return [
        Part(backend.name, case, dtype) for dtype in (*halves, torch.float32) for case in _CASES for backend in BACKENDS
    ]


def check_all(device: torch.device) -> list[Check]:
    """Check output and gradients of each case on each backend that can serve it."""
    return [check for part in list_parts(device) if (check := check_part(part, device)) is not None]


def check_part(part: Part, device: torch.device) -> Check | None:
    """Check output and gradients of one case on one backend; None if the backend declines it."""
    with flash_attn_compat.use_backend(part.backend):
        try:
            inputs, dout = _draw_inputs(part.case, part.dtype, device)
            results = _run_with_gradients(functools.partial(_run_ours, part.case), inputs, dout)
            exact, plain = _compute_expected(part.case, part.dtype, device)
            errors = _measure_errors(results, exact)
        except flash_attn_compat.BackendNotSupported:
            return None
        except Exception as error:  # noqa: BLE001  doctor reports any failure of a backend
            return Check(part.backend, part.name, False, f"{type(error).__name__}: {error}")
    floor = torch.finfo(part.dtype).eps  # allowed even if the plain formula happens to be exact
    bounds = _FORWARD * plain.out + floor, _BACKWARD * plain.gradients + floor
    passed = errors.out <= bounds[0] and errors.gradients <= bounds[1]
    detail = f"out {errors.out:.1e} ({plain.out:.1e}), gradients {errors.gradients:.1e} ({plain.gradients:.1e})"
    return Check(part.backend, part.name, passed, detail)


def _draw_inputs(case: _Case, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v and a gradient of out."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    shapes = [(2, 70, 4, 64), (2, 90, case.nheads_k, 64), (2, 90, case.nheads_k, 64)]
    return [draw(shape).to(device, dtype) for shape in shapes], draw(shapes[0]).to(device, dtype)


@functools.lru_cache(1)
def _compute_expected(case: _Case, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], _Errors]:
    """Return out and gradients by the plain formula in fp64 on the CPU, and the plain formula's errors in ``dtype``."""
    inputs, dout = _draw_inputs(case, dtype, device)
    formula = functools.partial(_run_plain, case)
    exact = _run_with_gradients(formula, [x.cpu().double() for x in inputs], dout.cpu().double())
    return exact, _measure_errors(_run_with_gradients(formula, inputs, dout), exact)


def _run_ours(case: _Case, q: Tensor, k: Tensor, v: Tensor) -> Any:
    options: dict[str, Any] = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap}
    return flash_attn_compat.flash_attn_func(q, k, v, **options)


def _run_plain(case: _Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left = case.window[0] if case.window[0] >= 0 else None
    options: dict[str, Any] = {"causal": case.causal, "window_size": (left, None), "softcap": case.softcap}
    return attention_ref(q, k, v, **options, upcast=False)[0]


def _run_with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


class _Errors(NamedTuple):
    """The largest error of the output, and the largest of the three gradients."""

    out: float
    gradients: float


def _measure_errors(results: list[Tensor], exact: list[Tensor]) -> _Errors:
    out, *gradients = [float((a.cpu().double() - b).abs().max()) for a, b in zip(results, exact)]
    return _Errors(out, max(gradients))
