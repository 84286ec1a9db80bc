"""Kernels compiled without a GPU: NVRTC compiles them, and its assembler reports registers and spills.

NVRTC and cuobjdump, which shows the code, come as wheels (the test extra).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import Compiler
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.launching import grids

FOLDERS = "NVRTC_FOLDERS"
REGISTERS = 65536  # of a multiprocessor
# Loops that write 0 or NaN by element, to rows without a block; and the turns of each that compilers unroll at most.
CLEARING_LOOPS, UNROLLED = {"forward": 2, "decode": 2, "dkdv": 4, "dq": 2}, 16
SPLITTING = {"forward", "decode", "dkdv"}  # whose blocks are counted by how many a GPU holds

_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_STATIC = re.compile(r"(\d+) bytes smem")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,5})\*/\s+(.*?);")
_STORE = re.compile(r"STG\.E(?:\.EF)?(?:\.(64|128)|\.[US](8|16))?(?=[. ])")
_BRANCH = re.compile(r"BRA(?:\.U)? (?:!?P\d, )?(0x[0-9a-f]+)")


class Compiled(NamedTuple):
    """A cubin with the assembler's report: bytes, and registers of a thread."""

    cubin: bytes
    registers: int
    stack: int
    spilled: int
    static_shared: int


class Multiprocessor(NamedTuple):
    """KB of shared memory, of which the system has some of each block; threads and blocks at most."""

    shared: int
    of_system: int
    threads: int
    blocks: int

    def resident_blocks(self, variant: Variant, found: Compiled) -> int:
        """Blocks at once. A warp's registers come in units of 256."""
        registers = -(-found.registers * 32 // 256) * 256 * variant.threads // 32
        shared = found.static_shared + variant.shared + self.of_system * 1024
        room = REGISTERS // registers, self.shared * 1024 // max(shared, 1), self.threads // variant.threads
        return min(*room, self.blocks)


# NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities".
MULTIPROCESSORS = {
    75: Multiprocessor(64, 0, 1024, 16),
    80: Multiprocessor(164, 1, 2048, 32),
    86: Multiprocessor(100, 1, 1536, 16),
    90: Multiprocessor(228, 1, 2048, 32),
}
SHARED_MEMORY = {number: (one.shared - one.of_system) * 1024 for number, one in MULTIPROCESSORS.items()}  # of a block


@functools.cache
def compilers() -> dict[str, Compiler]:
    """Every NVRTC that can be loaded here, by its version as "12.9", oldest first.

    Those that are installed, and those that lie anywhere below the folders in the environment variable NVRTC_FOLDERS.
    """
    folders = filter(None, os.environ.get(FOLDERS, "").split(os.pathsep))
    paths = [path for major in ("13", "12", "11") for path in nvrtc.library_paths(major)]
    paths += [str(path) for folder in folders for path in sorted(Path(folder).rglob("libnvrtc.so.*"))]
    found: dict[tuple[int, int], Compiler] = {}
    for path in paths:
        with contextlib.suppress(OSError, AttributeError):  # not there, or too old to have what is asked of it
            compiler = Compiler(nvrtc.open_library(path))
            found.setdefault(compiler.version, compiler)
    return {f"{major}.{minor}": found[major, minor] for major, minor in sorted(found)}


def compiled(compiler: Compiler, variant: Variant, architecture: str) -> Compiled:
    """``variant`` for sm_XY; raises KernelError with the compiler's log."""
    log: list[str] = []

    class Telling(Compiler):
        def __init__(self) -> None:
            self.__dict__.update(compiler.__dict__)

        def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
            if what == "CUBIN":
                log.append(super()._text(program, "ProgramLog").decode(errors="replace"))
            return super()._text(program, what)

    # Beside a driver, NVRTC from 12.9 on keeps results on disk, and the assembler says nothing of one taken from there.
    anew = ("--no-cache",) if compiler.version >= (12, 9) else ()
    cubin = Telling().compile(
        variant.source, (*nvrtc.compile_options(variant, architecture), "--ptxas-options=-v", *anew), variant.text
    )
    used, spilled, static = _USED.search(log[0]), _SPILLED.search(log[0]), _STATIC.search(log[0])
    assert used is not None and spilled is not None, log[0]
    stack, stores, loads = map(int, spilled.groups())
    return Compiled(cubin, int(used[1]), stack, stores + loads, int(static[1]) if static else 0)


@functools.cache
def cuobjdump() -> str | None:
    """The disassembler, from its wheel or on the path."""
    spec = importlib.util.find_spec("nvidia")
    for base in (spec.submodule_search_locations or ()) if spec is not None else ():
        for found in sorted(Path(base).glob("*/bin/cuobjdump")):
            if os.access(found, os.X_OK):
                return str(found)
    return shutil.which("cuobjdump")


def disassembly(cubin: bytes) -> str:
    """Return the listing of cuobjdump, which must be there."""
    tool = cuobjdump()
    assert tool is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, "-sass", str(path)], check=True, capture_output=True, text=True).stdout


def instructions(cubin: bytes) -> list[tuple[int, str]]:
    """(address, text) in order."""
    lines = map(_INSTRUCTION.match, disassembly(cubin).splitlines())
    return [(int(found[1], 16), found[2]) for found in lines if found]


def loops(code: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """The first and the last address of each loop."""
    branches = ((address, _BRANCH.search(text)) for address, text in code)
    return [(int(found[1], 16), address) for address, found in branches if found and int(found[1], 16) < address]


def count_instructions(code: list[tuple[int, str]], start: int, end: int) -> Counter[str]:
    """How often each instruction stands between two addresses, by name."""
    found = (text for place, text in code if start <= place <= end)
    return Counter(re.sub(r"^@!?U?P\w+ ", "", text).split()[0] for text in found)


def main_loop(code: list[tuple[int, str]]) -> Counter[str]:
    """Instructions of the loop that holds most tensor-core instructions (the innermost of equals), by name."""
    products = [place for place, text in code if "MMA" in text]
    within = [(sum(start <= place <= end for place in products), start - end, start, end) for start, end in loops(code)]
    count, _, start, end = max(within, default=(0, 0, 0, 0))
    return count_instructions(code, start, end) if count else Counter()


def bits_stored(code: list[tuple[int, str]]) -> Counter[int]:
    """Stores to global memory by the bits of each lane."""
    widths = (_STORE.search(text) for _, text in code)
    return Counter(int(found[1] or found[2] or 32) for found in widths if found)


def store_complaints(variant: Variant, code: list[tuple[int, str]]) -> Iterator[str]:
    """Yield the widths below 64 bits that a kernel stores more often than its lone numbers explain.

    Rows that are not aligned (VEC 1) are stored by element, and maps of a mask by word: neither is judged.
    """
    if dict(variant.macros).get("VEC") != 8:
        return
    clearing = CLEARING_LOOPS.get(variant.entry, 0) + dict(variant.macros).get("FEW_KEYS", 0)
    most = {32: lone_words(variant), 16: clearing * UNROLLED, 8: 0}
    found = bits_stored(code)
    for bits in most:
        if found[bits] > most[bits]:
            yield f"{found[bits]} stores of {bits} bits, of which {most[bits]} at most are not part of a row's 16 bytes"


def lone_words(variant: Variant) -> int:
    """Return a kernel's stores of lone words: LSEs (flash-attn's and the true one), deltas, a maximum."""
    macros = dict(variant.macros)
    if variant.entry == "forward":
        return 4 * macros["MMA_M"] + 4
    if variant.entry == "decode":
        return 2 * (macros["D"] // 64 >> macros.get("SPLIT_K", 0)) + 6
    if macros.get("FEW_KEYS"):
        return 5  # deltas: of up to four rows of a thread, and of rows without keys
    return {"delta": 4, "absmax": 1}.get(variant.entry, 0)


def blocks(variant: Variant) -> int:
    """Blocks that a multiprocessor is to hold: MIN_BLOCKS, 1 where the kernel does not say."""
    return dict(variant.macros).get("MIN_BLOCKS", 1)


def complaints(variant: Variant, found: Compiled, number: int) -> Iterator[str]:
    """Return the resources that exceed the architecture's limits."""
    if found.registers * variant.threads * blocks(variant) > REGISTERS:
        yield f"{found.registers} registers times {variant.threads} threads times {blocks(variant)} blocks"
    shared = found.static_shared + variant.shared
    if shared > SHARED_MEMORY[number]:
        yield f"{shared} bytes of shared memory"
    if (
        number == 75 and shared * blocks(variant) > SHARED_MEMORY[75]
    ):  # a multiprocessor has no more than one block may take
        yield f"{shared} bytes of shared memory times {blocks(variant)} blocks"
    if variant.entry in SPLITTING:
        held, assumed = (
            MULTIPROCESSORS[number].resident_blocks(variant, found),
            grids.resident_blocks(variant, 1, number),
        )
        if held < assumed:
            yield f"a multiprocessor holds {held} blocks, splits count on {assumed}"


# Bytes, stored and loaded, that these kernels for sm_75 may keep in memory for lack of registers; what of that is in
# the main loop is a few of a thousand instructions. No other kernel spills.
SPILLS = {"forward": 384, "decode": 96, "dkdv": 320, "dq": 320}
SPILLS_OF_FUNCTIONS = 128  # more, with a caller's functions: dkdv at 128 spills 432 bytes by NVRTC 13.0
LOCAL_SHARE = 0.06  # of the main loop's instructions, at most


def allowed_spills(variant: Variant) -> int:
    """Bytes that a kernel for sm_75 may spill."""
    return SPILLS.get(variant.entry, 0) + (SPILLS_OF_FUNCTIONS if variant.text else 0)


def local_share(loop: Counter[str]) -> float:
    """Return the share of a loop's instructions that load and store spilled registers."""
    return sum(count for name, count in loop.items() if name.startswith(("LDL", "STL"))) / max(1, sum(loop.values()))
