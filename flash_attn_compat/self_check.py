"""A numeric self-check of the backends on the device at hand, for doctor: a few seconds, no test suite.

What is right is computed in fp64 by plain products, of utils.testing, which nothing else in the package uses.
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
from flash_attn_compat.engine.features import dtype_name
from flash_attn_compat.utils.testing import attention_ref

# The bound of the package: twice the error of the same computation done plainly in the dtype, thrice for gradients.
_FORWARD, _BACKWARD = 2.0, 3.0


@dataclass(frozen=True)
class Check:
    """One case on one backend."""

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


def run(device: torch.device) -> list[Check]:
    """Each case, output and gradients, on each backend that can serve it, in half precision and fp32."""
    halves = (torch.bfloat16,) if device.type == "cpu" else (torch.float16, torch.bfloat16)
    return [check for dtype in (*halves, torch.float32) for case in _CASES for check in _run_case(case, dtype, device)]


def _run_case(case: _Case, dtype: torch.dtype, device: torch.device) -> list[Check]:
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    shapes = [(2, 70, 4, 64), (2, 90, case.nheads_k, 64), (2, 90, case.nheads_k, 64)]
    inputs = [draw(shape).to(device, dtype) for shape in shapes]
    dout = draw(shapes[0]).to(device, dtype)
    plainly, ours = functools.partial(_plain, case), functools.partial(_ours, case)
    # In fp64 on the CPU, where every device's numbers can be compared.
    exact = _with_gradients(plainly, [x.cpu().double() for x in inputs], dout.cpu().double())
    plain = _errors(_with_gradients(plainly, inputs, dout), exact)
    floor = torch.finfo(dtype).eps  # where the plain computation happens to be nearly exact
    bounds = _FORWARD * plain.out + floor, _BACKWARD * plain.gradients + floor
    checks = []
    for backend in BACKENDS:
        with flash_attn_compat.use_backend(backend.name):
            name = f"{case.name}, {dtype_name(dtype)}"
            try:
                got = _with_gradients(ours, inputs, dout)
            except flash_attn_compat.BackendNotSupported:
                continue
            except Exception as error:  # noqa: BLE001  a backend that breaks is what doctor is there to tell
                checks.append(Check(backend.name, name, False, f"{type(error).__name__}: {error}"))
                continue
        errors = _errors(got, exact)
        passed = errors.out <= bounds[0] and errors.gradients <= bounds[1]
        told = f"out {errors.out:.1e} ({plain.out:.1e}), gradients {errors.gradients:.1e} ({plain.gradients:.1e})"
        checks.append(Check(backend.name, name, passed, told))
    return checks


def _ours(case: _Case, q: Tensor, k: Tensor, v: Tensor) -> Any:
    options: dict[str, Any] = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap}
    return flash_attn_compat.flash_attn_func(q, k, v, **options)


def _plain(case: _Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left = case.window[0] if case.window[0] >= 0 else None
    options: dict[str, Any] = {"causal": case.causal, "window_size": (left, None), "softcap": case.softcap}
    return attention_ref(q, k, v, **options, upcast=False)[0]


def _with_gradients(function: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


class _Errors(NamedTuple):
    """The largest error of the output, and that of the three gradients together."""

    out: float
    gradients: float


def _errors(got: list[Tensor], exact: list[Tensor]) -> _Errors:
    out, *gradients = [float((a.cpu().double() - b).abs().max()) for a, b in zip(got, exact)]
    return _Errors(out, max(gradients))
