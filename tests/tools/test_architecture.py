"""What holds of the whole repository: layers of imports, lengths of files, and other platforms."""

from __future__ import annotations

import ast
import ctypes
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flash_attn_compat import cli
from flash_attn_compat.backends.fused.building import kernel_files, nvrtc
from tests.tools import interpreters

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "flash_attn_compat"
COMMANDS = ("progress", "output_path", "isolation", "card", "gpu_state", "self_check", "doctor", "tune", "cli")
# Bottom to top. A name stands for its submodules too, unless they are named themselves; "" is the package itself.
LAYERS = (
    ("settings", "installed", "bert_padding", "held"),
    ("core",),  # values and arithmetic
    (
        "backends.base",
        "backends.varlen",
        "backends.scores",
        "backends.compilation",
        "backends.alibi",
        "backends.unwritten",
    ),
    ("backends.fused.choosing",),
    ("backends.fused.building",),
    ("backends.fused.tuning",),
    ("backends.fused.launching",),
    ("backends.reference",),
    ("backends.fused.judging",),
    ("backends",),
    ("dispatch.pytorch",),
    ("dispatch",),
    ("private_interface", "kvcache", "flash_attn_2_cuda"),  # of which none knows another
    ("flash_attn_interface",),
    ("api_2_6", "fa3", "fa4", "flash_attn_triton", "layers", "losses", "modules", "ops", "utils"),
    ("torch_sdpa", "torch_flex", "vllm"),
    ("dropin",),
    ("", *COMMANDS, "__main__"),
)
LAYER_OF = {name: number for number, layer in enumerate(LAYERS) for name in layer}
# Stand-ins that other interpreters find; their imports are those of a client.
SITES = (
    "dropin.site.",
    "dropin.site_start.",
    "dropin.site_2_6.",
    "dropin.site_fa3.",
    "dropin.site_fa4.",
    "dropin.hub_flash_attn2.",
    "dropin.hub_flash_attn3.",
)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {name: path for path in PACKAGE.rglob("*.py") if not (name := module_name(path)).startswith(SITES)}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


@functools.cache
def imported(path: Path) -> set[str]:
    """The package's modules that a file imports, within functions too."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if inside(name) in MODULES}
            found |= modules if modules == names else modules | {node.module}
    return {name for name in map(inside, found) if name in MODULES}


def inside(name: str) -> str | None:
    return name.removeprefix("flash_attn_compat").removeprefix(".") if name.startswith("flash_attn_compat") else None


def layer(module: str) -> int:
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    known = [name for name in names if name in LAYER_OF]
    assert known, f"{module} has no layer: add {parts[0]!r} to LAYERS in tests/tools/test_architecture.py"
    return LAYER_OF[known[0]]


def test_nothing_imports_upwards() -> None:
    arrows = [(module, name) for module, path in MODULES.items() for name in imported(path)]
    assert arrows and not [(module, name) for module, name in arrows if layer(name) > layer(module)]


def test_a_module_without_a_layer_is_named_with_the_table_that_lacks_it() -> None:
    with pytest.raises(AssertionError, match=r"foo\.bar has no layer: add 'foo' to LAYERS in tests"):
        layer("foo.bar")


def test_no_door_of_the_functions_leads_through_another() -> None:
    doors = {"private_interface", "kvcache", "flash_attn_2_cuda"}
    assert not [door for door in doors if doors & imported(MODULES[door])]


def test_nothing_imports_in_a_circle() -> None:
    # A package and its own submodules are one room: whoever imports the one runs the other.
    graph = {
        name: {other for other in imported(path) if not is_package_of(other, name)} for name, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_the_package_does_not_import_verify_which_a_wheel_has_in_it() -> None:
    for path in MODULES.values():
        nodes = nodes_of(path)
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not {name for name in names if "verify" in name.split(".")}, path


def is_package_of(package: str, module: str) -> bool:
    return package == "" or module.startswith(f"{package}.")


def test_a_backend_never_looks_at_another_one() -> None:
    """But for the reference, the judge of kernels before their first call."""
    from flash_attn_compat.backends import BACKENDS

    homes = {type(backend).__module__.removeprefix("flash_attn_compat.") for backend in BACKENDS}
    for module, path in MODULES.items():
        home = next((home for home in homes if module == home or module.startswith(f"{home}.")), None)
        if home is not None:
            others = homes - {home, "backends.reference"}
            assert not [name for name in imported(path) if any(f"{name}.".startswith(f"{other}.") for other in others)]


def test_no_source_file_is_longer_than_500_lines() -> None:
    root = PACKAGE.parent
    files = [
        path for folder in ("flash_attn_compat", "verify", "benchmarks", "tests") for path in (root / folder).rglob("*")
    ]
    sources = [path for path in files if path.suffix in {".py", ".cu", ".cuh"}]
    assert sources and not [path.name for path in sources if path.read_bytes().count(b"\n") > 500]


def public_types(path: Path) -> set[str]:
    """The classes and aliases of types that a file defines at its top, without private ones."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name) and is_type_name(target.id)}
    return {name for name in found if not name.startswith("_")}


def is_type_name(name: str) -> bool:
    return name[0].isupper() and not name.isupper()


@pytest.mark.parametrize(
    ("head", "most", "folders"),
    [("core and dispatch", 18, ("core.", "dispatch.")), ("`backends/fused`", 15, ("backends.fused.",))],
)
def test_a_table_of_notions_names_every_type_of_its_folders(head: str, most: int, folders: tuple[str, ...]) -> None:
    table = (PACKAGE.parent / "ARCHITECTURE.md").read_text().partition(f"| notion of {head} |")[2]
    _, _, *rows = table.partition("\n\n")[0].splitlines()
    assert 10 < len(rows) <= most
    modules = {name: path for name, path in MODULES.items() if name.startswith(folders)}
    types = {
        name
        for module, path in modules.items()
        if not module.startswith("core.flex.")  # a language of its own: docs/flex.md
        for name in public_types(path)
    }
    named = "\n".join(row.split("|")[1] + row.split("|")[2] for row in rows)
    assert types and not {name for name in types if f"`{name}`" not in named}


@pytest.mark.parametrize("folder", ["core", "dispatch", "backends/fused", "cuda"])
def test_a_folder_of_the_core_dispatch_and_kernels_has_at_most_15_files(folder: str) -> None:
    files = [path for path in (PACKAGE / folder).rglob("*") if path.suffix in {".py", ".cu", ".cuh"}]
    assert files and max(Counter(path.parent for path in files).values()) <= 15


# ---------------------------------------------------------------- Windows and macOS

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
