"""Compile kernels by NVRTC, and load and launch them by the CUDA driver; both libraries are called through ctypes.

NVRTC comes with every CUDA build of PyTorch; no compiler has to be installed. Compiled kernels are kept on disk
(kernel_files.py). Importing this module has no effects.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from ctypes import byref, c_char_p
from pathlib import Path
from typing import NamedTuple

import torch

from flash_attn_compat import settings
from flash_attn_compat.backends.base import CallRefused, KernelsFailed
from flash_attn_compat.backends.fused.building import kernel_files
from flash_attn_compat.backends.fused.choosing.variants import DEFAULTS, Variant
from flash_attn_compat.core import cuda_capture

SOURCES = Path(__file__).resolve().parents[3] / "cuda"
# Each compilation gets all headers, by their paths in SOURCES. GENERATED is the header with the ``text`` of a variant.
HEADERS = tuple(sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cuh")))
GENERATED = "flex_mods.cuh"
_INVALID_CONTEXT, _RELAXED = 201, 2
_MAX_DYNAMIC_SHARED, _STATIC_LIMIT = 8, 48 * 1024
_CARVEOUT, _MOST_SHARED, _SHARED_OF_MULTIPROCESSOR = 9, 100, 81
_NOT_NVRTC = re.compile(r"builtins|\.alt\.")  # in names of other libraries that begin like NVRTC's


class KernelError(KernelsFailed):
    """A kernel cannot be compiled, loaded or launched, or computes wrong numbers."""


class TooManyBlocks(KernelError, CallRefused):
    """A call needs more blocks than a launch can have. The kernel has no defect."""


class ContextLost(RuntimeError):
    """A kernel, of this package or another, has broken this process's CUDA context: nothing can run on the GPU."""


# CUresults after which every call in the context fails: a memory error, a launch timeout, an illegal instruction, ...
_STICKY_ERRORS = frozenset({214, 700, 702, 710, 714, 715, 716, 717, 718, 719})


class Compiler:
    """The loaded NVRTC. version: (major, minor); architectures: compute capabilities that it supports, such as 75."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(byref(major), byref(minor)))
        self._check(library.nvrtcGetNumSupportedArchs(byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(library.nvrtcGetSupportedArchs(numbers))
        self.version = major.value, minor.value
        self.architectures = tuple(sorted(numbers))

    def compile(self, name: str, options: tuple[str, ...], text: str = "") -> bytes:
        """Compile cuda/``name``; return a cubin for architecture sm_XY, PTX for compute_XY. Raises KernelError.

        text: the content of the header GENERATED
        """
        program, library = ctypes.c_void_p(), self._library
        names, texts = (*HEADERS, GENERATED), (*map(read_source, HEADERS), text)
        headers = len(names), _c_strings(texts), _c_strings(names)
        self._check(library.nvrtcCreateProgram(byref(program), read_source(name).encode(), name.encode(), *headers))
        try:
            if library.nvrtcCompileProgram(program, len(options), _c_strings(options)):
                log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise KernelError(
                    f"NVRTC {self.version[0]}.{self.version[1]} refuses {name} {' '.join(options)}:\n{log}"
                )
            is_binary = any("=sm_" in option for option in options)
            return self._text(program, "CUBIN" if is_binary else "PTX")
        finally:
            library.nvrtcDestroyProgram(byref(program))

    def _text(self, program: ctypes.c_void_p, kind: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{kind}Size")(program, byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{kind}")(program, text))
        return text.raw

    def _check(self, code: int) -> None:
        if code:
            self._library.nvrtcGetErrorString.restype = c_char_p
            raise KernelError(f"NVRTC: {self._library.nvrtcGetErrorString(code).decode()}")


_pointer = functools.cache(ctypes.c_void_p)  # a cached one takes a third of the time


def _c_strings(strings: Iterable[str]) -> ctypes.Array[c_char_p]:
    encoded = [string.encode() for string in strings]
    return (c_char_p * len(encoded))(*encoded)


class Kernel(NamedTuple):
    """A loaded function with its threads per block and dynamic shared memory in bytes."""

    handle: ctypes.c_void_p
    threads: int
    shared: int


class Driver:
    """Loads and launches kernels through the CUDA driver, in each GPU's primary context, which PyTorch uses, too."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        # No argtypes are set, which saves a microsecond per launch: ctypes then passes Python ints as C ints, as the
        # grid's sizes need, and addresses must be c_void_p.
        self._launch = library.cuLaunchKernel
        self._contexts: dict[int, ctypes.c_void_p] = {}
        version = ctypes.c_int()
        self.check(library.cuDriverGetVersion(byref(version)))
        self.version = version.value // 1000, version.value % 1000 // 10

    def check(self, code: int) -> None:
        """Raise ContextLost for a sticky error, KernelError for any other error."""
        if code in _STICKY_ERRORS:
            raise ContextLost(
                f"{self._describe_error(code)}: a kernel, of this package or another, has broken this process's use of "
                "the GPU. Start the program again, with CUDA_LAUNCH_BLOCKING=1 to learn which kernel it was, or with "
                f"{settings.FUSED}=0 to do without this package's own"
            )
        if code:
            raise KernelError(self._describe_error(code))

    def sticky_error(self, device: int) -> str | None:
        """Wait for PyTorch's current stream; return the error that broke the context for good, or None."""
        try:
            with self.context(device):
                code = self.library.cuStreamSynchronize(_pointer(stream(device)))
        except ContextLost as error:
            return str(error)
        return self._describe_error(code) if code in _STICKY_ERRORS else None

    def _describe_error(self, code: int) -> str:
        name, text = c_char_p(), c_char_p()
        self.library.cuGetErrorName(code, byref(name))
        self.library.cuGetErrorString(code, byref(text))
        return f"CUDA driver: {(name.value or b'').decode()} ({(text.value or b'').decode()})"

    def load(self, variant: Variant, code: bytes, device: int) -> Kernel:
        module, function, mode = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
        most = self.attribute(device, _SHARED_OF_MULTIPROCESSOR)
        with self.context(device):
            # In relaxed mode, loading a module does not disturb a graph that this thread may be capturing.
            self.check(self.library.cuThreadExchangeStreamCaptureMode(byref(mode)))
            try:
                self.check(self.library.cuModuleLoadData(byref(module), code))
                self.check(self.library.cuModuleGetFunction(byref(function), module, variant.entry.encode()))
                if variant.shared > _STATIC_LIMIT:
                    self.check(self.library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, variant.shared))
                # Ask for the most shared memory. By default Turing may keep 32 of 64 KB for its L1 cache, and then only
                # one of two blocks fits.
                if 2 * variant.shared * dict(variant.macros).get("MIN_BLOCKS", 1) > most:
                    self.check(self.library.cuFuncSetAttribute(function, _CARVEOUT, _MOST_SHARED))
            finally:
                self.check(self.library.cuThreadExchangeStreamCaptureMode(byref(mode)))
        return Kernel(function, variant.threads, variant.shared)

    def attribute(self, device: int, number: int) -> int:
        """Return an attribute of a GPU by its number in CUdevice_attribute."""
        ordinal, value = ctypes.c_int(), ctypes.c_int()
        self.check(self.library.cuDeviceGet(byref(ordinal), device))
        self.check(self.library.cuDeviceGetAttribute(byref(value), number, ordinal))
        return value.value

    def launch(self, kernel: Kernel, blocks: int, device: int, argument: bytes) -> None:
        """Launch on PyTorch's current stream of ``device``, which need not be current. argument: struct Params."""
        handle, threads, shared = kernel
        parameters = byref(c_char_p(argument))  # the driver copies them
        arguments = handle, blocks, 1, 1, threads, 1, 1, shared, _pointer(stream(device)), parameters, None
        if device != cuda_capture.current_device():
            with self.context(device):
                code = self._launch(*arguments)
        else:
            code = self._launch(*arguments)
            if code == _INVALID_CONTEXT:  # a new thread, in which PyTorch has not made a context current yet
                self.check(self.library.cuCtxSetCurrent(self._primary_context(device)))
                code = self._launch(*arguments)
        if code:
            self.check(code)

    @contextlib.contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Make the primary context of ``device`` current inside; restore the thread's context afterwards."""
        self.check(self.library.cuCtxPushCurrent_v2(self._primary_context(device)))
        try:
            yield
        finally:
            self.check(self.library.cuCtxPopCurrent_v2(byref(ctypes.c_void_p())))

    def _primary_context(self, device: int) -> ctypes.c_void_p:
        """Return the primary context, retained until the process ends: kernels are loaded into it."""
        context = self._contexts.get(device)
        if context is None:
            context, ordinal = ctypes.c_void_p(), ctypes.c_int()
            # The driver counts devices as PyTorch does: CUDA_VISIBLE_DEVICES hides devices from both.
            self.check(self.library.cuDeviceGet(byref(ordinal), device))
            self.check(self.library.cuDevicePrimaryCtxRetain(byref(context), ordinal))
            self._contexts[device] = context
        return context


# Returns the handle of PyTorch's current stream of a device. Builds of PyTorch without CUDA lack it.
stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def device_name(device: int) -> str:
    return torch.cuda.get_device_name(device)


def real_capability(device: int) -> tuple[int, int]:
    """Return the GPU's compute capability, even where the settings force another one."""
    return settings.device_capability(torch.device("cuda", device))


def target_number(device: int) -> int:
    """Return the number of the architecture that kernels are compiled for, such as 75 or 90."""
    return int(target(device).partition("_")[2])


def target(device: int) -> str:
    """Return the architecture that variants are compiled for, in NVRTC's spelling.

    It is the GPU's own (sm_XY) if NVRTC supports that. Otherwise, or if settings force a lower one, it is PTX
    (compute_XY).
    """
    real, forced = real_capability(device), settings.forced_capability()
    if forced is not None and forced < (8, 0) <= real:
        return "compute_75"
    number, known = real[0] * 10 + real[1], compiler().architectures
    if number in known:
        return f"sm_{number}"
    older = [one for one in known if one < number]
    if not older:
        raise KernelError(f"this NVRTC compiles for {known[0]} and newer, the GPU is {number}")
    return f"compute_{older[-1]}"


_locks: dict[tuple[Variant, str, int], threading.Lock] = {}
_kernels: dict[tuple[Variant, str, int], Kernel | KernelError] = {}


def _key(variant: Variant, device: int) -> tuple[Variant, str, int]:
    return variant, target(device), device


def kernel(variant: Variant, device: int) -> Kernel:
    """Return the kernel ``variant`` loaded on ``device``. After a KernelError, each later call raises the same one."""
    key = _key(variant, device)
    with _locks.setdefault(key, threading.Lock()):
        loaded = _kernels.get(key)
        if loaded is None:
            loaded = _load_or_error(*key)
            if isinstance(loaded, KernelError) and cuda_capture.is_capturing(device):
                raise RuntimeError(
                    f"the {variant.entry} kernel of this call could not be loaded while a CUDA graph is captured: "
                    f"make the same call once before the capture ({first_line(loaded)})"
                )
            _kernels[key] = loaded
    if isinstance(loaded, KernelError):
        raise KernelError(str(loaded))
    return loaded


def load_all(variants: Iterable[Variant], device: int) -> None:
    """Load kernels in parallel, because compiling one takes a second. Errors are raised later, by ``kernel``."""
    missing = [variant for variant in variants if _key(variant, device) not in _kernels]
    if len(missing) > 1:
        for thread in load_ahead(missing, device):
            thread.join()


def load_ahead(variants: Iterable[Variant], device: int) -> list[threading.Thread]:
    """Start threads that load kernels, and return without waiting. ``kernel`` waits for them, and raises errors."""
    started: list[threading.Thread] = []
    if cuda_capture.is_capturing(device):  # a new thread could not tell that this one captures
        return started
    for variant in variants:
        if _key(variant, device) not in _kernels:
            thread = threading.Thread(target=_load_quietly, args=(variant, device))
            with contextlib.suppress(RuntimeError):  # an interpreter that is ending starts no more threads
                thread.start()
                started.append(thread)
    return started


def _load_quietly(variant: Variant, device: int) -> None:
    with contextlib.suppress(KernelError, ContextLost):
        kernel(variant, device)


def reject(variant: Variant, device: int, error: KernelError) -> None:
    """Make ``kernel`` raise ``error`` for this variant from now on, because the variant computes wrong numbers."""
    _kernels[_key(variant, device)] = error


def _load_or_error(variant: Variant, architecture: str, device: int) -> Kernel | KernelError:
    try:
        name = cache_name(variant, architecture)
        stored = kernel_files.read(name)
        if stored is not None:
            with contextlib.suppress(KernelError):  # compile again if this driver cannot load what another NVRTC made
                return driver().load(variant, stored, device)
        code = compile_variant(variant, architecture)
        kernel_files.write(name, code)
        return driver().load(variant, code, device)
    except KernelError as error:
        return error


def compile_variant(variant: Variant, architecture: str) -> bytes:
    """Compile the kernel ``variant``; return a cubin for sm_XY, PTX for compute_XY. Raises KernelError."""
    return compiler().compile(variant.source, compile_options(variant, architecture), variant.text)


def compile_options(variant: Variant, architecture: str) -> tuple[str, ...]:
    macros = (f"-D{name}={value}" for name, value in {**DEFAULTS, **dict(variant.macros)}.items())
    return f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", *macros


def cache_name(variant: Variant, architecture: str) -> str:
    """Return the name of a compiled variant's file, unique to its sources, options and compiler."""
    sources = *map(read_source, (variant.source, *HEADERS)), variant.text
    options = *compile_options(variant, architecture), str(compiler().version)
    return kernel_files.make_name(f"{variant.entry}-{architecture}", *sources, *options)


@functools.cache
def read_source(name: str) -> str:
    return (SOURCES / name).read_text(encoding="utf-8")


@functools.cache
def compiler() -> Compiler:
    """Return NVRTC. Raises KernelError where it cannot be loaded."""
    try:
        return Compiler(_open_nvrtc())
    except (OSError, AttributeError) as error:  # missing, or too old: it lacks a function that we call
        raise KernelError(str(error)) from error


@functools.cache
def driver() -> Driver:
    """Return the CUDA driver. Raises KernelError where it cannot be loaded."""
    try:
        return Driver(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"))
    except (OSError, AttributeError) as error:
        raise KernelError(str(error)) from error


@functools.cache
def decline_reason() -> str | None:
    """Return the reason why this machine cannot compile or load kernels; None where both libraries were found."""
    for name, load in (("NVRTC, which compiles the kernels,", compiler), ("the CUDA driver", driver)):
        try:
            load()
        except KernelError as error:
            return f"{name} cannot be used: {first_line(error)}"
    return None


def _open_nvrtc() -> ctypes.CDLL:
    """Load NVRTC, PyTorch's own if possible: a driver that runs PyTorch can load its output. Raises OSError."""
    own = (torch.version.cuda or "").partition(".")[0]
    for major in sorted(("13", "12", "11"), key=lambda major: major != own):
        for path in library_paths(major):
            with contextlib.suppress(OSError):
                return open_library(path)
    wheel = f"nvidia-cuda-nvrtc-cu{own}" if own in ("11", "12") else "nvidia-cuda-nvrtc"
    raise OSError(
        f"no NVRTC beside PyTorch, in the nvidia-* packages or on the library path; pip install {wheel} brings it"
    )


def library_paths(major: str) -> Iterator[str]:
    """Yield paths where an NVRTC of that major version may be, the most likely first."""
    # PyTorch's older wheels have a hash in the file name: libnvrtc-<hash>.so.11.2.
    windows = sys.platform == "win32"
    name = f"nvrtc64_{major}*.dll" if windows else f"libnvrtc[-.]*so.{major}*"
    spec = importlib.util.find_spec("nvidia")
    wheels = map(glob.escape, (spec.submodule_search_locations or ()) if spec is not None else ())
    toolkits = os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"
    folders = [os.path.join(glob.escape(os.path.dirname(torch.__file__)), "lib")]
    folders += [os.path.join(base, "*", inner) for base in wheels for inner in ("lib", os.path.join("bin", "**"))]
    inner = ("bin", "**") if windows else ("lib64",)
    folders += [os.path.join(glob.escape(root), *inner) for root in toolkits if root]
    for folder in folders:
        paths = sorted(glob.glob(os.path.join(folder, name), recursive=True))
        yield from (path for path in paths if not _NOT_NVRTC.search(path))
    minor = {"11": "2"}.get(major, "0")  # the minor version that file names have since CUDA 11.8
    yield f"nvrtc64_{major}{minor}_0.dll" if windows else f"libnvrtc.so.{major}"


def open_library(path: str) -> ctypes.CDLL:
    folder = os.path.dirname(path)
    if folder:
        # NVRTC opens its builtins library by name, which works in any folder once that library is loaded.
        for builtins in glob.glob(os.path.join(glob.escape(folder), "*nvrtc-builtins*")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(builtins)
    return ctypes.CDLL(path)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
