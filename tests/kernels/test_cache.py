"""Compiled kernels on disk and in a process: whole or not there, trusted after a check, loaded once."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from flash_attn_compat.backends.fused.building import kernel_files, nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import Kernel, KernelError
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, Kind, Sizes
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.judging import faults
from flash_attn_compat.backends.fused.launching import params
from flash_attn_compat.core import cuda_capture
from tests import paper_gpu


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


# ---------------------------------------------------------------- from kernel sources to something a GPU can run

VARIANT = variants.forward(Kind(75, FP16, Sizes(64)))
FIELDS = (*params.HEAD_FIELDS, *params.REST_FIELDS)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    paper_gpu.build_for(monkeypatch)
    return monkeypatch


# ---- for which architecture


@pytest.mark.parametrize(
    ("real", "forced", "expected"),
    [
        ((7, 5), None, "sm_75"),
        ((8, 9), None, "sm_89"),
        ((9, 0), "7.5", "compute_75"),
        ((9, 0), "7.0", "compute_75"),
        ((9, 0), "8.0", "sm_90"),
        ((7, 5), "9.0", "sm_75"),
        ((12, 1), None, "compute_100"),
    ],
)
def test_kernels_are_made_for_the_gpu_or_the_forced_capability(
    real: tuple[int, int], forced: str | None, expected: str, gpu: pytest.MonkeyPatch
) -> None:
    paper_gpu.build_for(gpu, real)
    if forced:
        gpu.setenv("FLASH_ATTN_COMPAT_CAPABILITY", forced)
    assert nvrtc.target(0) == expected and expected.endswith(f"_{nvrtc.target_number(0)}")


def test_an_nvrtc_that_has_forgotten_turing_is_an_error(gpu: pytest.MonkeyPatch) -> None:
    paper_gpu.build_for(gpu, architectures=(80, 90))
    with pytest.raises(KernelError, match="80 and newer, the GPU is 75"):
        nvrtc.target(0)


# ---- once


def loading(gpu: pytest.MonkeyPatch, kept: bytes | None = None, understood: bytes = b"fresh") -> list[str]:
    """Return a driver that loads one machine code only, and its record."""
    done: list[str] = []

    def load(variant: Variant, code: bytes, device: int) -> Kernel:
        done.append(f"load {code.decode()}")
        if code != understood:
            raise KernelError("CUDA driver: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
        return Kernel(ctypes.c_void_p(1), variant.threads, variant.shared)

    def binary(variant: Variant, architecture: str) -> bytes:
        done.append("compile")
        time.sleep(0.05)
        return b"fresh"

    gpu.setattr(nvrtc, "driver", lambda: SimpleNamespace(load=load))
    gpu.setattr(nvrtc, "compile_variant", binary)
    gpu.setattr(kernel_files, "read", lambda name: kept)
    gpu.setattr(kernel_files, "write", lambda name, payload: done.append(f"keep {payload.decode()}") or True)
    return done


@pytest.mark.parametrize(
    ("kept", "understood", "expected"),
    [
        (None, b"fresh", ["compile", "keep fresh", "load fresh"]),
        (b"old", b"old", ["load old"]),
        (b"old", b"fresh", ["load old", "compile", "keep fresh", "load fresh"]),
    ],
)
def test_a_kernel_is_loaded_once_for_all_threads_of_a_device_and_compiled_only_where_none_is_kept(
    kept: bytes | None, understood: bytes, expected: list[str], gpu: pytest.MonkeyPatch
) -> None:
    done = loading(gpu, kept, understood)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(nvrtc.kernel, [VARIANT] * 8, [0] * 8))
    assert done == expected
    nvrtc.kernel(VARIANT, 1)
    assert done == expected * 2


def test_a_capture_is_not_left_to_other_threads(gpu: pytest.MonkeyPatch) -> None:
    done = loading(gpu)
    gpu.setattr(cuda_capture, "is_capturing", lambda device: True)
    nvrtc.load_all([VARIANT, variants.delta(Kind(75, FP16, Sizes(64)))], 0)
    assert done == []


@pytest.mark.parametrize("captures", [False, True])
def test_kernels_are_loaded_ahead_by_other_threads_but_not_during_a_capture(
    captures: bool, gpu: pytest.MonkeyPatch
) -> None:
    done = loading(gpu)
    gpu.setattr(cuda_capture, "is_capturing", lambda device: captures)
    for thread in nvrtc.load_ahead([VARIANT], 0):
        thread.join()
    assert done == ([] if captures else ["compile", "keep fresh", "load fresh"])


def test_an_error_of_a_kernel_loaded_ahead_is_raised_where_it_is_needed(gpu: pytest.MonkeyPatch) -> None:
    done = loading(gpu, understood=b"nothing")
    gpu.setattr(cuda_capture, "is_capturing", lambda device: False)
    nvrtc.load_ahead([VARIANT], 0)
    with pytest.raises(KernelError, match="UNSUPPORTED_PTX_VERSION"):
        nvrtc.kernel(VARIANT, 0)
    assert done.count("compile") == 1


def test_a_failure_in_a_capture_names_the_remedy_and_is_not_remembered(gpu: pytest.MonkeyPatch) -> None:
    loading(gpu, understood=b"nothing")
    gpu.setattr(cuda_capture, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"forward kernel .* make the same call once before the capture") as caught:
        nvrtc.kernel(VARIANT, 0)
    assert not isinstance(caught.value, KernelError)
    gpu.setattr(cuda_capture, "is_capturing", lambda device: False)
    done = loading(gpu, understood=b"nothing")
    for _ in range(2):
        with pytest.raises(KernelError, match="UNSUPPORTED_PTX_VERSION"):
            nvrtc.kernel(VARIANT, 0)
    assert done.count("compile") == 1, "outside of a capture it is remembered"


# ---- NVRTC itself


@pytest.fixture(scope="module")
def real_compiler() -> nvrtc.Compiler:
    try:
        return nvrtc.compiler()
    except KernelError as error:
        pytest.skip(f"no NVRTC here: {error}")


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_log(
    real_compiler: nvrtc.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"broken.cu": '#include "part.cuh"\nint x = undeclared_name;', "part.cuh": "#pragma once\n"}
    monkeypatch.setattr(nvrtc, "read_source", texts.__getitem__)
    monkeypatch.setattr(nvrtc, "HEADERS", ("part.cuh",))
    with pytest.raises(KernelError, match=r"refuses broken.cu(.|\n)*undeclared_name"):
        real_compiler.compile("broken.cu", ("--gpu-architecture=compute_75",))


# ---- the struct that kernels get


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to ask for the layout of the C struct")
def test_python_and_c_agree_on_every_field(tmp_path: Path) -> None:
    kinds = [kind for _, kind in FIELDS]
    starts = [struct.calcsize("@" + "".join(kinds[:at]) + f"0{kind[0]}") for at, kind in enumerate((*kinds, "q"))]
    places = [*(f"offsetof(Params, {name})" for name, _ in FIELDS), "sizeof(Params)"]
    asserted = [f"static_assert({place} == {start});" for place, start in zip(places, starts, strict=True)]
    program = tmp_path / "layout.cpp"
    program.write_text("\n".join(["#include <cstddef>", '#include "base/params.cuh"', *asserted]))
    command = ["g++", "-std=c++17", "-w", "-fsyntax-only", f"-I{nvrtc.SOURCES}", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(KeyError, match="seqlen_x"):
        params.pack_rest({"seqlen_x": 1})


def test_addresses_in_another_order_than_the_structs_are_refused() -> None:
    head = params.head_struct(["q", "v", "delta"])
    names, kinds = zip(*params.HEAD_FIELDS, strict=True)
    written = dict(zip(names, struct.unpack("<" + "".join(kinds), head.pack(1, 2, 3, 4)), strict=True))
    assert {name: value for name, value in written.items() if value} == {"q": 1, "v": 2, "delta": 3, "seqlen_k": 4}
    for given in (["v", "q"], ["q", "q"], ["q", "w"]):
        with pytest.raises(ValueError, match="in the order of struct Params"):
            params.head_struct(given)
