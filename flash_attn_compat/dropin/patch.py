"""patch(), unpatch(), patched(): one journal of undo steps behind a lock.

This module decides what is done; those beside it do and undo each part.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import PathFinder
from typing import Literal

from flash_attn_compat import installed, settings
from flash_attn_compat.dropin import finder, installed_package, mirror, optional, site_directory, transformers
from flash_attn_compat.dropin.undo import set_item

# Whether PyTorch's attention operators run on our kernels: on GPUs before 8.0, or on newer ones too.
SdpaWish = bool | Literal["always"]

# Of other packages than flash_attn, that can be asked for.
INTERFACES = ("fa3",)

_lock = threading.RLock()
_undo: ExitStack | None = None
_holders: set[object] = set()  # patch until unpatch(), and each open block of patched(), in any thread
_api = ""  # the interface in force


def patch(
    api: str | None = None,
    *,
    hub_kernels: bool = False,
    varlen_attn: bool = False,
    sdpa: SdpaWish = False,
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
    to our functions too (`dropin.hub_kernels.NAMES`); so does FLASH_ATTN_COMPAT_HUB_KERNELS=1.
    interfaces: ("fa3",) lets `import flash_attn_interface`, FlashAttention-3's name, find `flash_attn_compat.fa3`,
    unless a module of that name is there; children inherit it.
    varlen_attn: torch.nn.attention.varlen runs on CPUs and GPUs before sm80; so does FLASH_ATTN_COMPAT_VARLEN_ATTN=1.
    sdpa: F.scaled_dot_product_attention, and the operators under it, run on our kernels on GPUs before sm80; "always":
        on newer ones too, where ours go first. FLASH_ATTN_COMPAT_SDPA says the same as 1 or always.

    Calling it again adds what is newly asked for and changes nothing else; another api raises RuntimeError. Threads
    may call it at the same time.
    """
    _apply(patch, api, hub_kernels, varlen_attn, sdpa, interfaces)


def unpatch() -> None:
    """Undo patch(): sys.modules, sys.meta_path, sys.path, PYTHONPATH and transformers are as they were before.

    Functions that were imported meanwhile keep working. Inside a patched() block the effect comes at its end.
    """
    _let_go(patch)


@contextmanager
def patched(
    api: str | None = None,
    *,
    hub_kernels: bool = False,
    varlen_attn: bool = False,
    sdpa: SdpaWish = False,
    interfaces: Sequence[str] = (),
) -> Iterator[None]:
    """patch(...) for the length of a block; blocks may nest and overlap, and the last one to end undoes it."""
    block = object()
    _apply(block, api, hub_kernels, varlen_attn, sdpa, interfaces)
    try:
        yield
    finally:
        _let_go(block)


def warn_of_xformers(api: str | None) -> None:
    """It refuses the version that goes with the interface of 2.6, in its own words and at its import."""
    if api == "2.6" and PathFinder.find_spec("xformers") is not None:
        warnings.warn(
            "xformers is installed here and cannot be imported beside the interface of 2.6: its version 0.0.35 accepts "
            "flash-attn 2.7.1 to 2.8.4. If your code needs the old unpad_input alone, stay with 2.8 and give it that "
            "function: see docs/monkeypatching.md",
            stacklevel=4,
        )


def _apply(
    holder: object, api: str | None, hub_kernels: bool, varlen_attn: bool, sdpa: SdpaWish, interfaces: Sequence[str]
) -> None:
    global _undo, _api
    if api is not None and api not in settings.APIS:
        raise ValueError(f"api must be {' or '.join(settings.APIS)}, got {api!r}")
    if set(interfaces) - set(INTERFACES) or isinstance(interfaces, str):
        raise ValueError(f"interfaces must be a sequence of names among {', '.join(INTERFACES)}, got {interfaces!r}")
    if sdpa not in (False, True, "always"):
        raise ValueError(f'sdpa must be False, True or "always", got {sdpa!r}')
    wanted: dict[str, bool | str | None]
    wanted = {settings.HUB_KERNELS: hub_kernels, settings.VARLEN_ATTN: varlen_attn, settings.SDPA: sdpa}
    with _lock, ExitStack() as added:
        if _undo is not None and api not in (None, _api):
            raise RuntimeError(f"patched already with the interface of {_api}: unpatch() first")
        if _undo is None:
            chosen = settings.api() if api is None else api
            warn_of_xformers(chosen)
            if api is not None:
                set_item(os.environ, settings.API, api, added)
            if _take_the_name(added, chosen):
                transformers.allow_flash_attention_2(added)
            wanted = {variable: asked or optional.EXTRAS[variable].asked() for variable, asked in wanted.items()}
            _api = chosen or "2.8"
        optional.switch_on(wanted, added)
        if "fa3" in interfaces:
            optional.redirect_fa3(added)
        if _undo is None:
            _undo = ExitStack()
            _forget_decisions()
        _undo.push(added.pop_all())
        _holders.add(holder)


def _let_go(holder: object) -> None:
    """Undo everything once nobody holds it."""
    global _undo
    with _lock:
        _holders.discard(holder)
        if _holders or _undo is None:
            return
        undo, _undo = _undo, None
        undo.close()
        _forget_decisions()


def _forget_decisions() -> None:
    """Whether an installed flash-attn may compute calls depends on whether it runs on our functions."""
    memory = sys.modules.get("flash_attn_compat.dispatch.call_cache")
    if memory is not None:
        memory.forget()


def _take_the_name(undo: ExitStack, api: str | None) -> bool:
    """Let the name lead to us; False where a real flash-attn keeps it."""
    first = installed.first_spec()
    is_ours = installed.is_stand_in_spec(first)
    if not is_ours and api != "2.6":  # whatever a real one is good for, it has not the interface of 2.6
        found = installed_package.find_real()
        if found is not None and found.usable:
            return False
        if found is not None and installed_package.swap_extension(found, undo):
            site_directory.add_to_pythonpath(undo, site_directory.entries(None))
            return True
    installed_package.remember_modules(undo)
    mirror.remember_names(undo)
    if not finder.is_stand_in(sys.modules.get("flash_attn")) or api not in (None, finder.stand_in_api()):
        installed_package.forget_modules()
        mirror.take_names_back()
    if is_ours and api is None:
        return True  # installed for good, or inherited from a patched parent: what the path leads to is right
    replaced = first if is_ours else installed.real_spec()
    site_directory.put_on_path(undo, site_directory.entries(api), installed_package.path_entry(replaced))
    if not is_ours and finder.add_to_meta_path():
        undo.callback(finder.remove_from_meta_path)
    return True
