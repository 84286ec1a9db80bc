"""Windows and macOS, as far as can be told from elsewhere: imports, and names of libraries, folders and processes."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flash_attn_compat import cli
from flash_attn_compat.backends.fused.building import kernel_files, nvrtc
from tests.tools import interpreters

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("flash_attn_compat", "verify", "benchmarks", "tests", "examples", ".ci")
SOURCES = sorted(path for folder in FOLDERS for path in ROOT.joinpath(folder).rglob("*.py"))
POSIX_ONLY = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def imported_at_once(parent: ast.AST) -> Iterator[str]:
    """Yield the modules that importing a file imports, without imports inside functions."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.expr)):
            yield from imported_at_once(node)


def test_no_file_imports_modules_missing_on_windows_at_once() -> None:
    may_import = re.compile(rf"(import|from)\s.*\b({'|'.join(POSIX_ONLY)})\b".encode())
    for path, text in ((path, path.read_bytes()) for path in SOURCES):
        names = imported_at_once(ast.parse(text)) if may_import.search(text) else ()
        found = POSIX_ONLY & {name.partition(".")[0] for name in names}
        assert not found, f"{path.relative_to(ROOT)}: import {found} where it is used"


def test_every_text_file_is_read_and_written_in_utf_8() -> None:
    """Windows would take the code page of the machine."""
    for path in (path for path in SOURCES if path.is_relative_to(ROOT / "flash_attn_compat")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"open\(|_text\(", text) else ():
            if isinstance(node, ast.Call) and names_a_text_file(node):
                assert "encoding" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"


def names_a_text_file(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "write_text"):
        owner = ast.unparse(call.func.value)
        return "distribution" not in owner  # importlib.metadata's takes no encoding
    modes = [value for argument in call.args[1:2] if (value := getattr(argument, "value", ""))]
    return isinstance(call.func, ast.Name) and call.func.id == "open" and not any("b" in mode for mode in modes)


# ---- names of libraries


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the requested libraries; none of them exists."""
    asked: list[str] = []

    def refuse(name: str) -> None:
        asked.append(name)
        raise OSError(f"no {name}")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    return asked


@pytest.mark.parametrize(
    ("platform", "name"), [("win32", "nvcuda.dll"), ("linux", "libcuda.so.1"), ("darwin", "libcuda.so.1")]
)
def test_the_driver_has_the_name_of_the_platform(
    platform: str, name: str, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "sys", SimpleNamespace(platform=platform))
    with pytest.raises(nvrtc.KernelError, match=name):
        nvrtc.driver.__wrapped__()
    assert opened == [name]


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Windows machine without any NVRTC; the folder holds torch, the wheels' nvidia, and a toolkit.

    Its name has brackets, which mean something else in a pattern.
    """
    tmp_path = tmp_path / "[old] env"
    monkeypatch.setattr(nvrtc, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    wheels = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: wheels)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("major", "place"),
    [
        ("12", "torch/lib/nvrtc64_120_0.dll"),
        ("11", "torch/lib/nvrtc64_112_0.dll"),
        ("12", "nvidia/cuda_nvrtc/bin/nvrtc64_120_0.dll"),
        ("13", "nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll"),
        ("12", "toolkit/bin/nvrtc64_120_0.dll"),
        ("13", "toolkit/bin/x64/nvrtc64_130_0.dll"),
    ],
)
def test_on_windows_nvrtc_is_found_beside_torch_in_wheels_and_in_a_toolkit(
    major: str, place: str, windows: Path
) -> None:
    there = windows / place
    there.parent.mkdir(parents=True)
    for name in (there.name, there.name.replace(".dll", ".alt.dll"), "nvrtc-builtins64_129.dll", "nvrtc64_100_0.dll"):
        (there.parent / name).touch()
    assert [Path(path) for path in nvrtc.library_paths(major)] == [there, Path(there.name)]


def test_on_windows_the_builtins_are_loaded_before_nvrtc_which_asks_for_them_by_name(
    windows: Path, opened: list[str]
) -> None:
    folder = windows / "torch" / "lib"
    folder.mkdir(parents=True)
    names = [str(folder / name) for name in ("nvrtc-builtins64_129.dll", "nvrtc64_120_0.dll")]
    for name in names:
        Path(name).touch()
    with pytest.raises(OSError, match="nvrtc64_120_0"):
        nvrtc.open_library(names[1])
    assert opened == names


# ---- folders and processes


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("win32", "local/flash_attn_compat"), ("darwin", "home/Library/Caches/flash_attn_compat")],
)
def test_kernels_are_kept_where_the_platform_keeps_caches(
    platform: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CACHE", raising=False)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(kernel_files, "sys", SimpleNamespace(platform=platform))
    assert kernel_files.folder() == tmp_path / expected


def test_cached_files_are_used_on_systems_without_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", str(tmp_path))
    assert kernel_files.write("name", b"payload")
    (tmp_path / "name").chmod(0o666)
    monkeypatch.delattr(os, "getuid", raising=False)
    assert kernel_files.read("name") == b"payload"


def test_on_windows_run_waits_for_the_script_and_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, to become another program leaves the shell without one to wait for."""
    called: list[list[str]] = []
    monkeypatch.setattr(cli, "os", SimpleNamespace(name="nt"))
    monkeypatch.setattr(cli, "patch", lambda *given, **wishes: None)
    monkeypatch.setattr(subprocess, "call", lambda command: called.append(command) or 3)
    with pytest.raises(SystemExit) as stop:
        cli.run(["job.py", "--flag"])
    assert stop.value.code == 3 and called == [[sys.executable, "job.py", "--flag"]]


def test_tests_start_new_interpreters_where_none_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "CAN_FORK", False)
    answers = interpreters.forked_each(["print('one')", "raise SystemExit(3)"])
    assert [(answer.returncode, answer.stdout) for answer in answers] == [(0, "one\n"), (3, "")]
