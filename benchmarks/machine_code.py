"""Compare the kernels' machine code before and after a change of their sources, without a GPU.

    python -m benchmarks.machine_code BEFORE           # compile the variants into the folder BEFORE
    python -m benchmarks.machine_code BEFORE AFTER     # after the change: compile them into AFTER and compare

It prints each variant whose instructions differ, with registers, spilled bytes and the main loop's instructions; a
rename must print none. ``--every 4`` compiles a quarter. Needs NVRTC and cuobjdump, which the test extra brings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flash_attn_compat.backends.fused.choosing import enumeration, variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, HEAD_DIMS, KernelFeatures, Kind, Sizes
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.tuning import candidates
from tests import fused_coverage
from tests.kernels import offline

ARCHITECTURES = 75, 80, 90


class Measured(NamedTuple):
    """How many registers and how many bytes of spilled registers a thread has."""

    registers: int
    spilled: int


def choose_variants(number: int, entries: list[str], every: int = 1) -> Iterator[tuple[str, Variant]]:
    """Yield the variants for sm_``number`` with their names. every: yield only one in so many

    They have each feature alone, all features together, dense masks, shared grids, and the tiles that ``tune`` may
    choose. A name does not depend on macros, so that it stays when macros are renamed.
    """
    kinds = [
        *fused_coverage.kinds(number),
        *fused_coverage.masked_kinds(number),
        *fused_coverage.eight_bit_kinds(number),
    ]
    named = {f"{variant.entry} {_label(kind)}": variant for variant, kind in enumeration.made_for(kinds).items()}
    packed = Kind(number, FP16, Sizes(64), KernelFeatures(local=True))
    for entry in ("forward", "delta", "dkdv", "dq"):
        named[f"{entry} {_label(packed)}, shared grid"] = variants.with_shared_grid(variants.MAKERS[entry](packed))
    for entry, D in itertools.product(candidates.ENTRIES, HEAD_DIMS):
        kind = packed.replace(head_dim=D)
        for tile in candidates.candidate_tiles(entry, number, D):
            name = f"{entry} {_label(kind)}, tile {' '.join(str(int(value)) for value in tile)}"
            named[name] = variants.MAKERS[entry](kind.replace(tiles=((entry, tile),)))
    for name, variant in itertools.islice(named.items(), 0, None, every):
        if variant.entry in entries:
            yield f"sm_{number} {name}", variant


def _label(kind: Kind) -> str:
    """Return a name for a kind: its dtype and the fields that differ from their defaults."""
    groups = kind.sizes, kind.features, kind.hints
    fields = [(name, value, one._field_defaults.get(name)) for one in groups for name, value in one._asdict().items()]
    return " ".join([f"type {kind.type}", *(f"{name} {value}" for name, value, usual in fields if value != usual)])


def compile_into(folder: Path, name: str, variant: Variant, compiler: str) -> Measured:
    """Compile ``variant`` into ``folder`` as a cubin, and its registers and spills as JSON."""
    compiled = offline.compiled(offline.compilers()[compiler], variant, name.split()[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.cubin").write_bytes(compiled.cubin)
    measured = Measured(compiled.registers, compiled.spilled)
    (folder / f"{name}.json").write_text(json.dumps(measured))
    return measured


def machine_code(cubin: bytes) -> dict[bytes, bytes]:
    """Return the sections of a cubin (a little-endian 64-bit ELF file) that hold instructions and literals, by name.

    Left out are symbols and addresses of constexpr variables (.nv.constant4): renaming something in a source changes
    them.
    """
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q", cubin, headers + i * size) for i in range(count)]
    code = {}
    for name, _, _, _, offset, length in sections:
        begin = sections[names][4] + name
        title = cubin[begin : cubin.index(0, begin)]
        if title.startswith((b".text", b".nv.constant2", b".nv.constant3")):
            code[title] = cubin[offset : offset + length]
    return code


def describe_difference(name: str, before: Path, after: Path) -> str:
    """Return how the machine code of ``name`` differs between two folders; "" if it does not."""
    cubins = [(folder / f"{name}.cubin").read_bytes() for folder in (before, after)]
    if machine_code(cubins[0]) == machine_code(cubins[1]):
        return ""
    codes = list(map(offline.instructions, cubins))
    old, new = (Measured(*json.loads((folder / f"{name}.json").read_text())) for folder in (before, after))
    loops = [sum(offline.main_loop(code).values()) for code in codes]
    return (
        f"registers {old.registers} -> {new.registers}, spilled bytes {old.spilled} -> {new.spilled}, "
        f"main loop {loops[0]} -> {loops[1]}, all {len(codes[0])} -> {len(codes[1])}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine_code", description=__doc__)
    parser.add_argument("before", type=Path, help="folder of the code before the change; filled where it is empty")
    parser.add_argument("after", type=Path, nargs="?", help="folder for the code after the change; compares if given")
    parser.add_argument("--architectures", type=int, nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--every", type=int, default=1, help="take one of so many variants")
    parser.add_argument("--entries", nargs="+", default=list(variants.MAKERS), choices=list(variants.MAKERS))
    parser.add_argument("--compiler", default=next(reversed(offline.compilers()), None), help="NVRTC's version")
    options = parser.parse_args(argv)
    if options.compiler is None or offline.cuobjdump() is None:
        print("needs NVRTC and cuobjdump: pip install -e '.[test]' on x86-64 Linux")
        return 1
    compared = differing = 0
    for number in options.architectures:
        for name, variant in choose_variants(number, options.entries, options.every):
            compile_into(options.after or options.before, name, variant, options.compiler)
            if options.after is None or not (options.before / f"{name}.cubin").is_file():
                continue
            compared += 1
            if found := describe_difference(name, options.before, options.after):
                print(f"{name}: {found}", flush=True)
                differing += 1
    print(f"{compared} variants compared, {differing} differ" if options.after else "compiled")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
