"""What each kernel becomes, without a GPU: `python -m benchmarks.kernel_report`, with --every for all variants (hours).

Registers, spills and shared memory by the assembler, the main loop's instructions by pipe, and what a T4 would be
bound by (cycles of a multiprocessor for 64 rows times 64 keys; tests/kernels/offline.py has the assumptions). Needs
NVRTC and cuobjdump, which the test extra brings.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from flash_attn_compat.backends.fused import variants
from flash_attn_compat.backends.fused.loader import KernelError
from flash_attn_compat.backends.fused.variants import Kind, Variant
from tests import fused_coverage
from tests.kernels import offline

_SHOWN = (
    "HMMA",
    "LDSM",
    "LDS",
    "STS",
    "LDG",
    "MUFU",
    "F2F",
    "FFMA",
    "FADD",
    "FMUL",
    "FMNMX",
    "FSEL",
    "LOP3",
    "LDL",
    "STL",
)


def chosen(number: int, every: bool, entries: list[str]) -> dict[Variant, Kind]:
    made = variants.made_for(fused_coverage.kinds(number, every))
    return {variant: kind for variant, kind in made.items() if variant.entry in entries}


def step(variant: Variant) -> int:
    """Keys (rows for dkdv) of one turn of the main loop."""
    macros = dict(variant.macros)
    return macros.get("BN", macros.get("TL", 64))


def line(variant: Variant, number: int, compiler: str) -> tuple[str, bool]:
    """What is said of one variant, and whether it fits."""
    name = " ".join(f"{macro}={value}" for macro, value in variant.macros)
    try:
        found = offline.compiled(offline.compilers()[compiler], variant, f"sm_{number}")
    except KernelError as error:
        return f"{variant.entry} {name}: {error}", False
    complaints = list(offline.complaints(variant, found, number))
    shared = found.static_shared + variant.shared
    said = f"{variant.entry} {name}: {found.registers} registers, {found.spilled} bytes spilled, {shared} shared"
    if number == 75 and variant.entry in ("forward", "dkdv", "dq"):
        loop = offline.main_loop(offline.instructions(found.cubin))
        said += f"\n    {mix(loop)}\n    {model(loop, variant)}"
    if number == 75 and found.spilled > offline.allowed_spills(variant):
        complaints.append(f"spills more than {offline.allowed_spills(variant)} bytes")
    return said + "".join(f"\n    DOES NOT FIT: {complaint}" for complaint in complaints), not complaints


def mix(loop: Counter[str]) -> str:
    counts = {name: sum(count for full, count in loop.items() if full.split(".")[0] == name) for name in _SHOWN}
    return f"main loop of {sum(loop.values())}: " + ", ".join(
        f"{count} {name}" for name, count in counts.items() if count
    )


def model(loop: Counter[str], variant: Variant) -> str:
    pipes = offline.turing_pipes(loop, variant, step(variant))
    cycles = ", ".join(f"{name} {value:.0f}" for name, value in pipes._asdict().items())
    return f"T4, cycles for 64 x 64: {cycles}; tensor cores at most {pipes.tensor_share:.0%} busy"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", action="store_true", help="all variants rather than each feature alone")
    parser.add_argument("--architecture", type=int, default=75, choices=(75, 80, 90))
    parser.add_argument("--entries", nargs="+", default=list(variants.MAKERS), choices=list(variants.MAKERS))
    parser.add_argument("--compiler", default=max(offline.compilers(), default=None), help="NVRTC's major version")
    options = parser.parse_args()
    if options.compiler is None or offline.cuobjdump() is None:
        print("needs NVRTC and cuobjdump: pip install -e '.[test]' on x86-64 Linux")
        return 1
    total = misfits = 0
    for variant in chosen(options.architecture, options.every, options.entries):
        said, fits = line(variant, options.architecture, options.compiler)
        print(said, flush=True)
        total, misfits = total + 1, misfits + (not fits)
    print(f"{total} variants for sm_{options.architecture}, {misfits} do not fit")
    return 1 if misfits else 0


if __name__ == "__main__":
    sys.exit(main())
