"""Call a user's function by the argument names of flash_attn_func, whatever names the function has itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

import torch

import flash_attn_compat

from .errors import UsageError

Function = Callable[..., Any]
TENSORS = ("q", "k", "v")
# Other names of an argument, as in Triton's tutorial and in PyTorch.
ALSO = {"softmax_scale": ("sm_scale", "scale"), "causal": ("is_causal",)}
DEFAULTS: Mapping[str, Any] = {
    name: each.default for name, each in inspect.signature(flash_attn_compat.flash_attn_func).parameters.items()
}


def adapted(function: Function) -> Function:
    """Return a function with flash_attn_func's argument names that calls ``function``, or itself if it has them.

    If it requires causal or a scale, the defaults are False and head_dim ** -0.5. Raises UsageError if it requires an
    argument that flash_attn_func lacks.
    """
    context = _takes_context(function)
    try:
        signature = inspect.signature(function if context is None else _forward_of(function))
    except (TypeError, ValueError):  # a compiled function may have no signature
        return function
    theirs = [*signature.parameters.values()][bool(context) :]
    plain = [each for each in theirs if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    ours = _our_names(plain)
    if not {*TENSORS} <= {*ours.values()}:
        return function
    required = [each.name for each in plain if each.default is Parameter.empty and ours[each.name] not in TENSORS]
    for name in required:
        if ours[name] not in DEFAULTS:
            raise UsageError(f"needs the argument {name!r}, which flash_attn_func lacks: give it a default")
    scale = next((each for each in plain if ours[each.name] == "softmax_scale"), None)
    wants_number = scale is not None and scale.default is not None
    is_positional = context is not None
    needs = is_positional or required or wants_number or any(ours[each.name] != each.name for each in plain)
    if not needs and not any(each.kind is Parameter.POSITIONAL_ONLY for each in plain):
        return function
    return _Adapted(function, theirs, ours, is_positional, wants_number)


def _takes_context(function: Function) -> bool | None:
    """Whether the forward of an autograd.Function's ``apply`` takes ctx; None for any other function."""
    owner = getattr(function, "__self__", None)
    if not (isinstance(owner, type) and issubclass(owner, torch.autograd.Function)):
        return None
    return owner.setup_context is torch.autograd.Function.setup_context


def _forward_of(function: Function) -> Function:
    forward: Function = function.__self__.forward  # type: ignore[attr-defined]  # _takes_context checked it
    return forward


def _our_names(plain: list[Parameter]) -> dict[str, str]:
    """Return flash_attn_func's name for each parameter of the function, or the parameter's own name if it has none."""
    names = [each.name for each in plain]
    ours = {name: name for name in names}
    leading = [each.name for each in plain if each.kind is not Parameter.KEYWORD_ONLY][: len(TENSORS)]
    if "q" not in names and len(leading) == len(TENSORS):
        ours |= dict(zip(leading, TENSORS))
    for name, others in ALSO.items():
        other = next((other for other in others if other in names), None)
        if name not in names and other is not None:
            ours[other] = name
    return ours


class _Adapted:
    """Calls a user's function, which has other names or positional arguments, from flash_attn_func's arguments."""

    def __init__(
        self, function: Function, theirs: list[Parameter], ours: dict[str, str], is_positional: bool, wants_number: bool
    ) -> None:
        self.function, self.wants_number, self.ours = function, wants_number, ours
        self.by_place = [
            each.name for each in theirs if each.name in ours and (is_positional or each.kind is each.POSITIONAL_ONLY)
        ]
        self.rest = next((each.name for each in theirs if each.kind is each.VAR_KEYWORD), None)
        self.__signature__ = Signature(sorted(map(self._shown, filter(self._is_shown, theirs)), key=self._order))
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def _is_shown(self, each: Parameter) -> bool:
        return each.kind is not each.VAR_POSITIONAL

    def _shown(self, each: Parameter) -> Parameter:
        if each.kind is each.VAR_KEYWORD:
            return each
        name = self.ours[each.name]
        if name in TENSORS:
            return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD)
        default = None if name == "softmax_scale" and self.wants_number else each.default
        default = DEFAULTS[name] if default is Parameter.empty else default
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default)

    @staticmethod
    def _order(each: Parameter) -> tuple[int, int]:
        return each.kind, TENSORS.index(each.name) if each.name in TENSORS else 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        more = values.pop(self.rest) if self.rest else {}
        if self.wants_number and values["softmax_scale"] is None:
            values["softmax_scale"] = values["q"].shape[-1] ** -0.5
        theirs = {name: values[ours] for name, ours in self.ours.items()}
        placed = [theirs.pop(name) for name in self.by_place]
        return self.function(*placed, **theirs, **more)
