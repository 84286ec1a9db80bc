"""The files that compiled kernels are kept in: whole or not there, and never trusted further than checked."""

from __future__ import annotations

import os
import stat
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
def test_a_damaged_or_foreign_file_is_not_trusted(damage: str, kernels: Path) -> None:
    cache.write("name", b"payload" * 100)
    content = (kernels / "name").read_bytes()
    (kernels / "other").write_bytes(content)
    (kernels / "name").write_bytes(DAMAGES[damage](content))
    assert cache.read("name") is cache.read("other") is None


def test_what_was_written_is_read_and_what_was_damaged_is_written_again(kernels: Path) -> None:
    assert cache.read("name") is None
    assert cache.write("name", b"\0longer than what follows") and cache.read("name") == b"\0longer than what follows"
    (kernels / "name").write_bytes(b"nonsense")
    assert cache.write("name", b"payload") and cache.read("name") == b"payload"


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_keeps_nothing_and_is_read(kernels: Path) -> None:
    cache.write("name", b"payload")
    kernels.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert not cache.write("other", b"payload")
        assert cache.read("name") == b"payload" and cache.read("other") is None
    finally:
        kernels.chmod(stat.S_IRWXU)


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


def test_no_home_directory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FLASH_ATTN_COMPAT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert not cache.write("name", b"payload")
    assert cache.read("name") is None


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="XDG_CACHE_HOME is for others")
def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "flash_attn_compat"


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
