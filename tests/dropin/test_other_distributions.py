"""flash_attn as a namespace of several distributions: their submodules stay importable beside ours."""

from __future__ import annotations

import importlib
import sys

import pytest

import flash_attn_compat
from flash_attn_compat.dropin import patch
from flash_attn_compat.dropin.install import install, uninstall
from tests.dropin.environment import write_package
from tests.tools.interpreters import forked

# What FlashAttention 4's distribution may ship above flash_attn/cute: nothing, or flash-attn's own way to share.
TOPS = {"nothing": None, "a shared package": "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A directory of sys.path, before everything else."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


@pytest.mark.parametrize("top", TOPS.values(), ids=TOPS.keys())
def test_a_sub_package_of_another_distribution_is_importable_beside_ours(elsewhere, top):
    write_package(elsewhere, top, cute="answer = 4\n")
    patch()
    assert importlib.import_module("flash_attn.cute").answer == 4
    flash_attn = importlib.import_module("flash_attn")
    assert flash_attn.__version__ == "2.8.3" and flash_attn.flash_attn_func is flash_attn_compat.flash_attn_func
    assert importlib.import_module("flash_attn.bert_padding") is flash_attn_compat.bert_padding


def test_modules_we_lack_are_not_taken_from_a_broken_flash_attn(elsewhere):
    broken = "raise ImportError('built for another Python')\n"
    write_package(elsewhere, broken, flash_attn_interface="", flash_blocksparse_attention="")
    patch()
    assert importlib.import_module("flash_attn").flash_attn_func is flash_attn_compat.flash_attn_func
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.flash_blocksparse_attention")


def test_an_installation_shares_a_directory_with_another_distribution(tmp_path):
    write_package(tmp_path, None, cute="answer = 4\n")
    install(tmp_path)
    script = "import flash_attn, flash_attn.cute; print(flash_attn.__version__, flash_attn.cute.answer)"
    found = forked(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}")
    assert found.stdout.split() == ["2.8.3", "4"], found.stderr
    uninstall(tmp_path)
    kept = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")]
    assert kept == ["flash_attn/cute.py"]
