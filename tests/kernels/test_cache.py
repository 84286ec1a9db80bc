"""The files that compiled kernels are kept in: whole or not there, and never trusted further than checked."""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from flash_attn_compat.backends.fused.building import kernel_files
from flash_attn_compat.backends.fused.judging import faults


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", str(tmp_path / "kernels"))
    kernel_files._warn.cache_clear()
    return tmp_path / "kernels"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-1],
    "bit": lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
    "magic": lambda content: b"X" + content[1:],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_written_entries_are_read_and_damaged_or_renamed_ones_are_not(damage: str, kernels: Path) -> None:
    assert kernel_files.read("name") is None
    assert kernel_files.write("name", b"payload" * 100) and kernel_files.read("name") == b"payload" * 100
    content = (kernels / "name").read_bytes()
    (kernels / "other").write_bytes(content)
    (kernels / "name").write_bytes(DAMAGES[damage](content))
    assert kernel_files.read("name") is kernel_files.read("other") is None
    assert kernel_files.write("name", b"shorter") and kernel_files.read("name") == b"shorter"


def test_the_first_written_entry_stays(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_files.write_if_absent("answer", b"first") == b"first"
    assert kernel_files.write_if_absent("answer", b"second") == b"first" == kernel_files.read("answer")
    assert not kernel_files.write("answer", b"third", only_first=True) and kernel_files.read("answer") == b"first"
    assert len(list(kernels.iterdir())) == 1, "nothing is left beside it"
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", "/dev/null")
    assert kernel_files.write_if_absent("answer", b"mine") == b"mine"


def test_a_write_that_fails_leaves_nothing_behind(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError

    kernel_files.write("name", b"before")
    monkeypatch.setattr(os, "replace", refuse)
    assert not kernel_files.write("name", b"after")
    assert kernel_files.read("name") == b"before" and [path.name for path in kernels.iterdir()] == ["name"]


has_owners = pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners here")


@pytest.fixture
def owned_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make every opened file belong to that user."""
    fstat = os.fstat

    def found(handle: int, uid: int) -> os.stat_result:
        fields = list(fstat(handle))
        fields[stat.ST_UID] = uid
        return os.stat_result(fields)

    return lambda uid: monkeypatch.setattr(os, "fstat", lambda handle: found(handle, uid))


@has_owners
@pytest.mark.parametrize(
    ("owner", "mode", "said"),
    [
        ("this user", 0o600, None),
        ("this user", 0o644, None),
        ("root", 0o644, None),
        ("another user", 0o644, "belong to another user .uid 4242."),
        ("another user", 0o600, "belong to another user"),
        ("this user", 0o664, "others may write them"),
        ("this user", 0o646, "others may write them"),
        ("root", 0o666, "others may write them"),
    ],
)
def test_entries_writable_by_others_are_ignored_with_one_warning_unless_trusted(
    owner: str, mode: int, said: str | None, owned_by: Callable[[int], None], kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("name", "other"):
        kernel_files.write(name, b"payload")
        (kernels / name).chmod(mode)
    owned_by({"this user": os.getuid(), "root": 0, "another user": 4242}[owner])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = [kernel_files.read(name) for name in ("name", "other", "name")]
    assert found == [None if said else b"payload"] * 3 and len(warned) == bool(said)
    for warning in warned:
        assert re.search(said or "", str(warning.message)) and "FLASH_ATTN_COMPAT_TRUST_CACHE=1" in str(warning.message)
    monkeypatch.setenv("FLASH_ATTN_COMPAT_TRUST_CACHE", "1")
    assert kernel_files.read("name") == b"payload"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("trusts", ["0", "1"])
def test_a_named_pipe_is_neither_waited_for_nor_read_and_a_kernel_takes_its_place(
    trusts: str, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer in a shared folder could otherwise stop every process that looks for a kernel."""
    monkeypatch.setenv("FLASH_ATTN_COMPAT_TRUST_CACHE", trusts)
    kernels.mkdir()
    os.mkfifo(kernels / "name")
    found: list[bytes | None] = []
    with pytest.warns(RuntimeWarning, match="they are no regular files"):
        reader = threading.Thread(target=lambda: found.append(kernel_files.read("name")), daemon=True)
        reader.start()
        reader.join(300)
    assert found == [None]
    assert kernel_files.write("name", b"payload") and kernel_files.read("name") == b"payload"


@has_owners
def test_an_unreadable_entry_warns_once_and_a_missing_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_files.read("name") is None
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.warns(RuntimeWarning, match="you may not read them"):
        assert kernel_files.read("name") is kernel_files.read("name") is None


@has_owners
def test_a_folder_that_was_chosen_can_be_shared_and_files_are_their_owners_to_write(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        kernel_files.write("name", b"payload")
        monkeypatch.delenv("FLASH_ATTN_COMPAT_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        own = kernel_files.folder()
        kernel_files.write("name", b"payload")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kernels, own)] == [0o755, 0o700]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (*kernels.iterdir(), *own.iterdir())] == [0o644] * 2


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="XDG_CACHE_HOME is for others")
def test_the_default_folder_is_the_users_cache_and_to_have_none_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FLASH_ATTN_COMPAT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert kernel_files.folder() == Path("/somewhere/flash_attn_compat")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert not kernel_files.write("name", b"payload") and kernel_files.read("name") is None
    told = "there is no home directory: set FLASH_ATTN_COMPAT_CACHE to a folder"
    assert (
        kernel_files.describe_folder() == f"no folder: {told}"
        and kernel_files.write_error() == f"kernels cannot be kept: {told}"
    )


def test_whether_files_can_be_kept_is_known_before_one_is_and_leaves_nothing(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel_files.write_error() is None and list(kernels.iterdir()) == []
    (kernels / "file").touch()
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", str(kernels / "file"))
    assert (kernel_files.write_error() or "").startswith(f"{kernels / 'file'} cannot be written: ")


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="XDG_CACHE_HOME does not count here")
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("first", ["a kernel", "a mark", "a look"])
def test_new_folders_are_the_users_alone_whatever_the_umask_and_the_first_file(
    first: str, umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    before = os.umask(umask)
    try:
        if first == "a kernel":
            kernel_files.write("name", b"payload")
        elif first == "a look":
            kernel_files.write_error()
        with faults.watch_trial("tried-abc", "forward", lambda: None):
            pass
    finally:
        os.umask(before)
    folders = [tmp_path / "new", *(path for path in (tmp_path / "new").rglob("*") if path.is_dir())]
    assert [path.name for path in folders] == ["new", "cache", "flash_attn_compat", "trials"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


@pytest.mark.parametrize("size", [2**29, 2**40])
def test_a_file_of_absurd_size_is_none_and_is_replaced(size: int, kernels: Path) -> None:
    kernel_files.write("name", b"payload")
    try:
        os.truncate(kernels / "name", size)  # without contents: it takes no room
    except OSError:
        pytest.skip("the file system has no files of this size")
    assert kernel_files.read("name") is None
    assert kernel_files.write("name", b"payload") and kernel_files.read("name") == b"payload"


def test_concurrent_writers_leave_one_complete_file() -> None:
    payloads = [bytes([index]) * 100_000 for index in (1, 2)]

    def write_often(payload: bytes) -> None:
        for _ in range(60):
            kernel_files.write("name", payload)

    writers = [threading.Thread(target=write_often, args=(payload,)) for payload in payloads]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert kernel_files.read("name") in (None, *payloads)
    assert kernel_files.read("name") in payloads
