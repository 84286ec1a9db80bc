"""Choose the backend that serves a call, explain the choice, and count the calls that each backend has served.

A choice depends only on a call's traits and context_key. It is cached by these two.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flash_attn_compat import settings
from flash_attn_compat.backends import BACKENDS, Backend, CallRefused
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.features import SLOPES_GRADIENT, Feature, Traits, split
from flash_attn_compat.dispatch import call_cache


class BackendNotSupported(RuntimeError):
    """No backend, or not the one that was asked for, can serve a call. The message holds every reason."""


# How many calls each backend has served, by name. Under "pytorch": calls of PyTorch's attention functions that were
# offered to our kernels and left to PyTorch. No Counter, since that takes six times as long in every call.
served: defaultdict[str, int] = defaultdict(int)


@dataclass(frozen=True)
class Explanation:
    """The backend that a call would get, and each backend's reasons to decline it (an empty list: it is eligible).

    slopes_gradient: the backend that would compute the gradient of alibi_slopes; None if they need no gradient
    """

    backend: str | None
    reasons: dict[str, list[str]]
    slopes_gradient: str | None = None

    def __str__(self) -> str:
        width = max(len(name) for name in self.reasons)
        lines = []
        for name, reasons in self.reasons.items():
            chosen = "serves the call" if name == self.backend else "could serve it too"
            also = "; computes the gradient of alibi_slopes, in PyTorch's operators" * (name == self.slopes_gradient)
            lines.append(f"{name:{width}}  {'; '.join(reasons) or chosen}{also}")
        return "\n".join(lines)


class Explained(BaseException):
    """Raised inside the function that ``explain`` calls, with the explanation; not caught by ``except Exception``."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Let only the backend ``name`` serve calls of this thread or task; a call it can't serve raises.

    The backend that served the forward computes the gradients, even if the backward runs after this block or in another
    thread. Some backends cannot compute gradients of softmax_lse, or gradients for create_graph=True. Then the first
    backend that can computes these. Raises ValueError for unknown names.
    """
    _find(name)
    with settings.using_backend(name):
        yield


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Return the backend of the call ``function(*args, **kwargs)`` and all reasons to decline it; computes nothing.

    ``function`` is one of flash_attn's, or any function that calls one; the first attention call in it is explained.
    Raises ValueError if it calls no attention, and the call's own error if the arguments are malformed.
    """
    try:
        with settings.explaining():
            function(*args, **kwargs)
    except Explained as found:
        return found.explanation
    raise ValueError(
        f"{function!r} made no attention call to explain, or PyTorch alone computes it: calls of "
        "F.scaled_dot_product_attention and flex_attention are asked about on CUDA GPUs only, while sdpa or flex is on"
    )


def backend_counts() -> dict[str, int]:
    """Return the calls served since the start or the last reset, by backend; a forward and its backward count once."""
    return dict(served)


def reset_backend_counts() -> None:
    """Set every count of ``backend_counts`` to 0."""
    served.clear()


def choose_backend(call: AttentionCall) -> Backend | None:
    """Return the first backend that can compute ``call`` exactly, or the forced one; None if nothing is to be computed.

    Nothing is to be computed without rows or keys, and on the meta device, unless a transform differentiates the zeros.
    Raises BackendNotSupported with every backend's reasons.
    """
    if settings.is_explaining():
        _check_settings()
        explanation = _explain(call.traits(), settings.forced_backend())
        if call.use & SLOPES_GRADIENT:
            other = _first_able(as_differentiable(call).traits(), None)
            explanation = replace(explanation, slopes_gradient=None if other is None else other.name)
        raise Explained(explanation)
    if (call.is_empty or call.q.is_meta) and not call.use & Feature.TRANSFORMS:
        return None
    return _decide(call)


def choose_fallback(refusing: Backend, call: AttentionCall, refusal: CallRefused) -> Backend:
    """Return the backend for a call whose sizes ``refusing`` cannot serve. Raises ``refusal`` if no other can."""
    other = _first_able(call.traits(), settings.forced_backend(), besides=refusing)
    if other is None:
        raise refusal
    return other


def choose_unforced(call: AttentionCall) -> Backend:
    """Return the first backend that can compute a call, even if the user forces another one.

    For backwards with features that the forced backend may lack: gradients of softmax_lse, and of gradients.
    """
    return _decide(call, heeds_name=False)


def as_differentiable(call: AttentionCall) -> AttentionCall:
    """Return ``call`` changed so that only backends that compute by differentiable operators are eligible."""
    return call._replace(use=(call.use | Feature.TRANSFORMS) & ~Feature.BACKWARD)


def _check_settings() -> None:
    settings.check()
    name = settings.value_of(settings.BACKEND)
    if name is not None and name not in _names():
        raise ValueError(f"{settings.BACKEND} must be one of {', '.join(_names())}, got {name!r}")


def reasons_against(name: str, call: AttentionCall) -> list[str]:
    """Return the reasons why the backend ``name`` would not serve ``call``; an empty list if it would.

    If the backend is eligible but not chosen, the reason is the backend that goes first, or that another was forced.
    """
    explanation = _explain(call.traits(), settings.forced_backend())
    if explanation.backend == name:
        return []
    first = f"{explanation.backend} goes first" if explanation.backend else "another backend was named"
    return explanation.reasons[name] or [first]


def _decide(call: AttentionCall, heeds_name: bool = True) -> Backend:
    traits, current = call.traits(), call_cache.current()
    key = traits, heeds_name, call_cache.context_key(call.q)
    found: Backend | None = current.choices.get(key)
    if found is not None:
        return found
    _check_settings()
    named = settings.forced_backend() if heeds_name else None
    backend = _first_able(traits, named)
    if backend is None:
        raise BackendNotSupported(_refusal(traits, _explain(traits, named), named))
    if not cuda_capture.is_capturing(call.q.get_device()):  # in a capture no self-test could run: choose again later
        call_cache.keep(current.choices, key, backend)
    return backend


def _first_able(traits: Traits, forced: str | None, besides: Backend | None = None) -> Backend | None:
    """Return the first eligible backend. Later ones are not asked, since some load a library for that, in seconds."""
    candidates = [_find(forced)] if forced is not None else _ordered(traits)
    return next((backend for backend in candidates if backend is not besides and not backend.reasons(traits)), None)


def _ordered(traits: Traits) -> list[Backend]:
    ordered = sorted(BACKENDS, key=lambda backend: backend.rank(traits))
    for backend in BACKENDS:
        times = backend.measured_times(traits)
        if times is not None:
            _sort_timed(ordered, times)
    return ordered


def _sort_timed(ordered: list[Backend], times: Mapping[str, float]) -> None:
    """Sort backends that have a time by it, within the places that they hold; those without a time keep theirs."""
    places = [place for place, backend in enumerate(ordered) if backend.name in times]
    by_time = sorted((ordered[place] for place in places), key=lambda backend: times[backend.name])
    for place, backend in zip(places, by_time):
        ordered[place] = backend


def _explain(traits: Traits, forced: str | None) -> Explanation:
    reasons = {backend.name: backend.reasons(traits) for backend in _ordered(traits)}
    if forced is not None:
        _find(forced)
        return Explanation(forced if not reasons[forced] else None, reasons)
    able = [name for name, against in reasons.items() if not against]
    return Explanation(able[0] if able else None, reasons)


def _refusal(traits: Traits, explanation: Explanation, forced: str | None) -> str:
    asked = ", ".join(feature.description for feature in split(traits.features)) or "dense attention"
    head = f"backend {forced!r} cannot serve this call" if forced else "no backend can serve this call"
    return f"{head}: {traits.dtype} on {traits.device_type}, head_dim {traits.head_dim}, {asked}\n{explanation}"


def _find(name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise ValueError(f"unknown backend {name!r}; choose from {', '.join(_names())}")


def _names() -> list[str]:
    return [backend.name for backend in BACKENDS]
