"""Simulate one multiprocessor of sm_75 in each kernel's main loop, without a GPU: `python -m benchmarks.turing_sm`.

It prints a table of the present tiles; --tiles adds tune's candidates, --cubin runs a kernel of another project.
docs/kernels.md says what is simulated, and how far it agrees with a T4. Needs NVRTC and cuobjdump, of the test extra.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import kernel_report, kernel_tiles
from benchmarks.turing_sm import published
from benchmarks.turing_sm.machine import GEFORCE, T4, Machine, Result, Simulation
from benchmarks.turing_sm.machine_code import (
    Instruction,
    count_products,
    follow,
    halves,
    main_loop,
    parse,
    usual_path,
)
from flash_attn_compat.backends.fused.building.nvrtc import KernelError
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, HEAD_DIMS, Kind, Sizes, choose_tile
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.tuning import candidates
from tests.kernels import offline

ENTRIES = candidates.ENTRIES
OFFSETS = 8  # how many starts within a turn of the loop are simulated


class Phases(NamedTuple):
    """A result for each set of starts of the resident blocks, which vary evenly over a turn of the loop."""

    results: tuple[Result, ...]

    @property
    def mean(self) -> Result:
        """All results added up."""
        cycles = sum(run.cycles for run in self.results)
        units = self.results[0].busy
        busy = {unit: sum(run.busy.get(unit, 0) * run.cycles for run in self.results) / cycles for unit in units}
        return Result(cycles, busy, sum(run.turns for run in self.results))

    @property
    def slowest(self) -> float:
        """The cycles of a turn of the loop with the worst starts of the blocks."""
        return max(run.cycles_a_turn for run in self.results)

    @property
    def fastest(self) -> float:
        """The cycles of a turn of the loop with the best starts of the blocks."""
        return min(run.cycles_a_turn for run in self.results)


class Simulated(NamedTuple):
    """The simulation of one variant.

    blocks: how many are resident; instructions: of the main loop; cycles: for 64 rows times 64 keys
    useful: the share of the cycles that the needed products take; bound: its upper bound by kernel_report's model
    lowest, highest: ``useful`` for the worst and for the best starts of the resident blocks
    """

    blocks: int
    instructions: int
    result: Result
    cycles: float
    useful: float
    bound: float
    lowest: float
    highest: float


def simulate_phases(
    loops: list[list[Instruction]], warps: int, blocks: int, machine: Machine = T4, instructions: int = 2500
) -> Phases:
    """Simulate loops of a kernel. warps: of a block; blocks: how many are resident; loops: see Simulation

    Resident blocks keep the distance in time with which they start. So OFFSETS distances within a turn are simulated.
    """

    def run(starts: tuple[int, ...]) -> Result:
        return Simulation(loops, warps, blocks, machine).run(instructions, starts=starts)

    in_phase = run(())
    if blocks == 1:
        return Phases((in_phase,))
    turn = in_phase.cycles_a_turn * blocks
    # The second block starts at k eighths of a turn, the third at 3 k, the fourth at 5 k: distances vary evenly.
    places = [[k * (2 * block - 1) % OFFSETS for block in range(1, blocks)] for k in range(1, OFFSETS)]
    return Phases((in_phase, *(run((0, *(int(turn * place / OFFSETS) for place in each))) for each in places)))


def loops_of(code: list[Instruction], has_roles: bool = False) -> list[list[Instruction]]:
    """Return the main loop's usual path, or a path for each half of a block's warps. has_roles: compiled with ROLES"""
    loop = main_loop(code)
    loops = halves(usual_path(loop))
    if has_roles:
        loops[1:] = halves(usual_path(loop, of_dp=True))[-1:]
    return loops


def simulate_variant(variant: Variant, head_dim: int, compiled: offline.Compiled, machine: Machine = T4) -> Simulated:
    """Simulate ``variant``, compiled for sm_75. Raises KernelError if a multiprocessor does not hold a block.

    Two groups of warps (KEY_GROUPS) have barriers of their own, so they count as two blocks of half as many warps.
    """
    blocks = offline.MULTIPROCESSORS[75].resident_blocks(variant, compiled)
    if not blocks:
        raise KernelError("a multiprocessor does not hold a block")
    (code,) = parse(offline.disassembly(compiled.cubin)).values()
    loop = main_loop(code)
    pipes = kernel_report.model_turing(Counter(each.name for each in usual_path(loop)), variant)
    bound = kernel_report.useful_share(pipes, variant, head_dim, head_dim)
    loops = loops_of(code, ("ROLES", 1) in variant.macros)
    groups = dict(variant.macros).get("KEY_GROUPS", 1)
    phases = simulate_phases(loops, variant.threads // 32 // groups, blocks * groups, machine)
    of_turn = 4096 / (variant.rows * kernel_report.step(variant)) * groups
    best = bound * max(pipes)
    useful, lowest, highest = (
        best / (turn * of_turn) for turn in (phases.mean.cycles_a_turn, phases.slowest, phases.fastest)
    )
    return Simulated(blocks, len(loop), phases.mean, best / useful, useful, bound, lowest, highest)


def make_rows(
    entries: list[str], head_dims: list[int], every_tile: bool, compiler: str, machine: Machine = T4
) -> Iterator[str]:
    """Yield rows of Markdown: one for each present tile, or for each of tune's candidates too."""
    yield "| head_dim | kernel | tile | registers | blocks | main loop, KB | bound | simulated | by phase |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for D, entry in itertools.product(head_dims, entries):
        kind = Kind(75, FP16, Sizes(D))
        tiles = (
            choose_tile(entry, kind),
            *(candidates.candidate_tiles(entry, 75, D) if every_tile else ()),
        )
        for tile in dict.fromkeys(tiles):
            variant = variants.MAKERS[entry](kind.replace(tiles=((entry, tile),)))
            compiled = offline.compiled(offline.compilers()[compiler], variant, "sm_75")
            found = simulate_variant(variant, D, compiled, machine)
            yield (
                f"| {D} | {entry} | {kernel_tiles.format_tile(tile)} | {compiled.registers} | {found.blocks} | "
                f"{found.instructions / 64:.1f} | {found.bound:.2f} | {found.useful:.2f} | {phase_range(found)} |"
            )


def phase_range(found: Simulated) -> str:
    """Return ``useful`` for the worst and the best starts of blocks; "" if they are equal, as for a single block."""
    return f"{found.lowest:.2f} to {found.highest:.2f}" if found.highest > found.lowest else ""


def report_cubin(
    path: Path, function: str, warps: int, blocks: int, machine: Machine, ways: Sequence[Sequence[int]] = ()
) -> Iterator[str]:
    """Yield the cycles and busy units of each function of a cubin whose name contains ``function``.

    ways: paths of equal shares of a block's warps, as addresses of basic blocks; empty for the loop's usual path
    """
    is_listing = path.suffix == ".sass"
    listing = path.read_text() if is_listing else offline.disassembly(path.read_bytes())
    for name, code in parse(listing).items():
        if function in name and count_products(code):
            loops = [follow(code, [*way]) for way in ways] or loops_of(code)
            phases = simulate_phases(loops, warps, blocks, machine)
            busy = ", ".join(f"{unit} {share:.3f}" for unit, share in sorted(phases.mean.busy.items()) if share > 0.005)
            ends = f" ({phases.fastest:.0f} to {phases.slowest:.0f} by phase)" * (blocks > 1)
            yield f"{name}: {phases.mean.cycles_a_turn:.0f} cycles a turn of the main loop{ends}; busy: {busy}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turing_sm", description=__doc__)
    parser.add_argument("--entries", nargs="+", default=list(ENTRIES), choices=ENTRIES)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), choices=HEAD_DIMS)
    parser.add_argument("--tiles", action="store_true", help="also the tiles that tune may choose")
    parser.add_argument("--geforce", action="store_true", help="tensor cores add up in fp32 at half rate, as on RTX 20")
    parser.add_argument("--cubin", type=Path, help="simulate this file's kernels instead; or NAME.sass of cuobjdump")
    parser.add_argument("--function", default="", help="part of the name of the cubin's kernels to take")
    parser.add_argument("--warps", type=int, default=8, help="warps of a block of the cubin's kernels")
    parser.add_argument("--blocks", type=int, default=1, help="resident blocks of the cubin's kernels")
    parser.add_argument(
        "--pytorch", type=int, choices=(64, 128), help="the file is PyTorch 2.15.0+cu132's forward of this head dim"
    )
    parser.add_argument("--compiler", default=next(reversed(offline.compilers()), None), help="NVRTC's version")
    parser.add_argument("--published", action="store_true", help="compare with speeds that others have published")
    options = parser.parse_args(argv)
    if options.published:
        print(*published.make_rows(), sep="\n")
        return 0
    if offline.cuobjdump() is None or (options.cubin is None and options.compiler is None):
        print("needs NVRTC and cuobjdump: pip install -e '.[test]' on x86-64 Linux")
        return 1
    machine = GEFORCE if options.geforce else T4
    ways = published.pytorch_ways(options.pytorch) if options.pytorch else ()
    if options.cubin is not None:
        lines = report_cubin(options.cubin, options.function, options.warps, options.blocks, machine, ways)
    else:
        lines = make_rows(options.entries, options.head_dims, options.tiles, options.compiler, machine)
    for line in lines:
        print(line, flush=True)
    return 0
