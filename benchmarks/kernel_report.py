"""Registers, spills and instructions of each kernel, without a GPU: `python -m benchmarks.kernel_report`.

--every compiles all variants, which takes hours.

--table and --masks print two tables of docs/kernels.md, --bf16 the cost of conversions in main loops.

The assembler gives registers, spills and shared memory, the disassembly the main loop's instructions; a model says
which pipe bounds a T4 (cycles of a multiprocessor for 64 rows times 64 keys). Needs NVRTC and cuobjdump, of the test
extra.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flash_attn_compat.backends.fused.building.nvrtc import KernelError
from flash_attn_compat.backends.fused.choosing import enumeration, variants
from flash_attn_compat.backends.fused.choosing.kinds import BF16_AS_FP16, FP16, HEAD_DIMS, Kind, Sizes
from flash_attn_compat.backends.fused.choosing.variants import Variant
from tests import fused_coverage
from tests.kernels import offline

_SHOWN = (
    "HMMA", "LDSM", "LDS", "STS", "LDG", "MUFU", "F2F", "FFMA", "FADD", "FMUL", "FMNMX", "FSEL", "LOP3", "LDL", "STL",
)  # fmt: skip


class Pipes(NamedTuple):
    """Cycles for 64 rows times 64 keys on a multiprocessor of sm_75, by pipe; the busiest pipe bounds the kernel.

    Assumed cycles of an instruction. Each quarter of the multiprocessor: 8 for HMMA.1688.F32, MUFU and F2F, 2 for FMA
    and ALU, 1 for issue. The shared unit: 8 for LDSM.x4, LDS.128 and STS.128, 2 for smaller accesses. Instructions that
    only masked tiles execute count too.
    """

    tensor: float
    shared: float
    special: float
    fma: float
    alu: float
    issue: float

    @property
    def tensor_share(self) -> float:
        """The speed as a share of the tensor cores' peak, if all pipes work at the same time."""
        return self.tensor / max(self)


# How many matrix products each kernel needs: over the channels of q and k; over the channels of v.
_PRODUCTS = {"forward": (1, 1), "dkdv": (2, 2), "dq": (2, 1)}


def useful_share(pipes: Pipes, variant: Variant, head_dim: int, head_dim_v: int) -> float:
    """Return the cycles of the needed products, for unpadded head dims, over the cycles of the busiest pipe."""
    of_d, of_dv = _PRODUCTS[variant.entry]
    return 8 * (of_d * head_dim + of_dv * head_dim_v) / max(pipes)


def model_turing(loop: Counter[str], variant: Variant) -> Pipes:
    """Return the cycles by pipe. loop: the instructions of the main loop"""

    def count(*names: str) -> int:
        return sum(number for name, number in loop.items() if name.startswith(names))

    warps = variant.threads // 32
    quarter = warps / 4
    wide = count("LDSM", "LDS.128", "LDS.U.128", "STS.128")
    narrow = count("LDS", "STS") - wide
    units = variant.rows * step(variant) / 4096
    alu = ("FMNMX", "LOP3", "PRMT", "IADD3", "SHF", "LEA", "FSETP", "ISETP", "SEL", "FSEL")
    return Pipes(
        tensor=count("HMMA") * 8 * quarter / units,
        shared=(wide * 8 + narrow * 2) * warps / units,
        special=(count("MUFU") + count("F2F")) * 8 * quarter / units,
        fma=(count("FFMA", "FADD", "FMUL", "IMAD")) * 2 * quarter / units,
        alu=count(*alu) * 2 * quarter / units,
        issue=sum(loop.values()) * quarter / units,
    )


def choose_variants(number: int, every: bool, entries: list[str]) -> dict[Variant, Kind]:
    """Return the variants to compile and their kinds. every: all, else each feature alone and all features together"""
    masked = (
        kind
        for kind in enumeration.every_kind(number)
        if kind.features.bias and kind.sizes.vec == 8 and not kind.features.dropout + kind.hints.few_rows
    )
    some = itertools.chain(fused_coverage.kinds(number), masked, fused_coverage.eight_bit_kinds(number))
    kinds = enumeration.every_kind(number) if every else some
    made = enumeration.made_for(kinds)
    return {variant: kind for variant, kind in made.items() if variant.entry in entries}


def step(variant: Variant) -> int:
    """Return how many keys (in dkdv: rows) one iteration of the main loop handles."""
    macros = dict(variant.macros)
    return macros.get("STREAMED_ROWS", 64) * macros.get("KEY_GROUPS", 1)


def report_variant(variant: Variant, number: int, compiler: str) -> tuple[str, bool]:
    """Return the report on one variant, and whether it fits."""
    name = " ".join(f"{macro}={value}" for macro, value in variant.macros)
    try:
        compiled = offline.compiled(offline.compilers()[compiler], variant, f"sm_{number}")
    except KernelError as error:
        return f"{variant.entry} {name}: {error}", False
    code = offline.instructions(compiled.cubin)
    complaints = [*offline.complaints(variant, compiled, number), *offline.store_complaints(variant, code)]
    shared = compiled.static_shared + variant.shared
    text = f"{variant.entry} {name}: {compiled.registers} registers, {compiled.spilled} bytes spilled, {shared} shared"
    if number == 75 and variant.entry in ("forward", "dkdv", "dq"):
        loop = offline.main_loop(code)
        text += f"\n    {format_instructions(loop)}\n    {format_model(loop, variant)}"
    if number == 75 and compiled.spilled > offline.allowed_spills(variant):
        complaints.append(f"spills more than {offline.allowed_spills(variant)} bytes")
    return text + "".join(f"\n    DOES NOT FIT: {complaint}" for complaint in complaints), not complaints


def format_instructions(loop: Counter[str]) -> str:
    counts = {name: sum(count for full, count in loop.items() if full.split(".")[0] == name) for name in _SHOWN}
    size = sum(loop.values())  # of 16 bytes each; sm_75's instruction caches have 16 and 46 KB
    return f"main loop of {size}, {size / 64:.1f} KB: " + ", ".join(
        f"{count} {name}" for name, count in counts.items() if count
    )


def format_model(loop: Counter[str], variant: Variant) -> str:
    pipes = model_turing(loop, variant)
    cycles = ", ".join(f"{name} {value:.0f}" for name, value in pipes._asdict().items())
    return f"T4, cycles for 64 x 64: {cycles}; tensor cores at most {pipes.tensor_share:.0%} busy"


PLAIN = Kind(75, FP16, Sizes(64))
CONVERTED = PLAIN.replace(type=BF16_AS_FP16)


Loops = list[tuple[Variant, offline.Compiled, Counter[str]]]


def main_loops(compiler: str, *kinds: Kind, head_dims: Iterable[int] = HEAD_DIMS) -> Iterator[tuple[int, str, Loops]]:
    """Yield head dim, kernel and, for each kind, the variant compiled for sm_75 with its main loop's instructions."""
    nvrtc = offline.compilers()[compiler]
    for D, entry in itertools.product(head_dims, _PRODUCTS):
        chosen = [variants.MAKERS[entry](kind.replace(head_dim=D)) for kind in kinds]
        compiled = [(variant, offline.compiled(nvrtc, variant, "sm_75")) for variant in chosen]
        yield D, entry, [(*each, offline.main_loop(offline.instructions(each[1].cubin))) for each in compiled]


def make_table(compiler: str) -> Iterator[str]:
    """Yield model_turing's figures of each kernel and size of sm_75 as rows of Markdown.

    The last columns are shares of useful cycles; in brackets the share of the loop's instructions that spill registers.
    """
    yield "| head_dim | kernel | rows x step, warps | registers | tensor | shared | special | fp16 | causal | bf16 |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for D, entry, loops in main_loops(compiler, PLAIN, PLAIN.replace(local=True), CONVERTED):
        shares = []
        for variant, _, loop in loops:
            local = offline.local_share(loop)
            shares.append(
                f"{useful_share(model_turing(loop, variant), variant, D, D):.2f}" + f" ({local:.1%})" * (local > 0)
            )
        variant, compiled, loop = loops[0]
        tile = f"{variant.rows} x {step(variant)}, {variant.threads // 32}"
        cycles = " | ".join(f"{pipe:.0f}" for pipe in model_turing(loop, variant)[:3])
        yield f"| {D} | {entry} | {tile} | {compiled.registers} | {cycles} | {' | '.join(shares)} |"


def make_bf16_table(compiler: str) -> Iterator[str]:
    """Yield the main loops' instructions for sm_75 in fp16, and ratios for bf16, converted in the kernel or before."""
    yield "| head_dim | kernel | fp16 | bf16 | bf16, copied |\n|---|---|---|---|---|"
    for D, entry, loops in main_loops(compiler, PLAIN, CONVERTED, CONVERTED.replace(copied=True)):
        counts = [sum(loop.values()) / variant.rows / step(variant) * variant.threads for variant, _, loop in loops]
        yield f"| {D} | {entry} | {counts[0]:.1f} | {counts[1] / counts[0]:.2f} | {counts[2] / counts[0]:.2f} |"


def make_mask_table(compiler: str) -> Iterator[str]:
    """Yield what dense masks cost: issued instructions for 64 rows times 64 keys, and shares of useful cycles."""
    yield "| head_dim | forward | dkdv | dq |\n|---|---|---|---|"
    booleans, pairs = PLAIN.replace(bias=1), PLAIN.replace(bias=2, bias_pairs=True)
    cells: dict[int, list[str]] = {}
    for D, _, loops in main_loops(compiler, PLAIN, booleans, pairs, head_dims=(32, 64, 128)):
        pipes = [(model_turing(loop, variant), variant) for variant, _, loop in loops]
        issued = " / ".join(f"{each.issue:,.0f}" for each, _ in pipes)
        shares = " / ".join(f"{useful_share(each, variant, D, D):.2f}" for each, variant in pipes)
        cells.setdefault(D, []).append(f"{issued}; {shares}")
    yield from (f"| {D} | {' | '.join(row)} |" for D, row in cells.items())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_report", description=__doc__)
    parser.add_argument("--every", action="store_true", help="all variants rather than each feature alone")
    parser.add_argument("--architecture", type=int, default=75, choices=(75, 80, 90))
    parser.add_argument("--entries", nargs="+", default=list(variants.MAKERS), choices=list(variants.MAKERS))
    parser.add_argument("--compiler", default=next(reversed(offline.compilers()), None), help="NVRTC's version")
    parser.add_argument("--table", action="store_true", help="each size's plain kernels for sm_75 as a table")
    parser.add_argument(
        "--bf16", action="store_true", help="the cost of conversions in each size's plain sm_75 kernels"
    )
    parser.add_argument("--masks", action="store_true", help="the cost of dense masks in main loops for sm_75")
    options = parser.parse_args(argv)
    if options.compiler is None or offline.cuobjdump() is None:
        print("needs NVRTC and cuobjdump: pip install -e '.[test]' on x86-64 Linux")
        return 1
    tables = {make_table: options.table, make_bf16_table: options.bf16, make_mask_table: options.masks}
    if any(tables.values()):
        print(f"NVRTC {options.compiler}")
        for make in (make for make, is_asked in tables.items() if is_asked):
            for line_of_table in make(options.compiler):
                print(line_of_table, flush=True)
        return 0
    total = misfits = 0
    for variant in choose_variants(options.architecture, options.every, options.entries):
        text, fits = report_variant(variant, options.architecture, options.compiler)
        print(text, flush=True)
        total, misfits = total + 1, misfits + (not fits)
    print(f"{total} variants for sm_{options.architecture}, {misfits} do not fit")
    return 1 if misfits else 0


if __name__ == "__main__":
    sys.exit(main())
