"""Which backend serves a call, why, and how often each one has.

A decision depends on a call's traits and the settings only, so it is remembered by them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from flash_attn_compat import settings
from flash_attn_compat.backends import BACKENDS, Backend, CallRefused, KernelsFailed
from flash_attn_compat.engine import capture, signature
from flash_attn_compat.engine.append import Append, Step
from flash_attn_compat.engine.call import AttentionCall, Signature
from flash_attn_compat.engine.features import DESCRIPTIONS, Traits, split


class BackendNotSupported(RuntimeError):
    """No backend, or not the one that was asked for, can serve a call. The message holds every reason."""


class KeptStep(NamedTuple):
    """How calls over a cache of one outline are served, and by whom."""

    backend: Backend
    run: Step


_explaining: contextvars.ContextVar[bool] = contextvars.ContextVar("flash_attn_compat_explaining", default=False)
# By calls' signatures, and by traits and settings.
_decisions: dict[Signature | tuple[object, ...], Backend] = {}
_steps: dict[signature.Key, KeptStep | None] = {}
_served: Counter[str] = Counter()


@dataclass(frozen=True)
class Explanation:
    """Which backend a call would get, and what speaks against each (an empty list: it could serve)."""

    backend: str | None
    reasons: dict[str, list[str]]

    def __str__(self) -> str:
        width = max(len(name) for name in self.reasons)
        lines = []
        for name, reasons in self.reasons.items():
            chosen = "serves the call" if name == self.backend else "could serve it too"
            lines.append(f"{name:{width}}  {'; '.join(reasons) or chosen}")
        return "\n".join(lines)


class _Explained(BaseException):
    """Carries an explanation out of the call it was asked about, past any ``except Exception``."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Let only the backend ``name`` serve calls of this thread or task; a call it can't serve raises.

    Gradients are computed by the backend that served the forward, wherever and in whichever thread the backward runs.
    Some cannot compute gradients of softmax_lse, or any that can be differentiated again (create_graph=True): those
    come from the first backend that can. Raises ValueError for unknown names.
    """
    _find(name)
    with settings.using_backend(name):
        yield


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which backend ``function(*args, **kwargs)`` would get and why not the others; nothing is computed.

    ``function`` is one of flash_attn's, or anything that calls one: then its first attention call counts.
    Raises ValueError if no attention was called.
    """
    token = _explaining.set(True)
    try:
        function(*args, **kwargs)
    except _Explained as found:
        return found.explanation
    finally:
        _explaining.reset(token)
    raise ValueError(f"{function!r} made no attention call to explain")


def backend_counts() -> dict[str, int]:
    """Calls served since the start or the last reset, per backend; a forward and its backward count once."""
    return dict(_served)


def reset_backend_counts() -> None:
    _served.clear()


def forget_decisions() -> None:
    """Decide anew from now on: what a backend can serve has changed for a reason that no setting shows."""
    global _decisions, _steps
    _decisions, _steps = {}, {}


def choose_instead(failed: Backend, call: AttentionCall, failure: KernelsFailed) -> Backend:
    """Another backend for a call that ``failed`` could not compute; its reasons say so by now, if others fail too."""
    if isinstance(failure, CallRefused):
        other = _first_able(call.traits(), settings.named_backend(), besides=failed)
        if other is None:
            raise failure
        return other
    forget_decisions()
    backend = choose(call)
    if backend is failed:
        raise failure  # it gave no reason, and would be asked for ever
    return backend


def choose_unless_empty(call: AttentionCall) -> Backend | None:
    """As ``choose``; None where there are no rows or no keys, so that nothing is to be computed.

    Under a transform even nothing is computed: its zeros have derivatives.
    """
    if call.signature is None and call.is_empty and not call.transformed and not _explaining.get():
        return None
    return choose(call)


def choose(call: AttentionCall) -> Backend:
    """The first backend that can serve ``call`` exactly, or the forced one.

    Raises BackendNotSupported with every backend's reasons.
    """
    if _explaining.get():
        _check_settings()
        raise _Explained(_explain(call.traits(), settings.named_backend()))
    known = None if call.signature is None else _decisions.get(call.signature)
    return known or _decide(call)


def choose_whoever_is_named(call: AttentionCall) -> Backend:
    """As ``choose``, for gradients that the backend which is named, and has served the call, may lack.

    They are those that can be differentiated again, and those of softmax_lse.
    """
    traits = call.traits()
    key = "whoever is named", traits, settings.fingerprint()
    backend = _decisions.get(key) or _first_able(traits, None)
    if backend is None:
        raise BackendNotSupported(_refusal(traits, _explain(traits, None), None))
    if not capture.is_capturing(call.q.get_device()):
        _decisions[key] = backend
    return backend


def _check_settings() -> None:
    settings.check()
    name = settings.backend_variable()
    if name is not None and name not in _names():
        raise ValueError(f"{settings.BACKEND} must be one of {', '.join(_names())}, got {name!r}")


def count(backend: Backend) -> None:
    """It has served a call."""
    _served[backend.name] += 1


def count_left(name: str) -> None:
    """A call that could have been ours was left to somebody else."""
    _served[name] += 1


def is_explaining() -> bool:
    """Whether the call in progress is only to be explained."""
    return _explaining.get()


def tell(explanation: Explanation) -> NoReturn:
    """End the call in progress, which is only to be explained."""
    raise _Explained(explanation)


def reasons_against(name: str, call: AttentionCall) -> list[str]:
    """Why the backend ``name`` would not serve ``call``: its own reasons, or who goes first."""
    explanation = _explain(call.traits(), settings.named_backend())
    if explanation.backend == name:
        return []
    first = f"{explanation.backend} goes first" if explanation.backend else "another backend was named"
    return explanation.reasons[name] or [first]


def kept_step(outline: signature.Key | None) -> KeptStep | None:
    """The step that an earlier call of that outline was served by."""
    return None if _explaining.get() else signature.found(_steps, outline)


def new_step(
    outline: signature.Key | None, call: AttentionCall, whole: Callable[[], AttentionCall], new: Append | None
) -> KeptStep | None:
    """The step of the backend that serves ``call``, if it has one; kept for all calls of the outline.

    whole: as Backend.step's
    """
    steps, kept_by = _steps, outline if outline is not None and signature.is_plain(outline) else None
    if kept_by in steps:
        return None
    backend = choose_unless_empty(call)
    if backend is None:
        return None
    try:
        step = backend.step(call, whole(), new)
    except CallRefused:
        return None
    except KernelsFailed as failure:
        choose_instead(backend, call, failure)
        return new_step(outline, call, whole, new)
    found = None if step is None else KeptStep(backend, step)
    # In a capture kernels may not have been tried.
    if kept_by is not None and not capture.is_capturing(call.q.get_device()):
        signature.keep(steps, kept_by, found)
    return found


def _decide(call: AttentionCall) -> Backend:
    """As ``choose``, for the first call with a signature, or one without."""
    decisions, traits = _decisions, call.traits()
    key = traits, settings.fingerprint()
    backend = decisions.get(key)
    if backend is None:
        _check_settings()
        named = settings.named_backend()
        backend = _first_able(traits, named)
        if backend is None:
            raise BackendNotSupported(_refusal(traits, _explain(traits, named), named))
        if capture.is_capturing(call.q.get_device()):  # in which kernels may not have been tried
            return backend
        decisions[key] = backend
    if call.signature is not None:
        signature.keep(decisions, call.signature, backend)
    return backend


def _first_able(traits: Traits, forced: str | None, besides: Backend | None = None) -> Backend | None:
    """Stops at the first that can: those behind it may load libraries before they answer, which takes seconds."""
    candidates = [_find(forced)] if forced is not None else _ordered(traits)
    return next((backend for backend in candidates if backend is not besides and not backend.reasons(traits)), None)


def _ordered(traits: Traits) -> list[Backend]:
    ordered = sorted(BACKENDS, key=lambda backend: backend.rank(traits))
    for backend in BACKENDS:
        times = backend.times(traits)
        if times is not None:
            _move(backend, times, ordered)
    return ordered


def _move(backend: Backend, times: Mapping[str, float], ordered: list[Backend]) -> None:
    """Right behind the last one that is faster; those that were not timed stay on their side of it."""
    own = ordered.index(backend)
    ordered.remove(backend)
    is_ahead = [
        times[one.name] < times[backend.name] if one.name in times else place < own for place, one in enumerate(ordered)
    ]
    ordered.insert(max((place + 1 for place, ahead in enumerate(is_ahead) if ahead), default=0), backend)


def _explain(traits: Traits, forced: str | None) -> Explanation:
    reasons = {backend.name: backend.reasons(traits) for backend in _ordered(traits)}
    if forced is not None:
        _find(forced)
        return Explanation(forced if not reasons[forced] else None, reasons)
    able = [name for name, against in reasons.items() if not against]
    return Explanation(able[0] if able else None, reasons)


def _refusal(traits: Traits, explanation: Explanation, forced: str | None) -> str:
    asked = ", ".join(DESCRIPTIONS[feature] for feature in split(traits.features)) or "dense attention"
    head = f"backend {forced!r} cannot serve this call" if forced else "no backend can serve this call"
    return f"{head}: {traits.dtype} on {traits.device_type}, head_dim {traits.head_dim}, {asked}\n{explanation}"


def _find(name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise ValueError(f"unknown backend {name!r}; known are {', '.join(_names())}")


def _names() -> list[str]:
    return [backend.name for backend in BACKENDS]
