"""Whose answers are judged: our backends, anything given by import path, the real flash-attn as second opinion."""

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

from .call import Call, accepted
from .errors import NotSupported, UsageError

PUBLIC_FUNCTIONS = [name for name in flash_attn_compat.__all__ if name.startswith("flash_attn_")]


@dataclass(frozen=True)
class Backend:
    """One of the package's backends, forced."""

    name: str

    @property
    def approximate(self) -> bool:
        """Whether its exp and tanh may be as approximate as flash-attn's."""
        return self.name == "official"

    @contextmanager
    def serving(self, call: Call) -> Iterator[Callable[..., Any]]:
        """The function that answers the call; NotSupported where there is none."""
        with flash_attn_compat.use_backend(self.name):
            try:
                yield getattr(flash_attn_interface, call.fn)
            except flash_attn_compat.BackendNotSupported as refusal:
                reason = self._reason(refusal)
                if reason.startswith("failed before: "):  # as its trial has found on this GPU
                    raise RuntimeError(reason) from refusal
                raise NotSupported(reason) from refusal

    def flash_attn_func(self, *args: Any, **kwargs: Any) -> Any:
        with flash_attn_compat.use_backend(self.name):
            return flash_attn_compat.flash_attn_func(*args, **kwargs)

    def calls_served(self) -> int | None:
        """How many calls it has answered itself so far, None where nobody counts."""
        return flash_attn_compat.backend_counts().get(self.name, 0)

    def _reason(self, refusal: Exception) -> str:
        """The first of this backend's reasons: the message has a line "name  reason; reason" for each backend."""
        mine = re.search(rf"^ *{self.name} +([^;\n]+)", str(refusal), re.MULTILINE)
        return mine[1] if mine else str(refusal).partition("\n")[0]


@dataclass(frozen=True)
class Imported:
    """A module-like object with some of the public functions, or a single function standing for flash_attn_func."""

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
            if not declines(error):
                raise
            raise NotSupported((str(error).splitlines() or [type(error).__name__])[0]) from error

    def calls_served(self) -> int | None:
        return None


Implementation = Backend | Imported

DECLINES = "NotImplementedError, or an error that says what is not supported, or what alone is"


def declines(error: Exception) -> bool:
    """Whether an error says that this case is not for this kernel. What a device says of itself does not count."""
    if isinstance(error, NotImplementedError):
        return True
    text = str(error).lower()
    ours = not re.search(r"(cuda|hip|triton) error|_status_", text)
    return ours and ("support" in text or "not implemented" in text)


def backends(names: list[str]) -> list[Backend]:
    """The named backends, or all of them in order of preference."""
    known = [backend.name for backend in BACKENDS]
    for name in names:
        if name not in known:
            raise UsageError(f"unknown backend {name!r}; choose from {', '.join(known)}")
    return [Backend(name) for name in names or known]


def imported(path: str) -> Imported:
    """The implementation at `module`, `module:attribute`, `FILE.py` or `FILE.py:attribute`."""
    file = re.fullmatch(r"(.*\.py)(?::(.*))?", path)
    module_name, attribute = (file[1], file[2] or "") if file else path.partition(":")[::2]
    try:
        target: Any = _of_file(Path(module_name)) if file else importlib.import_module(_here(module_name))
    except Exception as error:
        raise UsageError(f"cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    for part in filter(None, attribute.split(".")):
        if not hasattr(target, part):
            raise UsageError(f"module {module_name!r} has no {attribute!r}")
        target = getattr(target, part)
    if not callable(target) and not any(hasattr(target, name) for name in PUBLIC_FUNCTIONS):
        raise UsageError(f"{path!r} is not a function and has none of {', '.join(PUBLIC_FUNCTIONS)}")
    if callable(target) and not isinstance(target, type) and not _takes_attention(target):
        raise UsageError(f"{path!r} is not an attention function: it does not make a tensor of q, k and v")
    return Imported(path, target)


def _of_file(path: Path) -> ModuleType:
    """The module that a file holds. What lies beside it can be imported, as from a script, while the file is loaded;
    afterwards behind all libraries, lest one that is loaded later is taken from there.
    """
    spec = importlib.util.spec_from_file_location(f"judged_{path.stem}", path.resolve(strict=True))
    assert spec is not None and spec.loader is not None  # it ends in .py
    folder = str(path.resolve().parent)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)
    return module


def _here(name: str) -> str:
    """verify's own kernels have the names that they have in a clone, in a wheel too."""
    return name.replace("verify", __package__, 1) if name in ("verify.planted", "verify.steps") else name


def _takes_attention(target: Callable[..., Any]) -> bool:
    """Whether it can be called with q, k, v at all; what it makes of them is what verify is about."""
    q = torch.zeros(1, 2, 1, 8)
    for arguments, named in (((q, q, q), {}), ((), {"q": q, "k": q, "v": q})):
        try:
            out = target(*arguments, **named)
        except TypeError:
            continue
        except Exception:  # noqa: BLE001  it is one, and fails: the report will say how
            return True
        return isinstance(out, (torch.Tensor, tuple))
    return False


def official() -> tuple[Imported | None, str]:
    """The real flash_attn if it is installed and works here, and a word on why not or which."""
    try:
        import flash_attn
    except Exception as error:  # noqa: BLE001  a broken installation raises anything
        return None, f"not importable ({type(error).__name__})"
    function = getattr(flash_attn, "flash_attn_func", None)
    if function is None or getattr(function, "__globals__", {}).get("__name__", "").startswith("flash_attn_compat"):
        return None, "the name flash_attn is answered by flash_attn_compat"
    if not torch.cuda.is_available():
        return None, "installed, but there is no CUDA device"
    try:
        q = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.float16)
        function(q, q, q)
    except Exception as error:  # noqa: BLE001  so does one for other GPUs
        return None, f"installed, but does not run here ({str(error).splitlines()[0]})"
    return Imported(f"flash_attn {flash_attn.__version__}", flash_attn), str(flash_attn.__version__)
