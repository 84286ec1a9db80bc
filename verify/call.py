"""The values of verify: a Call (one call of a public function, as tensors) and an Answer (all its results).

This module neither judges answers nor draws calls.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

PACKED = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}
DIFFERENTIABLE = ("q", "k", "v", *PACKED)
CACHES = "k_cache", "v_cache"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}  # dtypes of a cache; q is in half precision
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Call:
    """A call: the function's name, every argument by name, and dout, the gradient of out, or None for no backward."""

    fn: str
    args: dict[str, Any]
    dout: Tensor | None = None

    @property
    def q(self) -> Tensor:
        """The tensor with the queries: q or qkv."""
        q: Tensor = self.args["qkv" if "qkv" in self.args else "q"]
        return q

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def dropout_p(self) -> float:
        return max(float(self.args.get("dropout_p", 0.0)), 0.0)

    @property
    def qkv_names(self) -> tuple[str, str, str]:
        """q, k and v of an unpacked call; for a cache, k_cache and v_cache rather than the new keys."""
        return ("q", *CACHES) if "k_cache" in self.args else ("q", "k", "v")

    @property
    def qkv(self) -> list[Tensor]:
        return [self.args[name] for name in self.qkv_names]

    @property
    def caches(self) -> list[str]:
        return [name for name in CACHES if name in self.args]

    def to(self, device: torch.device | str) -> Call:
        """Return a copy on a device, with the same memory layouts."""
        args = {name: moved(x, device) if _is_data(name, x) else x for name, x in self.args.items()}
        return replace(self, args=args, dout=None if self.dout is None else moved(self.dout, device))

    def of_dtype(self, dtype: torch.dtype) -> Call:
        """Return the call with q, k, v and dout rounded to another dtype; slopes and lengths stay."""
        args = {name: x.to(dtype) if self._is_rescaled(name, x) else x for name, x in self.args.items()}
        return replace(self, args=args, dout=None if self.dout is None else self.dout.to(dtype))

    def multiplied(self, factor: float) -> Call:
        """Return the call with q, k, v and dout multiplied by ``factor``."""
        args = {name: factor * x if self._is_rescaled(name, x) else x for name, x in self.args.items()}
        return replace(self, args=args, dout=None if self.dout is None else factor * self.dout)

    @staticmethod
    def _is_rescaled(name: str, x: Any) -> bool:
        return name in (*DIFFERENTIABLE, *CACHES) and x.dtype not in EIGHT_BITS.values()


@dataclass(frozen=True)
class Answer:
    """The results of one call, or its right results, in flash-attn's shapes.

    grads: the gradients by "q", "k" and "v", also of packed arguments; caches: k_cache and v_cache after the call
    ungraded: why there are no gradients, if the call asked for them
    """

    out: Tensor
    softmax_lse: Tensor | None = None
    s_dmask: Tensor | None = None
    grads: Mapping[str, Tensor] = field(default_factory=dict)
    caches: Mapping[str, Tensor] = field(default_factory=dict)
    ungraded: str = ""

    @property
    def parts(self) -> dict[str, Tensor]:
        """All existing results by name: out, softmax_lse, dq, dk, dv, k_cache and v_cache."""
        lse = {} if self.softmax_lse is None else {"softmax_lse": self.softmax_lse}
        return {"out": self.out, **lse, **{f"d{name}": grad for name, grad in self.grads.items()}, **self.caches}

    def to(self, device: torch.device | str) -> Answer:
        """Return the answer on another device."""
        lse, s_dmask = (None if x is None else x.to(device) for x in (self.softmax_lse, self.s_dmask))
        grads, caches = ({n: x.to(device) for n, x in found.items()} for found in (self.grads, self.caches))
        return Answer(self.out.to(device), lse, s_dmask, grads, caches, self.ungraded)


def _is_data(name: str, x: Any) -> bool:
    return isinstance(x, Tensor) and not name.startswith("max_seqlen") and name != "window_size"


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy of x on another device, with the same strides and offset, and with the memory between values."""
    memory = x.new_empty(0).set_(x.untyped_storage()).to(device, copy=True)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def taken_apart(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients by "q", "k" and "v": those of packed arguments are split."""
    found: dict[str, Tensor] = {}
    for name, grad in grads.items():
        found |= dict(zip(PACKED[name], grad.unbind(-3))) if name in PACKED else {name: grad}
    return found


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters by name; none for a compiled function without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def accepted(function: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, less the defaults and requests for extra results that the function does not know."""
    known = parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return dict(args)
    return {name: value for name, value in args.items() if name in known or not _may_be_left_out(name, value)}


# flash-attn's defaults, which a call can omit.
_DEFAULTS: dict[str, Any] = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "num_splits": 0,
    "deterministic": False,
}  # fmt: skip


def _may_be_left_out(name: str, value: Any) -> bool:
    return name in ("return_attn_probs", "return_softmax_lse") or (name in _DEFAULTS and value == _DEFAULTS[name])


def solve(
    function: Callable[..., Any], call: Call, seed: int = 7, forgives: Callable[[Exception], bool] | None = None
) -> Answer:
    """Make the call with seeded dropout, and its backward if out requires gradients; return all results.

    forgives: whether an error means that the function has no gradients: an error of the backward, or of a call whose
        inputs require gradients
    """
    args, ungraded = dict(call.args), ""
    leaves: dict[str, Tensor] = {}
    if call.dout is not None:
        leaves = {name: args[name].detach().requires_grad_() for name in DIFFERENTIABLE if name in args}
    # torch.manual_seed takes a millisecond: it records its caller for every unused GPU.
    start = torch.default_generator.manual_seed if call.q.device.type == "cpu" else torch.manual_seed
    start(seed)
    try:
        with torch.set_grad_enabled(bool(leaves)):
            out, softmax_lse, s_dmask = parts_of(function(**args | leaves))
    except Exception as error:
        if not leaves or forgives is None or not speaks_of_gradients(error):
            raise
        start(seed)
        with torch.no_grad():
            out, softmax_lse, s_dmask = parts_of(function(**args))
        ungraded = first_line(error)
    grads: dict[str, Tensor] = {}
    if call.dout is not None and out.requires_grad:
        try:
            grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), call.dout)))
        except Exception as error:
            if forgives is None or not forgives(error):
                raise
            ungraded = first_line(error)
    elif call.dout is not None:
        ungraded = ungraded or "out has no gradient"
    return Answer(
        out=out.detach(),
        softmax_lse=None if softmax_lse is None else softmax_lse.detach(),
        s_dmask=s_dmask,
        grads=taken_apart(grads),
        caches={name: args[name] for name in call.caches},
        ungraded=ungraded,
    )


def speaks_of_gradients(error: Exception) -> bool:
    """Whether an error blames inputs that require gradients."""
    return bool(re.search(r"grad\b|gradient|backward|differentia", str(error), re.IGNORECASE))


def said(error: Exception) -> str:
    """Return an error's message; of an assertion without one, the line of code that failed."""
    if str(error) or not isinstance(error, AssertionError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "").strip() if frames else ""


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return ": ".join(filter(None, [type(error).__name__, *said(error).splitlines()[:1]]))


def parts_of(returned: Any) -> Iterator[Any]:
    """Return out, softmax_lse and S_dmask of a function's result; None for missing parts."""
    parts = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    return iter((*parts, None, None)[:3])


def same(a: Tensor, b: Tensor) -> bool:
    """Whether both are equal, with NaN in the same places."""
    if a.dtype in EIGHT_BITS.values():  # for which PyTorch has no comparison
        a, b = a.float(), b.float()
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
