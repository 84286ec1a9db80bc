"""A real flash-attn in this environment: import it, see whether it works here, else make it call our functions.

Imports nothing unless a real flash-attn is installed.
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
    find_real_spec,
    format_error,
    is_stand_in_spec,
    read_version,
)

_PACKAGES = ("flash_attn", EXTENSION)
RAW_FUNCTIONS = ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache")
_FIRST_VERSION_WITH_THESE_RAW_FUNCTIONS = (2, 7)
# The operators that flash-attn registers, named after its functions.
OPERATORS = ("_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward")


def find_real() -> RealFlashAttn | None:
    """Return the real flash-attn of this environment, and why it cannot serve, if so; None if there is none.

    To find out, it is imported and called with tiny tensors. If it does not work here, the import is undone.
    """
    spec = find_real_spec()
    if installed.swapped_package() is not None or spec is None:
        return installed.swapped_package()
    package = Path(spec.origin or "").parent
    distributions = importlib.metadata.distributions(name="flash-attn", path=[str(package.parent)])
    version = next((distribution.version for distribution in distributions), None)
    with ExitStack() as undo:
        real = RealFlashAttn(str(package), version, _find_fault(spec, undo))
        if real.usable:
            undo.pop_all()
    return real


def path_entry(spec: ModuleSpec | None) -> str | None:
    """Return the sys.path entry that leads to a package, or None."""
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent.resolve().parent
    return next((entry for entry in sys.path if Path(entry or os.curdir).resolve() == directory), None)


def remember_modules(undo: ExitStack) -> None:
    """Restore the present flash_attn modules of sys.modules, and remove later ones, when `undo` is closed."""
    saved = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _PACKAGES}

    def restore() -> None:
        forget_modules()
        sys.modules.update(saved)

    undo.callback(restore)


def forget_modules(*packages: str) -> None:
    """Remove the packages' modules from sys.modules, by default flash_attn's and the raw extension's."""
    for name in list(sys.modules):
        if name.partition(".")[0] in (packages or _PACKAGES):
            del sys.modules[name]


def swap_extension(real: RealFlashAttn, undo: ExitStack) -> bool:
    """Make the real flash-attn's Python code call our functions instead of its extension; return whether it works.

    Functions imported from it before do so too, since they look the extension up at each call. If flash-attn is older
    than 2.7, or a test call still fails, everything is undone.
    """
    if (read_version(real.location) or (0, 0)) < _FIRST_VERSION_WITH_THESE_RAW_FUNCTIONS:
        return False
    ours = importlib.import_module(f"flash_attn_compat.{EXTENSION}")
    with ExitStack() as attempt:
        remember_modules(attempt)
        loaded = sys.modules.setdefault(EXTENSION, ours)
        for name in RAW_FUNCTIONS if loaded is not ours else ():
            set_attribute(loaded, name, getattr(ours, name), attempt)
        try:
            package = _import_real(find_real_spec())
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


def _find_fault(spec: ModuleSpec, undo: ExitStack) -> str | None:
    """Import the real flash-attn and make a tiny call; return why it cannot serve here, or None."""
    if settings.is_on(settings.DISABLE_OFFICIAL):
        return f"{settings.DISABLE_OFFICIAL} is set"
    import torch

    remember_modules(undo)
    try:
        package = _import_real(spec)
    except Exception as error:  # noqa: BLE001  a broken installation raises anything
        return f"importing it raises {format_error(error)}"
    if not torch.cuda.is_available():
        return "it needs a CUDA device, and PyTorch sees none"
    forced = settings.forced_capability()
    if forced is not None and forced < (8, 0):
        return f"it needs compute capability 8.0, and {settings.CAPABILITY} says {forced[0]}.{forced[1]}"
    try:
        _try_a_call(package, f"cuda:{_local_device(torch.cuda.device_count())}")
    except Exception as error:  # noqa: BLE001  a build for other GPUs raises anything
        return f"calling it raises {format_error(error)}"
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
    """Return the GPU of this process by LOCAL_RANK, which launchers set: a call on another would occupy its memory."""
    rank = os.environ.get("LOCAL_RANK", "0")
    return int(rank) % count if rank.isdigit() else 0


def _add_kernels_off_cuda(interface: ModuleType) -> None:
    """Register kernels on CPU and MPS for the package's operators, which it registers for CUDA only.

    They stay registered after unpatch(): each call looks the extension up, as the package's own kernels do.
    """
    for name in OPERATORS:
        operator: Any = getattr(interface, name, None)
        if not hasattr(operator, "register_kernel"):
            continue
        for device in ("cpu", "mps"):
            if device not in getattr(operator, "_backend_fns", {}):
                operator.register_kernel(device)(operator._init_fn)
