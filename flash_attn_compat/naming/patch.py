"""patch(), unpatch(), patched(): one journal of undo steps behind a lock.

What is done is decided here; how each part is done and undone lies in the modules beside.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from flash_attn_compat.naming import finder, real, site_directory, transformers

_lock = threading.RLock()
_undo: ExitStack | None = None
_kept = False  # by patch(), until unpatch()
_contexts = 0  # patched() blocks that are open, in any thread


def patch() -> None:
    """Make `import flash_attn` find flash_attn_compat, here and in child processes started later.

    Under the name stand flash_attn and its submodules (the same module objects as flash_attn_compat's), the raw
    module flash_attn_2_cuda, and the metadata of a distribution flash-attn 2.8.3. transformers accepts
    attn_implementation="flash_attention_2" on every device, whether it was imported before or comes later.

    A real flash-attn that works on this GPU is left alone: nothing is replaced. One that cannot work here (wrong
    GPU, broken binary) runs on our functions from now on, functions imported from it before included.

    Calling it again does nothing. Threads may call it at the same time.
    """
    global _kept
    with _lock:
        _apply()
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
def patched() -> Iterator[None]:
    """patch() for the length of a block; blocks may nest and overlap, the last one out undoes."""
    global _contexts
    with _lock:
        _apply()
        _contexts += 1
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            _release()


def _apply() -> None:
    global _undo
    if _undo is not None:
        return
    with ExitStack() as undo:
        if _answer_to_the_name(undo):
            transformers.open_gates(undo)
        _undo = undo.pop_all()
    _forget_decisions()


def _release() -> None:
    global _undo
    if _kept or _contexts or _undo is None:
        return
    undo, _undo = _undo, None
    undo.close()
    _forget_decisions()


def _forget_decisions() -> None:
    """Whether an installed flash-attn may serve depends on whether it runs on our functions."""
    dispatch = sys.modules.get("flash_attn_compat.engine.dispatch")
    if dispatch is not None:
        dispatch.forget_decisions()


def _answer_to_the_name(undo: ExitStack) -> bool:
    """Returns False where a real flash-attn serves."""
    if site_directory.is_stand_in_spec(real.first_spec()):
        # Installed for good, or inherited from a patched parent: only what lies in sys.modules can be wrong.
        real.remember_modules(undo)
        if not finder.is_stand_in(sys.modules.get("flash_attn")):
            real.forget_modules()
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
    site_directory.put_on_path(undo, before=real.path_entry(found.location) if found else None)
    if finder.add_to_meta_path():
        undo.callback(finder.remove_from_meta_path)
    return True
