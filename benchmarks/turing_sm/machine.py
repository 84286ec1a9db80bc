"""One multiprocessor of sm_75, cycle by cycle: four schedulers, their pipes, and the memory that they share.

Each scheduler issues at most one warp instruction a cycle. Registers are not simulated: stall counts and scoreboards
of the machine code say when an instruction may issue. Addresses are not simulated either: shared memory is taken to be
free of bank conflicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.turing_sm.machine_code import PAIR, Instruction

SCHEDULERS = 4
LINE = 128  # bytes of a line of the instruction cache
_NEVER = 1 << 60


class Machine(NamedTuple):
    """Constants of a multiprocessor, in cycles or as their comments say; docs/kernels.md names their sources."""

    tensor: int = 8  # HMMA.1688 with sums in fp32, of a scheduler's tensor cores
    tensor_half: int = 8  # with sums in fp16
    tensor_latency: int = 18
    half: int = 2  # FMA, ALU and others with 16 lanes
    special: int = 8  # MUFU and conversions, 4 lanes
    special_latency: int = 21
    shared_bytes: int = 64  # that all four schedulers together move in a cycle
    shared_latency: int = 17  # after the transfer
    local_latency: int = 32  # of spilled registers: a hit in L1
    global_latency: int = 188  # a hit in L2
    global_bytes: float = 32  # that the multiprocessor loads in a cycle
    queue: int = 5  # how many instructions of a scheduler may wait for the shared or special unit
    barrier: int = 16
    branch: int = 8
    instructions: int = 16 * 1024  # bytes of a scheduler's instruction cache
    instruction_latency: int = 40
    instruction_cycles: int = 8  # to fetch a line of LINE bytes
    prefetched: int = 4  # lines that are fetched ahead
    second_instructions: int = 46 * 1024  # bytes of the next instruction cache, which all schedulers share


T4 = Machine()
GEFORCE = Machine(tensor=16)  # RTX 20: sums in fp32 at half rate


class Cost(NamedTuple):
    """What an instruction costs. unit: executes it, and is busy for ``cycles``; latency: cycles until the result"""

    unit: str
    cycles: int
    latency: int
    size: int = 0  # bytes of a load from global memory


# Instructions of the ALU pipe, by the beginnings of their names.
_ALU = (
    "LOP", "PRMT", "SHF", "LEA", "IADD", "FMNMX", "IMNMX", "FSET", "ISET", "SEL", "FSEL", "PLOP", "P2R", "R2P", "MOV",
    "SGXT", "BMSK", "FCHK", "POPC", "FLO", "IABS", "VOTE",
)  # fmt: skip
_FMA = ("FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HADD2", "HMUL2", "HSET", "HMNMX")
_UNIFORM = ("U", "R2U", "VOTEU")


def cost(name: str, machine: Machine) -> Cost:
    """Return what an instruction costs. name: with modifiers, such as LDSM.16.M88.4"""
    base, *modifiers = name.split(".")
    if base == "HMMA":
        return Cost("tensor", machine.tensor if "F32" in modifiers else machine.tensor_half, machine.tensor_latency)
    if base in ("LDSM", "LDS", "STS", "SHFL", "ATOMS"):
        size = 128 * _words(base, modifiers)
        cycles = size // machine.shared_bytes
        return Cost("shared", cycles, cycles + machine.shared_latency)
    if base in ("LDL", "STL"):
        return Cost("shared", 128 * _words(base, modifiers) // machine.shared_bytes, machine.local_latency)
    if base in ("LDG", "LD", "STG", "ST", "RED", "ATOM", "ATOMG"):
        size = 128 * _words(base, modifiers)
        return Cost("shared", size // machine.shared_bytes, machine.global_latency, size)
    if base in ("MUFU", "F2F", "I2F", "F2I", "FRND"):
        return Cost("special", machine.special, machine.special_latency)
    if base == "BAR":
        return Cost("barrier", 1, machine.barrier)
    if base in ("BRA", "BRX", "EXIT", "BSSY", "BSYNC", "BMOV", "WARPSYNC", "YIELD", "BREAK"):
        return Cost("branch", 1, machine.branch)
    if base in ("S2R", "S2UR", "NOP", "CS2R", "LDC"):
        return Cost("none", 1, 20)
    if base.startswith(_UNIFORM):
        return Cost("uniform", machine.half, 0)
    if base.startswith(_FMA):
        return Cost("fma", machine.half, 0)
    if base.startswith(_ALU):
        return Cost("alu", machine.half, 0)
    raise NotImplementedError(f"no cost of {name} is known")


def _words(base: str, modifiers: list[str]) -> int:
    """Return how many 32-bit words each lane moves in a load or store."""
    if base == "LDSM":
        return int(modifiers[-1])
    return 4 if "128" in modifiers else 2 if "64" in modifiers else 1


@dataclass
class Warp:
    block: int
    scheduler: int
    ready: int = 0  # the first cycle of its next issue, by stall counts and barriers
    known: int = 0  # no issue is possible before this cycle
    loop: int = 0  # the index of its loop
    pair: int = 0  # the pair of warps that it belongs to, for barriers of two warps
    place: int = 0  # the index of its next instruction in the loop
    turns: int = 0  # how many turns of the loop it has finished
    free: list[int] = field(default_factory=lambda: [0] * 6)  # when each scoreboard is released


class Result(NamedTuple):
    """What a simulation measured.

    cycles: simulated ones; busy: the share of these in which each unit worked; turns: of the loop, by all blocks
    """

    cycles: int
    busy: dict[str, float]
    turns: float

    @property
    def cycles_a_turn(self) -> float:
        """Cycles from one turn of the loop to the next, by any of the resident blocks."""
        return self.cycles / self.turns


class Simulation:
    """Simulates the main loop of all resident blocks. If there are two loops, each half of a block's warps runs one."""

    def __init__(self, loops: list[list[Instruction]], warps: int, blocks: int, machine: Machine = T4) -> None:
        self.loops, self.machine = loops, machine
        self.costs = [[cost(each.name, machine) for each in loop] for loop in loops]
        half = -(-warps // 2)
        self.warps = [
            Warp(block, warp % SCHEDULERS, loop=warp * len(loops) // warps, pair=block * half + warp % half)
            for block in range(blocks)
            for warp in range(warps)
        ]
        self.of_scheduler = [[warp for warp in self.warps if warp.scheduler == one] for one in range(SCHEDULERS)]
        counts = [range(len(warps)) for warps in self.of_scheduler]
        self.orders = [[(*count[first:], *count[:first]) for first in range(len(count) + 1)] for count in counts]
        self.first = [0] * SCHEDULERS  # the warp of each scheduler that goes first
        self.wake = [0] * SCHEDULERS  # when each scheduler can issue next
        self.pipes: list[dict[str, int]] = [{} for _ in range(SCHEDULERS)]
        self.queues: list[dict[str, deque[int]]] = [{"shared": deque(), "special": deque()} for _ in range(SCHEDULERS)]
        self.shared_free = 0
        self.memory_free = 0.0
        self.arrived: dict[tuple[bool, int], list[Warp]] = {}
        self.block_size = warps
        self.used: dict[str, int] = {}
        self.goal = self.behind = 0  # turns to simulate; how many warps have not finished them
        size = 16 * len({each.address for loop in loops for each in loop})
        behind = machine.global_latency if size > machine.second_instructions else machine.instruction_latency
        fits = size <= machine.instructions
        self.caches = [] if fits else [InstructionCache(machine, behind) for _ in range(SCHEDULERS)]

    def earliest(self, warp: Warp) -> int:
        """Return the first cycle in which the warp can issue, as far as is known now."""
        step, unit = self.loops[warp.loop][warp.place], self.costs[warp.loop][warp.place].unit
        when = warp.ready
        for number in step.waits:
            when = max(when, warp.free[number])
        queue = self.queues[warp.scheduler].get(unit)
        if queue is None:
            when = max(when, self.pipes[warp.scheduler].get(unit, 0))
        else:
            while queue and queue[0] <= when:
                queue.popleft()
            if len(queue) >= self.machine.queue:
                when = max(when, queue[len(queue) - self.machine.queue])
        return max(when, self.caches[warp.scheduler].ready(step.address, when)) if self.caches else when

    def issue(self, warp: Warp, now: int) -> None:
        step, price = self.loops[warp.loop][warp.place], self.costs[warp.loop][warp.place]
        self.used[price.unit] = self.used.get(price.unit, 0) + price.cycles
        self.used["issue"] = self.used.get("issue", 0) + 1
        warp.ready = now + max(step.stall, 1)
        begin = now
        pipes = self.pipes[warp.scheduler]
        if price.unit == "shared":
            begin = max(now + 1, self.shared_free)
            self.shared_free = begin + price.cycles
            self.queues[warp.scheduler]["shared"].append(begin)
        elif price.unit == "special":
            begin = max(now + 1, pipes.get("special", 0))
            pipes["special"] = begin + price.cycles
            self.queues[warp.scheduler]["special"].append(begin)
        else:
            pipes[price.unit] = now + price.cycles
        done = begin + price.latency
        if price.size:
            self.memory_free = max(self.memory_free, begin) + price.size / self.machine.global_bytes
            done = max(done, int(self.memory_free) + price.latency)
        for number, released in ((step.writes, done), (step.reads, begin + price.cycles)):
            if number is not None:
                warp.free[number] = max(warp.free[number], released)
        if price.unit == "barrier":
            self.meet(warp, now, step)
        warp.place += 1
        if warp.place == len(self.loops[warp.loop]):
            warp.place, warp.turns = 0, warp.turns + 1
            self.behind -= warp.turns == self.goal
            warp.ready = max(warp.ready, now + self.machine.branch)
        warp.known = warp.ready

    def meet(self, warp: Warp, now: int, step: Instruction) -> None:
        """Let a warp wait for all warps of its block, or at a barrier of 64 threads for the other warp of its pair."""
        of_pair = step.text.endswith(PAIR)
        waiting = self.arrived.setdefault((of_pair, warp.pair if of_pair else warp.block), [])
        waiting.append(warp)
        if len(waiting) < (2 if of_pair else self.block_size):
            if step.name != "BAR.ARV":  # BAR.ARV: the warp arrives, and goes on
                warp.ready = _NEVER
            return
        for each in waiting:
            if each.ready == _NEVER or (each is warp and step.name != "BAR.ARV"):
                each.ready = each.known = now + self.machine.barrier
                self.wake[each.scheduler] = min(self.wake[each.scheduler], each.ready)
        waiting.clear()

    def run(self, instructions: int = 4000, warm_up: int = 2, starts: Sequence[int] = ()) -> Result:
        """Simulate until each warp has issued ``instructions`` after its first ``warm_up`` turns of the loop.

        starts: the cycle in which each block starts; blocks without one start in cycle 0
        """
        for warp in self.warps:
            warp.ready = warp.known = starts[warp.block] if warp.block < len(starts) else 0
        began = self.run_until(0, warm_up)
        before = dict(self.used)
        now = self.run_until(began, warm_up + max(3, -(-instructions // len(self.loops[0]))))
        used = {unit: number - before.get(unit, 0) for unit, number in self.used.items()}
        busy = {unit: number / (now - began) / SCHEDULERS for unit, number in used.items()}
        busy["shared"] = busy.get("shared", 0) * SCHEDULERS
        issued = sum(len(self.loops[warp.loop]) for warp in self.warps if warp.block == 0)
        return Result(now - began, busy, used["issue"] / issued)

    def run_until(self, now: int, turns: int) -> int:
        """Simulate from cycle ``now`` until each warp has finished so many turns; return the cycle after."""
        self.goal, self.behind = turns, sum(warp.turns < turns for warp in self.warps)
        while self.behind:
            now = self.step(now)
        return now

    def step(self, now: int) -> int:
        """Issue instructions in cycle ``now``; return the next cycle in which any may be issued."""
        later = _NEVER
        for number, wake in enumerate(self.wake):
            if wake <= now:
                self.wake[number] = wake = self.schedule(number, now)
            if wake < later:
                later = wake
        return later

    def schedule(self, number: int, now: int) -> int:
        """Let one scheduler issue, and return when it may issue again.

        The warp that issued last goes first unless its instruction yields; then the others in turn.
        """
        warps, first = self.of_scheduler[number], self.first[number]
        for place in self.orders[number][first]:
            warp = warps[place]
            if warp.known <= now:
                warp.known = self.earliest(warp)
                if warp.known <= now:
                    self.first[number] = (place + self.loops[warp.loop][warp.place].yields) % len(warps)
                    self.issue(warp, now)
                    break
        later = _NEVER
        for warp in warps:
            if warp.known < later:
                later = warp.known
        return max(now + 1, later)


class InstructionCache:
    """The instruction cache of one scheduler. It holds the lines used last and the lines that are being fetched."""

    def __init__(self, machine: Machine, latency: int) -> None:
        self.machine, self.latency = machine, latency
        self.lines: dict[int, int] = {}  # the cycle in which a line arrives; ordered by use
        self.free = 0

    def ready(self, address: int, now: int) -> int:
        """Return the cycle in which the instruction at ``address`` arrives, if it is requested in cycle ``now``."""
        line = address // LINE
        arrival = self.lines.pop(line, None)
        if arrival is None:
            arrival = self.fetch(now)
        self.lines[line] = arrival
        for ahead in range(line + 1, line + 1 + self.machine.prefetched):
            if ahead not in self.lines:
                self.lines[ahead] = self.fetch(now)
        while len(self.lines) * LINE > self.machine.instructions:
            del self.lines[next(iter(self.lines))]
        return arrival

    def fetch(self, now: int) -> int:
        self.free = max(self.free, now) + self.machine.instruction_cycles
        return self.free + self.latency
