"""Whether this thread is within a call of which it is decided who computes it: PyTorch's operators in it stay its own.

torch_sdpa/ stands in front of those operators, and would ask about the same call again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _Decided(threading.local):
    yet = False


# Its ``yet``: whether this thread is within such a call.
DECIDED = _Decided()


def as_decided(compute: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """``compute(*arguments, **named)``, whose operators are PyTorch's own."""
    before, DECIDED.yet = DECIDED.yet, True
    try:
        return compute(*arguments, **named)
    finally:
        DECIDED.yet = before
