"""Runs the CUDA kernels on CPU tensors: g++ compiles their very sources together with emulator.h.

>>> kernel = compile_kernel("forward.cu", "forward", {"D": 64, "LOCAL": 1})
>>> kernel.launch(params, grid=4, threads=128, shared_bytes=16384, tensors=(q, k, v, out, lse))
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

import flash_attn_compat
from flash_attn_compat.backends.fused.building.nvrtc import GENERATED
from flash_attn_compat.backends.fused.choosing.variants import DEFAULTS
from tests.kernels.offline import SHARED_MEMORY

HERE = Path(__file__).parent
SOURCES = Path(flash_attn_compat.__file__).parent / "cuda"
ENGINE = HERE / "engine.cpp"
# Compiling a variant takes longer than running it: no optimisation, C's headers without C++'s, and no library but the
# engine's, which is compiled once and has what the variants lack.
# No contraction: a * b + c is rounded twice where the source says so; fmaf is fmaf.
OPTIONS = (
    "-std=c++17",
    "-nostdinc++",
    "-ffp-contract=off",
    "-w",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-exceptions",
    "-fno-asynchronous-unwind-tables",
)
ENGINE_OPTIONS = (*OPTIONS, "-O2", "-shared", "-nodefaultlibs")
VARIANT_OPTIONS = (*OPTIONS, "-O0", "-shared", "-nostdlib")
LIBRARIES = ("-lc", "-lm", "-lgcc")

# What the engine knows of its launch is the process's, and other threads go on while it runs.
_ONE_AT_A_TIME = threading.Lock()

Macros = Mapping[str, int]


class EmulationError(Exception):
    """An action of a kernel that a GPU may punish, with its block and thread."""


def skip_reason() -> str:
    """Why kernels cannot be emulated here; empty where they can."""
    if sys.platform != "linux":
        return "kernels are emulated on Linux only: the options of g++ and what it links are Linux's"
    return "" if shutil.which("g++") else "g++ is not installed: the kernels cannot be compiled for the CPU"


class _Memory(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("end", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in (
            *("params_bytes", "blocks", "threads", "shared_bytes", "shared_limit", "memory_count", "seed"),
            *("is_truncating", "rows_overlap", "conflicts"),
        )
    )


_Mods = ctypes.c_void_p * 6  # struct Mods of emulator.h


class Rules(NamedTuple):
    """How a launch goes.

    seed: orders blocks and warps; number: of the architecture, which says how much shared memory there is
    truncates: whether tensor cores cut sums, as Turing's do, or round each of them
    rows_overlap: whether blocks may write different things in one place, as lengths make them that are no lengths
    """

    seed: int = 1
    number: int = 90
    truncates: bool = False
    rows_overlap: bool = False


@dataclass(frozen=True)
class Kernel:
    """One entry of a compiled source. mods: the library of a caller's functions"""

    library: ctypes.CDLL
    entry: str
    mods: ctypes.CDLL | None = None

    def launch(
        self,
        params: bytes,
        grid: int,
        threads: int,
        shared_bytes: int,
        tensors: Sequence[Tensor],
        rules: Rules = Rules(),  # noqa: B008  # immutable
    ) -> int:
        """Runs all blocks; conflicts of shared memory's banks. Memory outside of ``tensors`` is an error."""
        memories = (_Memory * len(tensors))(*map(_memory, tensors))
        entry = ctypes.cast(getattr(self.library, self.entry), ctypes.c_void_p)
        shared = shared_bytes, SHARED_MEMORY[rules.number]
        launch = _Launch(
            len(params), grid, threads, *shared, len(tensors), rules.seed, rules.truncates, rules.rows_overlap
        )
        emulate = _engine().emulate
        emulate.restype = ctypes.c_char_p
        with _ONE_AT_A_TIME:
            if self.mods:
                _Mods.in_dll(self.library, "emulated_mods")[:] = _Mods.in_dll(self.mods, "emulated_mods")[:]
            said = emulate(entry, ctypes.c_char_p(params), ctypes.byref(launch), memories)
        if said:
            raise EmulationError(f"{self.entry}: {said.decode()}")
        return int(launch.conflicts)


def _memory(x: Tensor) -> _Memory:
    """From a tensor's first element to its last."""
    if x.device.type != "cpu":
        raise EmulationError(f"a tensor on {x.device} has no memory that a kernel could reach")
    start = x.data_ptr()
    if x.numel() == 0:
        return _Memory(start, start)
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return _Memory(start, start + (last + 1) * x.element_size())


def compile_kernel(source: str | Path, entry: str, macros: Macros, text: str = "") -> Kernel:
    """``source``: a file of the package's kernels, or a path; text: the header flex_mods.cuh

    A text is compiled once, and a kernel once for all texts.
    """
    # How many blocks a GPU may hold at once decides nothing here.
    values = {**DEFAULTS, **macros, "MIN_BLOCKS": 1}
    if not text:
        return Kernel(_library(SOURCES / source, _defined(values)), entry)
    sums = re.search(r"FLEX_SUMS = (\d+);", text)
    mods = _library(HERE / "mods.cu", _defined({**DEFAULTS, "FLEX": 1, "FLEX_GRADIENTS": sums is not None}), text)
    if sums:
        values["EMULATED_SUMS"] = int(sums[1])
    return Kernel(_library(SOURCES / source, _defined(values)), entry, mods)


def _defined(macros: Macros) -> tuple[str, ...]:
    return tuple(sorted(f"-D{name}={int(value)}" for name, value in macros.items()))


@cache
def _library(source: Path, macros: tuple[str, ...], text: str = "") -> ctypes.CDLL:
    _engine()
    generated = (f"-I{_generated(text)}",) if text else ()
    return ctypes.CDLL(str(_built(source, (*VARIANT_OPTIONS, *macros, *generated, "-include", "emulator.h"))))


def _generated(text: str) -> Path:
    """Return a folder, named after its content, with the generated header."""
    folder = _cache_folder() / f"generated_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    folder.mkdir(exist_ok=True)
    unfinished = folder / f"{GENERATED}.{os.getpid()}.{threading.get_ident()}"
    unfinished.write_text(text)
    unfinished.replace(folder / GENERATED)
    return folder


@cache
def _engine() -> ctypes.CDLL:
    return ctypes.CDLL(str(_built(ENGINE, ENGINE_OPTIONS, "-x", "none", *LIBRARIES)), ctypes.RTLD_GLOBAL)


def _built(source: Path, options: tuple[str, ...], *linked: str) -> Path:
    """Return the compiled library of a source, from the cache; concurrent processes compile it once."""
    import fcntl  # Windows has none

    folder = _cache_folder()
    target = folder / f"{built_name(source, options)}.so"
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            folders = (f"-I{folder}" for folder in _folders(source))
            _compile(["g++", *options, *folders, "-x", "c++", str(source), *linked], target)
    return target


def _cache_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"flash_attn_compat_emulated_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _folders(source: Path) -> tuple[Path, Path, Path]:
    """Where headers are looked for: of a copy of the sources, its own come before the package's."""
    return HERE, source.parent, SOURCES


def built_name(source: Path, options: tuple[str, ...]) -> str:
    """Return a name that depends on every byte of the sources, not on their folder."""
    headers = [(folder, file) for folder in _folders(source) for file in sorted(folder.rglob("*.*h"))]
    files = dict.fromkeys((file.name, file.read_bytes()) for file in (source, ENGINE))
    files |= dict.fromkeys((file.relative_to(folder).as_posix(), file.read_bytes()) for folder, file in headers)
    sizes = [(name, len(content)) for name, content in files]
    compiled = hashlib.sha256(repr((options, ENGINE_OPTIONS, LIBRARIES, compiler_version(), sizes)).encode())
    for _, content in files:
        compiled.update(content)
    return f"{source.stem}_{compiled.hexdigest()[:24]}"


def _compile(command: list[str], target: Path) -> None:
    """Compile into a temporary file and move it into place, so that no file there is incomplete."""
    unfinished = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    unfinished.replace(target)


@cache
def compiler_version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout
