"""A flag per thread: PyTorch's operators inside this call stay PyTorch's own.

torch_sdpa/ replaces PyTorch's operators. It sets the flag once a call's backend is chosen, so that operators within the
call are not replaced again.
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
