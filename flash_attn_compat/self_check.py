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
from flash_attn_compat.core.features import dtype_name
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


@dataclass(frozen=True)
class Part:
    """What one backend is asked for one case."""

    backend: str
    case: _Case
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.case.name}, {dtype_name(self.dtype)}"


def parts(device: torch.device) -> list[Part]:
    """Each case, in half precision and fp32, for each backend."""
    halves = (torch.bfloat16,) if device.type == "cpu" else (torch.float16, torch.bfloat16)
    return [
        Part(backend.name, case, dtype) for dtype in (*halves, torch.float32) for case in _CASES for backend in BACKENDS
    ]


def run(device: torch.device) -> list[Check]:
    """Each case, output and gradients, on each backend that can serve it."""
    return [check for part in parts(device) if (check := check_part(part, device)) is not None]


def check_part(part: Part, device: torch.device) -> Check | None:
    """None where the backend does not serve the case."""
    with flash_attn_compat.use_backend(part.backend):
        try:
            inputs, dout = _inputs(part.case, part.dtype, device)
            got = _with_gradients(functools.partial(_ours, part.case), inputs, dout)
            exact, plain = _expected(part.case, part.dtype, device)
            errors = _errors(got, exact)
        except flash_attn_compat.BackendNotSupported:
            return None
        except Exception as error:  # noqa: BLE001  a backend that breaks is what doctor is there to tell
            return Check(part.backend, part.name, False, f"{type(error).__name__}: {error}")
    floor = torch.finfo(part.dtype).eps  # where the plain computation happens to be nearly exact
    bounds = _FORWARD * plain.out + floor, _BACKWARD * plain.gradients + floor
    passed = errors.out <= bounds[0] and errors.gradients <= bounds[1]
    told = f"out {errors.out:.1e} ({plain.out:.1e}), gradients {errors.gradients:.1e} ({plain.gradients:.1e})"
    return Check(part.backend, part.name, passed, told)


def _inputs(case: _Case, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """q, k, v and a gradient of out."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    shapes = [(2, 70, 4, 64), (2, 90, case.nheads_k, 64), (2, 90, case.nheads_k, 64)]
    return [draw(shape).to(device, dtype) for shape in shapes], draw(shapes[0]).to(device, dtype)


@functools.lru_cache(1)
def _expected(case: _Case, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], _Errors]:
    """What is right in fp64, on the CPU, where every device's numbers can be compared; and plain PyTorch's errors."""
    inputs, dout = _inputs(case, dtype, device)
    plainly = functools.partial(_plain, case)
    exact = _with_gradients(plainly, [x.cpu().double() for x in inputs], dout.cpu().double())
    return exact, _errors(_with_gradients(plainly, inputs, dout), exact)


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
