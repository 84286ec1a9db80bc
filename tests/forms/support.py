"""Helpers of several test files: backends that serve or record, comparisons, processes, other installations."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_attn_compat
from flash_attn_compat.backends import Backend
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.arguments import call_of
from flash_attn_compat.core.call import AttentionCall, Result
from flash_attn_compat.core.entry import Run
from flash_attn_compat.core.inputs import Inputs, Options
from flash_attn_compat.core.overlap import overlaps_itself
from flash_attn_compat.dispatch import call_cache, choice
from tests.tools.interpreters import REPOSITORY, WITHOUT_TORCH, Answer, forked, forked_group

GENERAL = ("reference", "chunked", "sdpa")  # the backends of any device
Serve = Callable[[str], Any]  # from a backend to a block in which it serves
# What a process prints that waits for PyTorch's import, to switch its attention on then.
WAITS = "import sys, _flash_attn_compat_startup as startup; print('torch' in startup._awaited)\n"
on_general_backends = pytest.mark.parametrize("backend", GENERAL)


def driver_stand_in(folder: Path) -> str:
    """The library that answers as the CUDA driver does without a GPU, compiled into ``folder``."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: the stand-in for the driver cannot be compiled")
    target, source = folder / "driver.so", Path(__file__).parents[1] / "kernels" / "driver.cpp"
    subprocess.run(["g++", "-std=c++17", "-O0", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return str(target)


def load_file(path: Path) -> ModuleType:
    """Return the module of a file that lies in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_threads(work: Callable[[], object], count: int) -> None:
    """Call ``work`` in ``count`` threads at once; an error in one is raised here."""
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work) for _ in range(count)]:
            done.result()


def on_backend(backend: str, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """The call on one backend; the test is skipped, with the backend's reasons, where that one does not serve it."""
    with flash_attn_compat.use_backend(backend):
        try:
            return fn(*args, **kwargs)
        except flash_attn_compat.BackendNotSupported as refusal:
            if backend in ("reference", "chunked"):
                raise
            pytest.skip(str(refusal).splitlines()[0])


class RecordingReference(Reference):
    """The reference backend, which records its calls."""

    def __init__(self) -> None:
        self.appended: list[Append | None] = []
        self.computed: list[AttentionCall] = []

    def prepare(self, x: Inputs, options: Options, length: int | None) -> Run:
        self.appended.append(call_of(x, options, length)[1])
        return super().prepare(x, options, length)

    def forward(self, call: AttentionCall) -> Result:
        self.computed.append(call)
        return super().forward(call)


def serve_by(patch: pytest.MonkeyPatch, *backends: Backend) -> None:
    """Replace the table of backends."""
    patch.setattr(choice, "BACKENDS", backends)
    patch.setattr(call_cache, "_current", call_cache.empty_tables())


def close(ours: Tensor, right: Tensor, magnitude: Tensor | float = 1.0, epsilons: float = 16) -> None:
    """Assert equality within some roundings of ``magnitude``, the size of the summed terms; infinities are equal."""
    assert ours.shape == right.shape
    atol = epsilons * torch.finfo(ours.dtype).eps * float(magnitude)
    torch.testing.assert_close(ours.double(), right.double(), rtol=epsilons * torch.finfo(ours.dtype).eps, atol=atol)


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Assert that answers differ by roundings at most, and that no answer overlaps itself."""
    for got, right in zip(found, expected, strict=True):
        close(got, right, right[right.isfinite()].abs().max(), epsilons=4)
        assert not overlaps_itself(got)


def in_group(function: Callable[..., object], *arguments: Any) -> None:
    """function(rank, *arguments) of a test module in each of two processes of a gloo group."""
    with tempfile.TemporaryDirectory() as folder:  # in a file: another process might take a port first
        forked_group(_member, function.__module__, function.__name__, f"file://{folder}/meeting", *arguments)


def _member(rank: int, module: str, name: str, meeting: str, *arguments: Any) -> NoReturn:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2"})
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    getattr(importlib.import_module(module), name)(rank, *arguments)
    dist.barrier()
    # Seen in PyTorch 2.4 and 2.6: the group's destructor, holding the GIL, waits for a thread that wants it
    # to free a tensor.
    dist.destroy_process_group()
    os._exit(0)


def check_refused_in_one_line(
    main: Callable[[list[str]], int], arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> str:
    """A command line that makes no sense: exit code 2 and one line on stderr with ``part`` in it; returns stdout."""
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse's way
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert part in printed.err and len(printed.err.splitlines()) == 1
    return printed.out


# ---------------------------------- stand-ins for other installations


def write_package(directory: Path, text: str | None, version: str | None = None, **modules: str) -> Path:
    """flash_attn/ with this __init__ (None: without one) and modules; metadata too if a version is given."""
    package = directory / "flash_attn"
    package.mkdir(parents=True)
    for name, content in (({} if text is None else {"__init__": text}) | modules).items():
        (package / f"{name}.py").write_text(content)
    if version is not None:
        info = directory / f"flash_attn-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {version}\n")
        (info / "top_level.txt").write_text("flash_attn\n")
    return package


class Environment:
    """A venv without packages of its own that sees this interpreter's and the repository."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=os.name != "nt")
        self.python = next(path for path in directory.glob("*/python*") if path.stem == "python")
        script = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site_packages = Path(self.call("-c", script).stdout.strip())
        outer = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
        (self.site_packages / "outer.pth").write_text("\n".join([REPOSITORY, *outer]) + "\n")
        self.clean = self.files()

    def call(self, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
        # Away from the repository, so that only the installation can answer.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(self.python), *arguments], capture_output=True, text=True, cwd=self.python.parent, env=env, **options
        )

    def forked(self, code: str) -> Answer:
        """As ``call("-c", code)`` in a copied interpreter, where PyTorch seems not to be imported yet."""
        start = f"import site; site.addsitedir({str(self.site_packages)!r})\n"
        return forked(f"{WITHOUT_TORCH}\n{start}{code}", **os.environ)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call("-m", "flash_attn_compat", *arguments)

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call("-m", "pip", "--disable-pip-version-check", *arguments)

    def files(self) -> set[str]:
        return {path.relative_to(self.site_packages).as_posix() for path in self.site_packages.rglob("*")}


def compare_quickly(implementation: str, folder: Path, cases: str = "", *more: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the rows, by case, of ``verify --quick`` on a CPU. more: options"""
    from verify.cli import main

    saved = folder / "rows.json"
    asked = ["--quick", "--device", "cpu", "--implementation", implementation, "-k", cases, "--json", str(saved)]
    code = main([*asked, *(more if "--isolate" in more else ("--no-isolate", *more))])
    return code, {row["case"]: row for row in json.loads(saved.read_text(encoding="utf-8"))["rows"]}
