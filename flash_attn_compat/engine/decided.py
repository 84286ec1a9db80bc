"""Whether this thread is within a call of which it is decided who computes it: PyTorch's operators in it stay its own.

aten/ stands in front of those operators, and would ask about the same call again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _Decided(threading.local):
    yet = False


_decided = _Decided()


def is_decided() -> bool:
    return _decided.yet


def as_decided(compute: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """``compute(*arguments, **named)``, whose operators are PyTorch's own."""
    before = _decided.yet
    _decided.yet = True
    try:
        return compute(*arguments, **named)
    finally:
        _decided.yet = before
