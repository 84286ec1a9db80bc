"""The judged implementations: our backends, a kernel by its import path, and the real flash-attn for comparison."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import flash_attn_compat
from flash_attn_compat import flash_attn_interface
from flash_attn_compat.backends import BACKENDS
from flash_attn_compat.isolation import Ended, run_in_children

from .adapted import adapted
from .call import Call, accepted, first_line
from .errors import NotSupported, UsageError
from .features import beyond_flash_attn

PUBLIC_FUNCTIONS = [name for name in flash_attn_compat.__all__ if name.startswith("flash_attn_")]


@dataclass(frozen=True)
class Backend:
    """One of the package's backends: calls raise NotSupported if it declines them."""

    name: str

    @property
    def approximate(self) -> bool:
        """Whether its exp and tanh may be as approximate as flash-attn's."""
        return self.name == "official"

    @contextmanager
    def serving(self, call: Call) -> Iterator[Callable[..., Any]]:
        """Yield the function for the call. Raises NotSupported if the backend declines it"""
        with flash_attn_compat.use_backend(self.name):
            try:
                yield getattr(flash_attn_interface, call.fn)
            except flash_attn_compat.BackendNotSupported as refusal:
                reason = self._reason(refusal)
                if reason.startswith("failed before: "):  # it failed its self-test on this GPU
                    raise RuntimeError(reason) from refusal
                raise NotSupported(reason) from refusal

    def flash_attn_func(self, *args: Any, **kwargs: Any) -> Any:
        with flash_attn_compat.use_backend(self.name):
            return flash_attn_compat.flash_attn_func(*args, **kwargs)

    def calls_served(self) -> int | None:
        """The number of calls that it has served so far; None if it does not count."""
        return flash_attn_compat.backend_counts().get(self.name, 0)

    def _reason(self, refusal: Exception) -> str:
        """Return this backend's first reason. The message has a line "name  reason; reason" for each backend."""
        mine = re.search(rf"^ *{self.name} +([^;\n]+)", str(refusal), re.MULTILINE)
        return mine[1] if mine else str(refusal).partition("\n")[0]


@dataclass(frozen=True)
class Imported:
    """A module with some of flash-attn's public functions, or one function in place of flash_attn_func."""

    name: str
    target: Any
    approximate = True

    @contextmanager
    def serving(self, call: Call) -> Iterator[Callable[..., Any]]:
        function = getattr(self.target, call.fn, None)
        if function is None and call.fn == "flash_attn_func" and callable(self.target):
            function = self.target
        if function is None:
            raise NotSupported(f"has no {call.fn}")
        try:
            inspect.signature(function).bind(**accepted(function, call.args))
        except TypeError as error:
            raise NotSupported(str(error)) from error
        try:
            yield function
        except Exception as error:
            if declines(error):
                raise NotSupported((str(error).splitlines() or [type(error).__name__])[0]) from error
            beyond = beyond_flash_attn(call)
            if not beyond or is_of_a_device(error):
                raise
            raise NotSupported(f"{first_line(error)} (flash-attn refuses {' and '.join(beyond)} too)") from error

    def calls_served(self) -> int | None:
        return None


Implementation = Backend | Imported

DECLINES = "NotImplementedError, an error that says what it does not support, or any error where flash-attn raises one"


def declines(error: Exception) -> bool:
    """Whether an error means that the kernel declines the case. An error that a device reports never means so."""
    if isinstance(error, NotImplementedError):
        return True
    text = str(error).lower()
    return not is_of_a_device(error) and ("support" in text or "not implemented" in text)


def is_of_a_device(error: Exception) -> bool:
    """Whether an error comes from a device or its libraries."""
    return bool(re.search(r"(cuda|hip|triton) error|_status_", str(error), re.IGNORECASE))


def backends(names: list[str]) -> list[Backend]:
    """Return the named backends, or all in order of preference."""
    known = [backend.name for backend in BACKENDS]
    for name in names:
        if name not in known:
            raise UsageError(f"unknown backend {name!r}; choose from {', '.join(known)}")
    return [Backend(name) for name in names or known]


def imported(path: str) -> Imported:
    """Return the implementation at `module`, `module:attribute`, `FILE.py` or `FILE.py:attribute`."""
    file = re.fullmatch(r"(.*\.py)(?::(.*))?", path)
    module_name, attribute = (file[1], file[2] or "") if file else path.partition(":")[::2]
    try:
        target: Any = _of_file(Path(module_name)) if file else importlib.import_module(_own_import_name(module_name))
    except Exception as error:
        raise UsageError(f"cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    for part in filter(None, attribute.split(".")):
        if not hasattr(target, part):
            raise UsageError(f"module {module_name!r} has no {attribute!r}")
        target = getattr(target, part)
    if not callable(target) and not any(hasattr(target, name) for name in PUBLIC_FUNCTIONS):
        raise UsageError(f"{path!r} is not a function and has none of {', '.join(PUBLIC_FUNCTIONS)}")
    if callable(target) and not isinstance(target, type):
        target = _attention(path, target)
    return Imported(path, target)


def _attention(path: str, target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with flash_attn_func's argument names. Raises UsageError if it is no attention function"""
    try:
        found = adapted(target)
    except UsageError as error:
        raise UsageError(f"{path!r} {error}") from error
    reason = _reason_against(found)
    if reason is not None:
        raise UsageError(f"{path!r} is not an attention function: it does not make a tensor of q, k and v{reason}")
    return found


def check_loads(path: str) -> None:
    """Raise UsageError if a child process cannot import the kernel, or ends in a call with four rows."""
    (found,) = run_in_children(1, load, path)
    if isinstance(found, Ended):
        raise UsageError(f"{path!r} cannot be judged: where it was imported and called with four rows, {found.how}")


def load(first: int, path: str) -> Iterator[bool]:
    """Import a kernel, which calls it once; yield True. A step for `run_in_children`."""
    imported(path)
    yield True


def _of_file(path: Path) -> ModuleType:
    """Import a file as a module. Its folder is first on sys.path during the import, as for a script, so that it can
    import its neighbours. Afterwards the folder goes to the end, so that a file in it hides no library.
    """
    spec = importlib.util.spec_from_file_location(f"judged_{path.stem}", path.resolve(strict=True))
    assert spec is not None and spec.loader is not None  # the name ends in .py
    folder = str(path.resolve().parent)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)
    return module


def _own_import_name(name: str) -> str:
    """Return the import name of verify's own kernels: in a wheel, verify is flash_attn_compat.verify."""
    return name.replace("verify", __package__, 1) if name in ("verify.planted", "verify.steps") else name


def _reason_against(function: Callable[..., Any]) -> str | None:
    """Return None if the function takes q, k, v and returns a tensor; else the error as " (message)", or "". The values
    of the tensor do not matter here.
    """
    q, told = torch.zeros(1, 2, 1, 8), ""
    for arguments, named in (((q, q, q), {}), ((), {"q": q, "k": q, "v": q})):
        try:
            out = function(*arguments, **named)
        except TypeError as error:
            told = told or f" ({error})"
            continue
        except Exception:  # noqa: BLE001  any other error is shown in the report
            return None
        return None if isinstance(out, (torch.Tensor, tuple)) else ""
    return told


def official() -> tuple[Imported | None, str]:
    """Return the real flash_attn and its version; or None and the reason why it cannot be used here."""
    try:
        import flash_attn
    except Exception as error:  # noqa: BLE001  a broken installation raises anything
        return None, f"not importable ({type(error).__name__})"
    function = getattr(flash_attn, "flash_attn_func", None)
    if function is None or getattr(function, "__globals__", {}).get("__name__", "").startswith("flash_attn_compat"):
        return None, "flash_attn_compat has the name flash_attn"
    if not torch.cuda.is_available():
        return None, "installed, but there is no CUDA device"
    try:
        q = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.float16)
        function(q, q, q)
    except Exception as error:  # noqa: BLE001  an installation for other GPUs raises anything
        return None, f"installed, but does not run here ({str(error).splitlines()[0]})"
    return Imported(f"flash_attn {flash_attn.__version__}", flash_attn), str(flash_attn.__version__)
