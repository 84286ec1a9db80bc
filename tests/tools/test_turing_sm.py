"""benchmarks.turing_sm: control bits, and loops whose cycles follow by arithmetic."""

from __future__ import annotations

import pytest

from benchmarks import turing_sm
from benchmarks.turing_sm.machine import GEFORCE, T4, Simulation
from benchmarks.turing_sm.machine_code import Instruction, decode_control, follow, halves, main_loop, parse, usual_path
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.variants import Kind
from tests.kernels import offline

BRANCH = T4.branch  # cycles from a loop's branch to its first instruction


def make_loop(*steps: tuple) -> list[Instruction]:
    """Return a loop of ``steps``: a name, a stall count, and an Instruction's other fields by name."""
    code = [
        Instruction(16 * place, f"{name} R0, R2, R4", stall, **(rest[0] if rest else {}))
        for place, (name, stall, *rest) in enumerate(steps)
    ]
    return [*code, Instruction(16 * len(code), "@P0 BRA 0x0", 5, yields=True)]


def cycles(loop: list[Instruction], warps: int = 1, blocks: int = 1, machine=T4) -> float:
    return Simulation([loop], warps, blocks, machine).run(instructions=400).cycles_a_turn


LOAD = ("LDS", 1, {"writes": 0})
PRODUCTS = [("HMMA.1688.F32", 8)] * 4


@pytest.mark.parametrize(
    ("loop", "warps", "expected"),
    [
        pytest.param(make_loop(*[("FADD", 4)] * 10), 1, 40 + BRANCH, id="stall counts add up"),
        pytest.param(make_loop(*[("FADD", 1)] * 10), 1, 2 * 9 + 1 + BRANCH, id="a pipe of 16 lanes takes 2 cycles"),
        pytest.param(make_loop(*PRODUCTS), 1, 4 * 8 + BRANCH, id="a warp waits for its branch"),
        pytest.param(make_loop(*PRODUCTS), 8, 2 * (4 * 8 + 1), id="a second warp hides all but its issue"),
        pytest.param(
            make_loop(LOAD, ("FADD", 4, {"waits": (0,)})),
            1,
            1 + 2 + T4.shared_latency + 4 + BRANCH,
            id="a load's latency",
        ),
        pytest.param(make_loop(*[("LDSM.16.M88.4", 1)] * 8), 4, 4 * 8 * 8, id="warps share 64 bytes a cycle"),
        pytest.param(make_loop(*[("MUFU.EX2", 1)] * 8), 4, 8 * 8, id="each scheduler has 4 lanes for MUFU"),
        pytest.param(make_loop(("BAR.SYNC", 5), ("FADD", 4)), 1, T4.barrier + 4 + BRANCH, id="a barrier's latency"),
    ],
)
def test_cycles_of_a_loop_follow_from_its_instructions(loop, warps, expected):
    assert cycles(loop, warps) == pytest.approx(expected, rel=0.03)


def test_a_full_queue_stops_a_warp_before_independent_instructions():
    loads = [("LDSM.16.M88.4", 1)] * (T4.queue + 2)
    loop = make_loop(*loads, ("FADD", 1), ("FADD", 1, {"waits": (0,)}))
    few = make_loop(*loads[:2], ("FADD", 1))
    assert cycles(few) == pytest.approx(2 * 8, abs=3)  # bound by the transfers
    assert cycles(loop) >= len(loads) * 8


def test_two_resident_blocks_fill_each_others_barriers():
    loop = make_loop(*PRODUCTS * 2, ("BAR.SYNC", 5))
    assert cycles(loop, 4, blocks=1) == pytest.approx(64 + T4.barrier + BRANCH, rel=0.03)
    assert cycles(loop, 4, blocks=2) == pytest.approx(64, rel=0.03)


# Products that share a scheduler's tensor cores instruction by instruction, then as much time without products.
IN_TURNS = make_loop(*[("HMMA.1688.F32", 8, {"yields": True})] * 48, *[("FADD", 8)] * 48, ("BAR.SYNC", 5))


def test_resident_blocks_are_simulated_in_eight_phases_with_a_mean_within_their_range():
    phases = turing_sm.simulate_phases([IN_TURNS], 4, 2)
    assert len(phases.results) == turing_sm.OFFSETS == 8
    assert phases.fastest < phases.mean.cycles_a_turn < phases.slowest
    assert phases.mean.cycles_a_turn == pytest.approx(
        sum(run.cycles for run in phases.results) / sum(run.turns for run in phases.results)
    )


def test_blocks_that_start_in_phase_are_slower_than_blocks_half_a_turn_apart():
    together, apart = (
        Simulation([IN_TURNS], 4, 2).run(2500, starts=starts).cycles_a_turn for starts in ((), (0, 32 * 12))
    )
    assert apart < 0.9 * together


def test_one_resident_block_has_one_phase():
    phases = turing_sm.simulate_phases([make_loop(*PRODUCTS)], 4, 1)
    (only,) = phases.results
    assert phases.mean == only and phases.slowest == phases.fastest == only.cycles_a_turn


def test_geforce_takes_twice_as_long_for_products_with_sums_in_fp32_only():
    half = make_loop(*[("HMMA.1688.F16", 8)] * 4)
    assert cycles(make_loop(*PRODUCTS), 8, machine=GEFORCE) == pytest.approx(2 * (4 * 16 + 1), rel=0.03)
    assert cycles(half, 8, machine=GEFORCE) == cycles(half, 8) == pytest.approx(2 * (4 * 8 + 1), rel=0.03)


def test_a_loop_beyond_the_instruction_cache_is_slower_than_one_within():
    within, beyond = (make_loop(*[("FADD", 1)] * count) for count in (900, 1100))
    assert cycles(within) == pytest.approx(2 * 900 + BRANCH, rel=0.01)
    assert cycles(beyond) > 1.02 * (2 * 1100 + BRANCH)


LISTING = (
    """
		Function : kernel
        /*0000*/                   HMMA.1688.F32 R4, R102, R104, RZ ;                        /* 0x00000068660472 3c */
""".replace("72 3c", "723c")
    + """\
                                                                                             /* 0x021f6600000018ff */
        /*0010*/              @!P0 BRA 0x0 ;                                                 /* 0xfffffff000008947 */
                                                                                             /* 0x000fea000383ffff */
"""
)


def test_control_bits_are_read_from_the_upper_half_of_an_instruction():
    product, branch = parse(LISTING)["kernel"]
    assert product.name == "HMMA.1688.F32" and product.target is None
    assert product[2:] == decode_control(0x021F6600000018FF)
    assert branch.target == 0 and branch.name == "BRA"


@pytest.mark.parametrize(
    ("stall", "yields", "writes", "reads", "waits"),
    [(8, False, 5, None, (0,)), (1, True, None, 2, ()), (15, False, 0, 0, (1, 5))],
)
def test_each_control_bit_stands_in_its_place(stall, yields, writes, reads, waits):
    numbers = (7 if number is None else number for number in (writes, reads))
    high = stall << 41 | (not yields) << 45 | next(numbers) << 46 | next(numbers) << 49
    assert decode_control(high | sum(1 << 52 + wait for wait in waits)) == (stall, yields, writes, reads, waits)


def test_the_usual_path_multiplies_and_skips_the_masks():
    def step(place: int, text: str) -> Instruction:
        return Instruction(16 * place, text, 1)

    loop = [
        step(0, "@P1 BRA 0x60"),  # a hidden tile: skips the products
        step(1, "HMMA.1688.F32 R0, R2, R4, RZ"),
        step(2, "@P2 BRA 0x50"),  # no masks
        step(3, "FSEL R0, R0, R1, P3"),
        step(4, "FSEL R1, R0, R1, P3"),
        step(5, "MUFU.EX2 R0, R0"),
        step(6, "@P0 BRA 0x0"),
    ]
    assert [each.address // 16 for each in usual_path(main_loop(loop))] == [0, 1, 2, 5, 6]


def test_a_way_through_basic_blocks_may_repeat_and_skip_them():
    code = make_loop(("FADD", 1), ("BRA", 1), ("FMUL", 1), ("HMMA.1688.F32", 1))
    code[1] = code[1]._replace(text="@P1 BRA 0x30")
    assert [step.name for step in follow(code, [0x0, 0x30, 0x30])] == ["FADD", "BRA", *["HMMA.1688.F32", "BRA"] * 2]
    with pytest.raises(ValueError, match="no basic block begins at 0x10"):
        follow(code, [0x0, 0x10])


def named(loop: list[Instruction], **texts: str) -> list[Instruction]:
    """Return ``loop`` with the text of some places replaced: _2="..." that of the third."""
    return [step._replace(text=texts.get(f"_{place}", step.text)) for place, step in enumerate(loop)]


def test_each_half_of_the_warps_passes_one_of_two_barriers_under_a_predicate():
    steps = ("FADD", 4), ("BAR.SYNC", 5), ("FADD", 4), ("BAR.SYNC", 5)
    first, second = halves(named(make_loop(*steps), _1="@P1 BAR.SYNC 0x0", _3="@!P1 BAR.SYNC 0x0"))
    assert [step.name for step in first[:4]] == ["FADD", "NOP", "FADD", "BAR.SYNC"]
    assert [step.name for step in second[:4]] == ["FADD", "BAR.SYNC", "FADD", "NOP"]
    assert halves(make_loop(*steps)) == [make_loop(*steps)]


def test_warps_half_a_turn_apart_hide_what_waits_beside_products():
    steps = [*PRODUCTS * 4, ("BAR.SYNC", 5), *[("FADD", 8)] * 16, ("BAR.SYNC", 5)]
    apart = halves(named(make_loop(*steps), _16="@P1 BAR.SYNC 0x0", _33="@!P1 BAR.SYNC 0x0"))
    together = cycles(make_loop(*steps), warps=8)
    assert Simulation(apart, 8, 1).run(instructions=400).cycles_a_turn < 0.85 * together


def test_a_warp_that_announces_itself_does_not_wait_for_its_partner():
    steps = ("BAR.ARV", 5), ("FADD", 4)
    announces = named(make_loop(*steps), _0="BAR.ARV R0, 0x40")
    waits = named(make_loop(("HMMA.1688.F32", 8), *steps), _1="BAR.SYNC R0, 0x40")
    simulation = Simulation([announces, waits], 2, 1)
    simulation.run(instructions=40)
    first, second = simulation.warps
    assert first.turns >= second.turns > 0


def test_an_instruction_without_a_known_cost_is_an_error():
    with pytest.raises(NotImplementedError, match="no cost of QUUX is known"):
        Simulation([make_loop(("QUUX", 1))], 1, 1)


def test_a_compiled_kernel_stays_below_its_throughput_bound():
    if not offline.compilers() or offline.cuobjdump() is None:
        pytest.skip("no NVRTC, cuobjdump or nvdisasm here: they come with the test extra on x86-64 Linux")
    variant = variants.forward(Kind(75, variants.FP16, 64, few_rows=True))
    *_, newest = offline.compilers().values()
    found = turing_sm.simulate_variant(variant, 64, offline.compiled(newest, variant, "sm_75"))
    assert 0.4 < found.useful < found.bound
    assert found.blocks == 3
    assert found.lowest < found.useful < found.highest
