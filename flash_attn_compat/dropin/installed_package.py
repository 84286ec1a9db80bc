"""A real flash-attn in this environment: importing it, judging whether it works here, swapping its extension.

Imports nothing unless a real flash-attn is there to be judged.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from flash_attn_compat import installed, settings
from flash_attn_compat.dropin.undo import set_attribute
from flash_attn_compat.installed import (
    EXTENSION,
    RealFlashAttn,
    error_line,
    is_stand_in_spec,
    real_spec,
    stated_version,
)

_PACKAGES = ("flash_attn", EXTENSION)
RAW_FUNCTIONS = ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache")
_FIRST_VERSION_WITH_THESE_RAW_FUNCTIONS = (2, 7)
# That flash-attn registers, named after its functions.
OPERATORS = ("_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward")


def find_real() -> RealFlashAttn | None:
    """The real flash-attn of this environment, imported and tried with a tiny call; None where there is none.

    One that cannot serve is imported no longer afterwards.
    """
    spec = real_spec()
    if installed.swapped() is not None or spec is None:
        return installed.swapped()
    package = Path(spec.origin or "").parent
    found = importlib.metadata.distributions(name="flash-attn", path=[str(package.parent)])
    version = next((distribution.version for distribution in found), None)
    with ExitStack() as undo:
        real = RealFlashAttn(str(package), version, _reason_against(spec, undo))
        if real.usable:
            undo.pop_all()
    return real


def path_entry(spec: ModuleSpec | None) -> str | None:
    """The sys.path entry through which a package is found."""
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent.resolve().parent
    return next((entry for entry in sys.path if Path(entry or os.curdir).resolve() == directory), None)


def remember_modules(undo: ExitStack) -> None:
    """When `undo` is closed, sys.modules holds the flash_attn modules of now, and no other."""
    saved = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _PACKAGES}

    def restore() -> None:
        forget_modules()
        sys.modules.update(saved)

    undo.callback(restore)


def forget_modules(*packages: str) -> None:
    """Those of the packages, by default all that `remember_modules` remembers."""
    for name in list(sys.modules):
        if name.partition(".")[0] in (packages or _PACKAGES):
            del sys.modules[name]


def swap_extension(real: RealFlashAttn, undo: ExitStack) -> bool:
    """Let the real Python package run on our raw functions, also through functions imported from it before.

    Its wrappers look the extension up when they are called. Returns False, with everything put back, where that
    does not help: versions before 2.7, a package that fails for other reasons, functions that refuse by themselves.
    """
    if (stated_version(real.location) or (0, 0)) < _FIRST_VERSION_WITH_THESE_RAW_FUNCTIONS:
        return False
    ours = importlib.import_module(f"flash_attn_compat.{EXTENSION}")
    with ExitStack() as attempt:
        remember_modules(attempt)
        _replace_raw_functions(ours, attempt)
        try:
            package = _import_real(real_spec())
            interface = importlib.import_module("flash_attn.flash_attn_interface")
            if not hasattr(interface, "flash_attn_gpu"):
                return False
            set_attribute(interface, "flash_attn_gpu", ours, attempt)
            _add_kernels_off_cuda(interface)
            installed.set_swapped(real)
            attempt.callback(installed.set_swapped, None)
            _try_a_call(package, "cpu")
        except Exception:  # noqa: BLE001  a broken installation raises anything
            return False
        undo.push(attempt.pop_all())
    return True


def _reason_against(spec: ModuleSpec, undo: ExitStack) -> str | None:
    if settings.is_on(settings.DISABLE_OFFICIAL):
        return f"{settings.DISABLE_OFFICIAL} is set"
    import torch

    remember_modules(undo)
    try:
        package = _import_real(spec)
    except Exception as error:  # noqa: BLE001  a broken installation raises anything
        return f"importing it raises {error_line(error)}"
    if not torch.cuda.is_available():
        return "it needs a CUDA device, and PyTorch sees none"
    forced = settings.forced_capability()
    if forced is not None and forced < (8, 0):
        return f"it needs compute capability 8.0, and {settings.CAPABILITY} says {forced[0]}.{forced[1]}"
    try:
        _try_a_call(package, f"cuda:{_local_device(torch.cuda.device_count())}")
    except Exception as error:  # noqa: BLE001  so does one for other GPUs
        return f"calling it raises {error_line(error)}"
    return None


def _import_real(spec: ModuleSpec | None) -> ModuleType:
    loaded = sys.modules.get("flash_attn")
    if loaded is not None and getattr(loaded, "__spec__", None) and not is_stand_in_spec(loaded.__spec__):
        return loaded
    if spec is None or spec.loader is None:
        raise ImportError("flash_attn cannot be found")
    forget_modules("flash_attn")
    module = module_from_spec(spec)
    sys.modules["flash_attn"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop("flash_attn", None)
        raise
    return module


def _try_a_call(module: Any, device: str) -> None:
    import torch

    q = torch.zeros(1, 8, 1, 32, dtype=torch.float16, device=device)
    out = module.flash_attn_func(q, q, q)
    if out.shape != q.shape or bool(out.isnan().any()):
        raise RuntimeError("flash_attn_func gives a wrong answer for zeros")


def _local_device(count: int) -> int:
    """The GPU that a launcher gives to this process, so that no other one gets a context."""
    rank = os.environ.get("LOCAL_RANK", "0")
    return int(rank) % count if rank.isdigit() else 0


def _replace_raw_functions(ours: ModuleType, undo: ExitStack) -> None:
    loaded = sys.modules.get(EXTENSION)
    if loaded is None:
        sys.modules[EXTENSION] = ours
        return
    for name in RAW_FUNCTIONS:
        set_attribute(loaded, name, getattr(ours, name), undo)


def _add_kernels_off_cuda(interface: ModuleType) -> None:
    """Kernels for operators that the package registers for CUDA alone.

    They stay: what they call later is whatever extension is in place then.
    """
    for name in OPERATORS:
        operator: Any = getattr(interface, name, None)
        if not hasattr(operator, "register_kernel"):
            continue
        for device in ("cpu", "mps"):
            if device not in getattr(operator, "_backend_fns", {}):
                operator.register_kernel(device)(operator._init_fn)
