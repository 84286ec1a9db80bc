"""Policies that a program acquires and releases: while it holds several, the widest is active."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

P = TypeVar("P")


class HeldPolicies(Generic[P]):
    """The policies of one switch of the process, such as ``sdpa``, for all threads.

    width: a number, or numbers, that are largest for the widest policy
    activate: gets the widest policy, or None once none is held; may raise
    """

    def __init__(self, width: Callable[[P], Any], activate: Callable[[P | None], None]) -> None:
        self.policies: list[P] = []
        self._width, self._activate, self._lock = width, activate, threading.RLock()

    def acquire(self, policy: P) -> None:
        with self._lock:
            self.policies.append(policy)
            try:
                self._update()
            except BaseException:  # the caller cannot release it
                self.policies.remove(policy)
                raise

    def release(self, policy: P) -> None:
        """Undo one ``acquire``."""
        with self._lock:
            if policy in self.policies:
                self.policies.remove(policy)
            self._update()

    def _update(self) -> None:
        self._activate(max(self.policies, key=self._width, default=None))
