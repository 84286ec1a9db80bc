"""FlashAttention-4's name, where it is asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

import flash_attn_compat
from flash_attn_compat import fa4
from tests.dropin.environment import write_package

NAME = "flash_attn.cute"


@pytest.mark.parametrize("imported", [False, True])
def test_the_name_is_there_only_where_it_is_asked_for(imported: bool) -> None:
    flash_attn_compat.patch()
    if imported:
        importlib.import_module("flash_attn")
    assert importlib.util.find_spec(NAME) is None
    flash_attn_compat.patch(interfaces=("fa4",))
    assert importlib.import_module(NAME).flash_attn_func is fa4.flash_attn_func
    assert importlib.import_module(f"{NAME}.interface").flash_attn_varlen_func is fa4.flash_attn_varlen_func
    assert sorted(importlib.metadata.packages_distributions()["flash_attn"]) == ["flash-attn", "flash-attn-4"]
    assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    flash_attn_compat.unpatch()
    flash_attn_compat.patch()
    assert importlib.util.find_spec(NAME) is None
    flash_attn_compat.unpatch()


def test_an_installed_flash_attention_4_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, None, cute="answer = 4\n")
    info = tmp_path / "flash_attn_4-4.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with flash_attn_compat.patched(interfaces=("fa4",)):
        assert importlib.import_module(NAME).answer == 4


def test_the_early_copy_in_a_package_flash_attn_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 2.8.3 has one, and is no distribution flash-attn-4."""
    write_package(tmp_path, None, cute="answer = 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    flash_attn_compat.patch()
    assert importlib.import_module(NAME).answer == 4
    flash_attn_compat.patch(interfaces=("fa4",))
    assert importlib.import_module(NAME).flash_attn_func is fa4.flash_attn_func
    flash_attn_compat.unpatch()
