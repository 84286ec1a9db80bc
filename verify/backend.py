"""The package's backends by import path, for `verify locate`: `verify.backend:chunked` is our answer by chunked."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    import flash_attn_compat
    from flash_attn_compat.backends import BACKENDS

    if name not in [backend.name for backend in BACKENDS]:
        raise AttributeError(f"unknown backend {name!r}")

    @wraps(flash_attn_compat.flash_attn_func)
    def through_backend(*args: Any, **kwargs: Any) -> Any:
        with flash_attn_compat.use_backend(name):
            return flash_attn_compat.flash_attn_func(*args, **kwargs)

    return through_backend
