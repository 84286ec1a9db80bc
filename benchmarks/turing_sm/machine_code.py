"""Machine code of sm_75: instructions with their control bits, and the main loop of a kernel."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

_FUNCTION = re.compile(r"\s*Function : (\S+)")
_LOW = re.compile(r"\s*/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]+ \*/")
_HIGH = re.compile(r"\s+/\* (0x[0-9a-f]+) \*/")
_ENDS = "BRA", "BRX", "EXIT", "CALL", "RET", "BSYNC"  # instructions that end a basic block
_PREDICATE = re.compile(r"^@!?U?P\w+ ")
_BRANCH = re.compile(r"^(?:@!?U?P\w+ )?BRA(?:\.\w+)* (?:!?U?P\w, )?(0x[0-9a-f]+)")


class Instruction(NamedTuple):
    """One instruction with its control bits.

    address: in bytes; text: the disassembly, with its predicate; stall: cycles until the warp's next issue
    yields: whether another warp is preferred next; writes, reads: scoreboards that are released once the result is
    written, or the operands are read, None without one; waits: scoreboards that must be free before the issue
    """

    address: int
    text: str
    stall: int
    yields: bool = False
    writes: int | None = None
    reads: int | None = None
    waits: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The mnemonic with its modifiers, such as HMMA.1688.F32."""
        return _PREDICATE.sub("", self.text).split()[0]

    @property
    def target(self) -> int | None:
        """The address that a branch goes to; None for other instructions."""
        found = _BRANCH.match(self.text)
        return int(found[1], 16) if found else None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow."""
        return not self.text.startswith(("BRA ", "EXIT"))


def decode_control(high: int) -> tuple[int, bool, int | None, int | None, tuple[int, ...]]:
    """Return stall, yields, writes, reads and waits of an instruction. high: the upper 64 of its 128 bits"""
    stall, yields = high >> 41 & 15, not high >> 45 & 1
    writes, reads, waits = high >> 46 & 7, high >> 49 & 7, high >> 52 & 63
    free = 7
    return (
        stall,
        yields,
        None if writes == free else writes,
        None if reads == free else reads,
        tuple(number for number in range(6) if waits >> number & 1),
    )


def parse(listing: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each function. listing: the output of ``cuobjdump -sass``"""
    functions: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    low: re.Match[str] | None = None
    for line in listing.splitlines():
        if found := _FUNCTION.match(line):
            code = functions.setdefault(found[1], [])
        elif low is not None and (high := _HIGH.match(line)):
            code.append(Instruction(int(low[1], 16), low[2], *decode_control(int(high[1], 16))))
            low = None
        else:
            low = _LOW.match(line) or low
    return functions


def main_loop(code: list[Instruction]) -> list[Instruction]:
    """Return the loop with most tensor-core instructions, the shortest of equals; [] without one."""
    loops = [
        [each for each in code if target <= each.address <= branch.address]
        for branch in code
        if (target := branch.target) is not None and target < branch.address
    ]
    return max(loops, key=lambda loop: (count_products(loop), -len(loop)), default=[])


PAIR = "0x40"  # threads of a barrier for two warps


def usual_path(loop: list[Instruction], of_dp: bool = False) -> list[Instruction]:
    """Return the instructions of one turn of ``loop`` for a tile without masked scores.

    Of all paths through the forward branches it is the shortest one with the most products, exponentials, loads and
    stores: tiles at a mask's edge take a longer path, and hidden tiles a path without these.
    of_dp: the path of the warp that computes dP and gets P from another warp (ROLES): it has the fewest exponentials
    """
    places = {each.address: place for place, each in enumerate(loop)}
    best: list[tuple[tuple[int, int, int, int], int | None]] = []  # from the end: the work and the next place
    for place in reversed(range(len(loop))):
        step = loop[place]
        follow = [place + 1] if step.falls_through or place + 1 == len(loop) else []
        if step.target is not None and places.get(step.target, 0) > place:
            follow.append(places[step.target])
        options = [(best[len(loop) - 1 - after][0], after) for after in follow if after < len(loop)]
        rest, after = max(options, default=((0, 0, 0, 0), None))
        products, powers, moved, shortness = rest
        power = step.name.startswith("MUFU.EX2") * (-1 if of_dp else 1)
        loaded = 16 * (of_dp and step.name.startswith("LDS") and "128" in step.name)
        work = products + step.name.startswith("HMMA"), powers + power
        best.append(((*work, moved + moved_bytes(step.name) + loaded, shortness - 1), after))
    path, place = [], 0 if loop else None
    while place is not None:
        path.append(loop[place])
        place = best[len(loop) - 1 - place][1]
    of_pairs = [step for step in path if step.name == "BAR.SYNC" and step.text.endswith(PAIR)]
    if of_dp and len(of_pairs) > 1:  # one barrier for each warp of a pair: leave out the predicated one
        path = [step for step in path if step not in of_pairs or not step.text.startswith("@")]
    return path


def follow(code: list[Instruction], addresses: list[int]) -> list[Instruction]:
    """Return the instructions of a path through ``code``: the basic blocks that begin at ``addresses``, in this order.

    For kernels in which usual_path finds no path. Raises ValueError if no basic block begins at an address.
    """
    begins = {code[0].address} | {each.target for each in code if each.target is not None}
    begins |= {after.address for step, after in itertools.pairwise(code) if step.name.startswith(_ENDS)}
    blocks: dict[int, list[Instruction]] = {}
    for step in code:
        if step.address in begins:
            block = blocks.setdefault(step.address, [])
        block.append(step)
    if absent := [hex(address) for address in addresses if address not in blocks]:
        raise ValueError(f"no basic block begins at {', '.join(absent)}")
    return [step for address in addresses for step in blocks[address]]


def halves(path: list[Instruction]) -> list[list[Instruction]]:
    """Return the path of each half of a block's warps. Of two barriers with opposite predicates, each half runs one."""
    barriers = [place for place, step in enumerate(path) if step.text.startswith("@") and step.name == "BAR.SYNC"]
    if len(barriers) != 2:
        return [path]
    return [
        [step._replace(text="NOP") if place == other else step for place, step in enumerate(path)] for other in barriers
    ]


def moved_bytes(name: str) -> int:
    """Return the bytes that each lane loads from global memory, or stores to shared memory."""
    if not name.startswith(("LDG", "STS")):
        return 0
    return next((size for part, size in (("128", 16), ("64", 8), ("U16", 2), ("U8", 1)) if part in name.split(".")), 4)


def count_products(code: list[Instruction]) -> int:
    """Return the number of tensor-core instructions."""
    return sum(each.name.startswith("HMMA") for each in code)
