"""patch(), unpatch(), patched(): one journal of undo steps behind a lock.

This module decides what is done; those beside it do and undo each part.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec

from flash_attn_compat import installed, settings
from flash_attn_compat.naming import fa3, finder, real, site_directory, transformers
from flash_attn_compat.naming.hub_kernels import answer as answer_hub_names
from flash_attn_compat.naming.varlen_attn import serve as serve_varlen_attn

# Of other packages than flash_attn, that can be asked for.
INTERFACES = ("fa3",)

_lock = threading.RLock()
_undo: ExitStack | None = None
_kept = False  # by patch(), until unpatch()
_contexts = 0  # patched() blocks that are open, in any thread
_api: str | None = None  # asked for by whoever patched first
_extras: set[str] = set()  # in force, by their variables


def patch(
    api: str | None = None,
    *,
    hub_kernels: bool = False,
    varlen_attn: bool = False,
    interfaces: Sequence[str] = (),
) -> None:
    """Make `import flash_attn` find flash_attn_compat, here and in child processes started later.

    The name covers flash_attn and its submodules (the same module objects as flash_attn_compat's), the raw
    module flash_attn_2_cuda, and the metadata of a distribution flash-attn 2.8.3. transformers accepts
    attn_implementation="flash_attention_2" on every device, whether it was imported before or comes later.

    A real flash-attn that works on this GPU is left alone: nothing is replaced. One that cannot work here (wrong
    GPU, broken binary) runs on our functions from now on, functions imported from it before included.

    api: "2.6" gives the interface of flash-attn 2.6.3 instead, for code written before 2.7: unpad_input returns four
    values, private functions take and return what they did, the version is 2.6.3, and a real flash-attn is put
    aside. By default FLASH_ATTN_COMPAT_API decides, else it is "2.8". Children inherit it.

    hub_kernels: transformers' names for flash kernels on its hub, to which it sends models with attention sinks, lead
    to our functions too (`naming.hub_kernels.NAMES`); so does FLASH_ATTN_COMPAT_HUB_KERNELS=1.
    interfaces: ("fa3",) lets `import flash_attn_interface`, FlashAttention-3's name, find `flash_attn_compat.fa3`,
    unless a module of that name is there; children inherit it.
    varlen_attn: torch.nn.attention.varlen runs on CPUs and GPUs before sm80; so does FLASH_ATTN_COMPAT_VARLEN_ATTN=1.

    Calling it again adds what is newly asked for and changes nothing else; another api raises RuntimeError. Threads
    may call it at the same time.
    """
    global _kept
    with _lock:
        _apply(api, hub_kernels, varlen_attn, interfaces)
        _kept = True


def unpatch() -> None:
    """Undo patch(): sys.modules, sys.meta_path, sys.path, PYTHONPATH and transformers are as they were before.

    Functions that were imported meanwhile keep working. Inside a patched() block the effect comes at its end.
    """
    global _kept
    with _lock:
        _kept = False
        _release()


@contextmanager
def patched(
    api: str | None = None,
    *,
    hub_kernels: bool = False,
    varlen_attn: bool = False,
    interfaces: Sequence[str] = (),
) -> Iterator[None]:
    """patch(...) for the length of a block; blocks may nest and overlap, and the last one to end undoes it."""
    global _contexts
    with _lock:
        _apply(api, hub_kernels, varlen_attn, interfaces)
        _contexts += 1
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            _release()


def _apply(api: str | None, hub_kernels: bool, varlen_attn: bool, interfaces: Sequence[str]) -> None:
    global _undo, _api
    if api is not None and api not in settings.APIS:
        raise ValueError(f"api must be {' or '.join(settings.APIS)}, got {api!r}")
    if set(interfaces) - set(INTERFACES) or isinstance(interfaces, str):
        raise ValueError(f"interfaces must be a sequence of names among {', '.join(INTERFACES)}, got {interfaces!r}")
    chosen = settings.api() if api is None else api
    if _undo is not None:
        if api is not None and api != (_api or "2.8"):
            raise RuntimeError(f"patched already with the interface of {_api or '2.8'}: unpatch() first")
        with ExitStack() as added:
            _add_extras(hub_kernels, varlen_attn, added)
            _add_interfaces(interfaces, added)
            _undo.push(added.pop_all())
        return
    with ExitStack() as undo:
        if api is not None:
            _set_variable(settings.API, api, undo)
        if _answer_to_the_name(undo, chosen):
            transformers.open_gates(undo)
        _extras.clear()
        _add_extras(hub_kernels or settings.hub_kernels(), varlen_attn or settings.varlen_attn(), undo)
        _add_interfaces(interfaces, undo)
        _undo = undo.pop_all()
    _api = chosen
    _forget_decisions()


def _add_extras(wants_hub_kernels: bool, wants_varlen_attn: bool, undo: ExitStack) -> None:
    """What has to be asked for, unless it is there already; the variables tell children."""
    extras = {settings.HUB_KERNELS: (wants_hub_kernels, answer_hub_names)}
    extras[settings.VARLEN_ATTN] = (wants_varlen_attn, serve_varlen_attn)
    for variable, (wanted, apply) in extras.items():
        if wanted and variable not in _extras:
            _set_variable(variable, "1", undo)
            apply(undo)
            _extras.add(variable)


def _add_interfaces(interfaces: Sequence[str], undo: ExitStack) -> None:
    if "fa3" in interfaces:
        fa3.answer(undo)


def _release() -> None:
    global _undo
    if _kept or _contexts or _undo is None:
        return
    undo, _undo = _undo, None
    undo.close()
    _forget_decisions()


def _forget_decisions() -> None:
    """Whether an installed flash-attn may serve depends on whether it runs on our functions."""
    dispatch = sys.modules.get("flash_attn_compat.serving.dispatch")
    if dispatch is not None:
        dispatch.forget_decisions()


def _set_variable(name: str, value: str, undo: ExitStack) -> None:
    before = os.environ.get(name)
    os.environ[name] = value
    if before is None:
        undo.callback(os.environ.pop, name, None)
    else:
        undo.callback(os.environ.__setitem__, name, before)


def _answer_to_the_name(undo: ExitStack, api: str | None) -> bool:
    """Returns False where a real flash-attn serves."""
    spec = installed.first_spec()
    if installed.is_stand_in_spec(spec):
        # Installed for good, or inherited from a patched parent: only what lies in sys.modules can be wrong, and
        # the interface.
        real.remember_modules(undo)
        loaded = sys.modules.get("flash_attn")
        if api is not None:
            site_directory.put_on_path(undo, _entry_of(spec), api)
        if not finder.is_stand_in(loaded) or (api is not None and finder.served_api() != api):
            real.forget_modules()
        return True
    if api == "2.6":
        # Whatever a real one is good for, it is not this interface.
        real.remember_modules(undo)
        real.forget_modules()
        site_directory.put_on_path(undo, _entry_of(installed.real_spec()), api)
        if finder.add_to_meta_path():
            undo.callback(finder.remove_from_meta_path)
        return True
    found = real.judge_real(undo)
    if found is not None and found.usable:
        undo.pop_all()
        return False
    if found is not None and real.swap_extension(found, undo):
        site_directory.put_in_pythonpath(undo)
        return True
    real.remember_modules(undo)
    real.forget_modules()
    site_directory.put_on_path(undo, real.path_entry(found.location) if found else None)
    if finder.add_to_meta_path():
        undo.callback(finder.remove_from_meta_path)
    return True


def _entry_of(spec: ModuleSpec | None) -> str | None:
    """The sys.path entry through which a package is found."""
    return None if spec is None or spec.origin is None else real.path_entry(os.path.dirname(spec.origin))
