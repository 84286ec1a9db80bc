"""Simulate one multiprocessor of sm_75 in each kernel's main loop, without a GPU: `python -m benchmarks.turing_sm`.

It prints a table of the present tiles; --tiles adds tune's candidates, --cubin runs a kernel of another project.
docs/kernels.md says what is simulated, and how far it agrees with a T4. Needs NVRTC and cuobjdump, of the test extra.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import kernel_report, kernel_tiles
from benchmarks.turing_sm.machine import GEFORCE, T4, Machine, Result, Simulation
from benchmarks.turing_sm.machine_code import Instruction, count_products, halves, main_loop, parse, usual_path
from flash_attn_compat.backends.fused import candidates, variants
from flash_attn_compat.backends.fused.nvrtc import KernelError
from flash_attn_compat.backends.fused.variants import Kind, Variant
from tests.kernels import offline

ENTRIES = candidates.ENTRIES
APART = 0, 500, 1000  # cycles


class Simulated(NamedTuple):
    """One variant.

    blocks: resident ones; instructions: of the main loop; cycles: for 64 rows times 64 keys; useful: the share of them
    that the needed products take, at most ``bound`` by kernel_report's model of the same instructions
    """

    blocks: int
    instructions: int
    result: Result
    cycles: float
    useful: float
    bound: float


def simulate(
    code: list[Instruction], warps: int, blocks: int, machine: Machine = T4, has_roles: bool = False
) -> Result:
    """Simulate the main loop of a kernel. warps: of a block; blocks: that are resident; has_roles: ROLES

    How far resident blocks are apart changes the result by some per cent, so several distances are added up.
    """
    loop = main_loop(code)
    loops = halves(usual_path(loop))
    if has_roles:
        loops[1:] = halves(usual_path(loop, of_dp=True))[-1:]
    runs = [Simulation(loops, warps, blocks, machine).run(apart=apart) for apart in (APART if blocks > 1 else (0,))]
    cycles = sum(run.cycles for run in runs)
    busy = {unit: sum(run.busy[unit] * run.cycles for run in runs) / cycles for unit in runs[0].busy}
    return Result(cycles, busy, sum(run.turns for run in runs))


def simulate_variant(variant: Variant, head_dim: int, compiled: offline.Compiled, machine: Machine = T4) -> Simulated:
    """Simulate ``variant``, compiled for sm_75. Raises KernelError if a multiprocessor does not hold a block."""
    blocks = offline.MULTIPROCESSORS[75].resident_blocks(variant, compiled)
    if not blocks:
        raise KernelError("a multiprocessor does not hold a block")
    (code,) = parse(offline.disassembly(compiled.cubin)).values()
    loop = main_loop(code)
    pipes = kernel_report.model_turing(Counter(each.name for each in usual_path(loop)), variant)
    bound = kernel_report.useful_share(pipes, variant, head_dim, head_dim)
    result = simulate(code, variant.threads // 32, blocks, machine, ("ROLES", 1) in variant.macros)
    cycles = result.cycles_a_turn * 4096 / (variant.rows * kernel_report.step(variant))
    useful = bound * max(pipes) / cycles
    return Simulated(blocks, len(loop), result, cycles, useful, bound)


def make_rows(
    entries: list[str], head_dims: list[int], every_tile: bool, compiler: str, machine: Machine = T4
) -> Iterator[str]:
    """Yield rows of Markdown: one for each present tile, or for each of tune's candidates too."""
    yield "| head_dim | kernel | tile | registers | blocks | main loop, KB | bound | simulated |"
    yield "|---|---|---|---|---|---|---|---|"
    for D, entry in itertools.product(head_dims, entries):
        kind = Kind(75, variants.FP16, D)
        tiles = (
            variants.choose_tile(entry, kind),
            *(candidates.candidate_tiles(entry, 75, D) if every_tile else ()),
        )
        for tile in dict.fromkeys(tiles):
            variant = variants.MAKERS[entry](kind._replace(tiles=((entry, tile),)))
            compiled = offline.compiled(offline.compilers()[compiler], variant, "sm_75")
            found = simulate_variant(variant, D, compiled, machine)
            yield (
                f"| {D} | {entry} | {kernel_tiles.format_tile(tile)} | {compiled.registers} | {found.blocks} | "
                f"{found.instructions / 64:.1f} | {found.bound:.2f} | {found.useful:.2f} |"
            )


def report_cubin(path: Path, function: str, warps: int, blocks: int, machine: Machine) -> Iterator[str]:
    """Yield the cycles and busy units of each function of a cubin whose name contains ``function``."""
    for name, code in parse(offline.disassembly(path.read_bytes())).items():
        if function in name and count_products(code):
            result = simulate(code, warps, blocks, machine)
            busy = ", ".join(f"{unit} {share:.3f}" for unit, share in sorted(result.busy.items()) if share > 0.005)
            yield f"{name}: {result.cycles_a_turn:.0f} cycles a turn of the main loop; busy: {busy}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turing_sm", description=__doc__)
    parser.add_argument("--entries", nargs="+", default=list(ENTRIES), choices=ENTRIES)
    parser.add_argument(
        "--head-dims", type=int, nargs="+", default=list(variants.HEAD_DIMS), choices=variants.HEAD_DIMS
    )
    parser.add_argument("--tiles", action="store_true", help="also the tiles that tune may choose")
    parser.add_argument("--geforce", action="store_true", help="tensor cores add up in fp32 at half rate, as on RTX 20")
    parser.add_argument("--cubin", type=Path, help="simulate this file's kernels instead")
    parser.add_argument("--function", default="", help="part of the name of the cubin's kernels to take")
    parser.add_argument("--warps", type=int, default=8, help="warps of a block of the cubin's kernels")
    parser.add_argument("--blocks", type=int, default=1, help="resident blocks of the cubin's kernels")
    parser.add_argument("--compiler", default=next(reversed(offline.compilers()), None), help="NVRTC's version")
    options = parser.parse_args(argv)
    if offline.cuobjdump() is None or (options.cubin is None and options.compiler is None):
        print("needs NVRTC and cuobjdump: pip install -e '.[test]' on x86-64 Linux")
        return 1
    machine = GEFORCE if options.geforce else T4
    if options.cubin is not None:
        lines = report_cubin(options.cubin, options.function, options.warps, options.blocks, machine)
    else:
        lines = make_rows(options.entries, options.head_dims, options.tiles, options.compiler, machine)
    for line in lines:
        print(line, flush=True)
    return 0
