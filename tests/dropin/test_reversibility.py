"""patch() and unpatch() leave the process as they found it, however often and from wherever they are called."""

from __future__ import annotations

import importlib
import os
import sys
import types
from contextlib import ExitStack
from functools import partial

import pytest

from flash_attn_compat.dropin import patch, patched, undo, unpatch
from flash_attn_compat.installed import SITE
from tests.dropin.conftest import state
from tests.forms.support import in_threads


def use_the_name() -> None:
    for name in ("flash_attn", "flash_attn.layers.rotary", "flash_attn_2_cuda"):
        importlib.import_module(name)


@pytest.mark.parametrize("pythonpath", [None, "", "/somewhere", f"/somewhere{os.pathsep}"])
@pytest.mark.parametrize("options", [{}, {"api": "2.6"}, {"interfaces": ("fa3", "fa4")}], ids=str)
def test_unpatch_restores_paths_finders_environment_and_modules_and_patch_can_follow(monkeypatch, pythonpath, options):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if pythonpath is not None:
        monkeypatch.setenv("PYTHONPATH", pythonpath)
    before = state()
    patch(**options)
    once = state()
    assert all(one != other for one, other in zip(once[:3], before))
    theirs = pythonpath.split(os.pathsep) if pythonpath else []  # "" among them is the current directory
    entries = os.environ["PYTHONPATH"].split(os.pathsep)
    assert entries[len(entries) - len(theirs) :] == theirs  # behind ours
    patch()
    assert state() == once
    use_the_name()
    for _ in range(2):
        unpatch()
        assert state() == before
    patch()
    use_the_name()
    unpatch()
    assert state() == before


def test_nested_blocks_undo_at_the_outermost_end_and_when_they_raise():
    before = state()
    with pytest.raises(KeyError), patched():
        with patched():
            use_the_name()
        importlib.import_module("flash_attn")
        raise KeyError
    assert state() == before
    patch()
    with patched():
        pass
    importlib.import_module("flash_attn")  # a block leaves an explicit patch standing


def test_unpatch_keeps_path_entries_of_others(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a")
    monkeypatch.setattr(sys, "path", list(sys.path))
    patch()
    os.environ["PYTHONPATH"] += os.pathsep + "/b"
    sys.path.append("/others")
    unpatch()
    assert os.environ["PYTHONPATH"] == os.pathsep.join(["/a", "/b"])
    assert sys.path[-1] == "/others" and SITE not in sys.path


@pytest.mark.parametrize("left", [None, types.ModuleType("flash_attn")], ids=["none", "a bare stub"])
def test_modules_of_others_are_replaced_and_restored(monkeypatch, left):
    monkeypatch.setitem(sys.modules, "flash_attn", left)
    patch()
    assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    unpatch()
    assert "flash_attn" in sys.modules and sys.modules["flash_attn"] is left


def test_all_who_wait_for_a_module_get_it_and_closing_takes_back_what_they_did(tmp_path, monkeypatch):
    (tmp_path / "awaited.py").write_text("told = ''\n")
    monkeypatch.syspath_prepend(tmp_path)

    def tell(module: types.ModuleType, stack: ExitStack, word: str) -> None:
        undo.set_attribute(module, "told", module.told + word, stack)

    with ExitStack() as stack:
        for word in ("first", "second"):
            undo.when_imported({"awaited": partial(tell, word=word)}, stack)
        moved = stack.pop_all()  # as patch() keeps it
    awaited = importlib.import_module("awaited")
    assert awaited.told == "firstsecond"
    moved.close()
    assert awaited.told == ""
    del sys.modules["awaited"]


def test_threads_that_patch_and_unpatch_at_once_leave_nothing():
    before = state()

    def work() -> None:
        for _ in range(10):
            with patched():
                use_the_name()

    in_threads(work, 8)
    assert state() == before
