"""The files that compiled kernels are kept in: whole or not there, and never trusted further than checked."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flash_attn_compat.backends.fused import cache


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-1],
    "bit": lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
    "magic": lambda content: b"X" + content[1:],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_written_is_read_and_what_was_damaged_or_renamed_is_not(damage: str, kernels: Path) -> None:
    assert cache.read("name") is None
    assert cache.write("name", b"payload" * 100) and cache.read("name") == b"payload" * 100
    content = (kernels / "name").read_bytes()
    (kernels / "other").write_bytes(content)
    (kernels / "name").write_bytes(DAMAGES[damage](content))
    assert cache.read("name") is cache.read("other") is None
    assert cache.write("name", b"shorter") and cache.read("name") == b"shorter"


def test_a_write_that_fails_leaves_nothing_behind(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError

    cache.write("name", b"before")
    monkeypatch.setattr(os, "replace", refuse)
    assert not cache.write("name", b"after")
    assert cache.read("name") == b"before" and [path.name for path in kernels.iterdir()] == ["name"]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners here")
def test_another_users_file_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write("name", b"payload")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert cache.read("name") is None or owner == 0


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="XDG_CACHE_HOME is for others")
def test_the_default_folder_is_the_users_cache_and_to_have_none_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FLASH_ATTN_COMPAT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder() == Path("/somewhere/flash_attn_compat")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert not cache.write("name", b"payload") and cache.read("name") is None


def test_writers_at_once_leave_one_whole_file() -> None:
    payloads = [bytes([index]) * 100_000 for index in (1, 2)]

    def write_often(payload: bytes) -> None:
        for _ in range(60):
            cache.write("name", payload)

    writers = [threading.Thread(target=write_often, args=(payload,)) for payload in payloads]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert cache.read("name") in (None, *payloads)
    assert cache.read("name") in payloads
