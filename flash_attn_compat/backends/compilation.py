"""Optional torch.compile of a pure function: used if the user allows it, and given up after its first failure."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

from flash_attn_compat import installed, settings

P = ParamSpec("P")
R = TypeVar("R")


class OptionallyCompiled(Generic[P, R]):
    """``function``, compiled while FLASH_ATTN_COMPAT_COMPILE=1 and as long as compiling works.

    The function must not change its arguments, because a call whose compilation fails is repeated uncompiled.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._compiled: Callable[P, R] | None = None
        self._has_failed = False

    @property
    def is_enabled(self) -> bool:
        return settings.is_on(settings.COMPILE) and not self._has_failed

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.is_enabled:
            return self._function(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._function, dynamic=True)
        try:
            return self._compiled(*args, **kwargs)
        # Any error of the compiler stack will do: the uncompiled function gives the same results.
        except Exception as error:  # noqa: BLE001
            self._has_failed = True
            warnings.warn(
                f"{self._function.__name__} could not be compiled and runs uncompiled from now on: "
                + installed.format_error(error),
                RuntimeWarning,
                stacklevel=2,
            )
            return self._function(*args, **kwargs)
