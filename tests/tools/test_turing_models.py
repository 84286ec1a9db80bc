"""Models of Turing: benchmarks.turing_sm's control bits and cycles, published speeds, and benchmarks.kernel_ladder."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import kernel_ladder, turing_sm
from benchmarks.kernel_ladder import TODAY, Measured, Model, make_variant, pack_argument
from benchmarks.kernel_report import Pipes
from benchmarks.turing_sm import published
from benchmarks.turing_sm.machine import GEFORCE, T4, Simulation
from benchmarks.turing_sm.machine_code import Instruction, decode_control, follow, halves, main_loop, parse, usual_path
from benchmarks.turing_sm.published import PEER, TOKENS, clock_factors, compare, simulated_speed
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, Hints, Kind, Sizes
from tests.forms.plain import some_of
from tests.kernels import emulate, fused_on_cpu, offline
from tests.kernels.emulate import Rules, compile_kernel
from verify.timing import Failed, Timing

compiled = pytest.mark.skipif(
    not offline.compilers() or offline.cuobjdump() is None,
    reason="no NVRTC, cuobjdump or nvdisasm here: they come with the test extra on x86-64 Linux",
)
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
    phases = turing_sm.simulate_phases([IN_TURNS], 4, 2, instructions=1200)
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


@compiled
def test_a_compiled_kernel_stays_below_its_throughput_bound(monkeypatch):
    monkeypatch.setattr(turing_sm, "OFFSETS", 3)  # another test simulates all eight
    variant = variants.forward(Kind(75, FP16, Sizes(64), hints=Hints(few_rows=True)))
    *_, newest = offline.compilers().values()
    found = turing_sm.simulate_variant(variant, 64, offline.compiled(newest, variant, "sm_75"))
    assert 0.4 < found.useful < found.bound
    assert found.blocks == 3
    assert found.lowest < found.useful < found.highest


# ---------------------------------------------------------------- benchmarks.turing_sm.published

CELLS = list(published.JUNE)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_kernels_of_one_panel_and_length_changed_alike_between_the_charts(cell):
    factors = clock_factors(cell).values()
    assert max(factors) / min(factors) < 1.08


def test_panels_and_lengths_changed_by_up_to_a_third_so_they_do_not_compare():
    factors = [factor for cell in CELLS for factor in clock_factors(cell).values()]
    assert min(factors) < 1.0 and max(factors) > 1.3


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("is_meant", "charts", "bound"),
    [
        (lambda pair: pair.alike, 2, 0.08),
        (lambda pair: pair.one[0] == "backward" and pair.other[0] == "forward", 2, 0.08),
        (lambda pair: pair.one[1:] == (64, PEER) and pair.other[1:] == (128, PEER), 1, 0.06),
    ],
    ids=["rivals of one panel", "a backward beside its forward", "one kernel's head dims, in June"],
)
def test_the_simulation_is_within_some_hundredths_of_the_charts(is_meant, charts, bound, tokens):
    found = [pair for pair in compare(tokens) if is_meant(pair)]
    assert len(found) == 2 and all(max(pair.distances[:charts]) < bound for pair in found)


def test_a_backward_counts_five_of_its_seven_products(monkeypatch):
    monkeypatch.setattr(published, "SIMULATED", {("dkdv", 64): {PEER: 1.0}, ("dq", 64): {PEER: 1.0}})
    assert simulated_speed("backward", 64, PEER) == pytest.approx(5 / 7)


def test_the_command_prints_a_row_for_each_cell_and_each_ratio(capsys):
    assert turing_sm.main(["--published"]) == 0
    factors, ratios = capsys.readouterr().out.split("\n\n")
    assert len(factors.splitlines()) == 2 + len(CELLS)
    assert len(ratios.strip().splitlines()) == 2 + len(TOKENS) * len(published.PAIRS)


# ---------------------------------------------------------------- benchmarks.kernel_ladder

STEPS = range(TODAY)  # tests/kernels/test_kernels.py runs today's kernel
emulated = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())


def emulate_step(step: int, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, int]:
    """Return the result and the number of bank conflicts."""
    kernel, out = make_variant(step, q.shape[-1], causal), torch.full_like(q, torch.nan)
    blocks, packed = pack_argument(kernel, q, k, v, out, causal)
    emulated_kernel = compile_kernel(kernel.source, kernel.entry, dict(kernel.macros))
    rules = Rules(number=75, truncates=True)
    return out, emulated_kernel.launch(packed, blocks, kernel.threads, kernel.shared, (q, k, v, out), rules)


def compute_in_fp64(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention in fp64; rows that see no key are 0."""
    group, (seqlen_q, seqlen_k) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
        scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(), v.double())


@emulated
@pytest.mark.parametrize(
    ("causal", "step", "head_dim"),
    [
        *((False, step, 64) for step in STEPS),
        *some_of(((True, step, 64) for step in STEPS), 4),
        *some_of([(True, 8, 128), (False, 8, 128), (False, 3, 128), (True, 3, 128)], 4),
    ],
)
def test_each_step_computes_attention_of_odd_lengths_and_grouped_heads(causal: bool, step: int, head_dim: int) -> None:
    for seqlen_q, seqlen_k in ((37, 75), (67, 35))[: 1 + causal]:  # causal, more rows than keys: some rows see none
        q = torch.randn(1, seqlen_q, 2, head_dim).half() * 4  # large: maxima rise late
        k, v = (torch.randn(1, seqlen_k, 1, head_dim).half() for _ in range(2))
        out, _ = emulate_step(step, q, k, v, causal)
        torch.testing.assert_close(out.double(), compute_in_fp64(q, k, v, causal), rtol=2e-3, atol=2e-3)


@emulated
def test_swizzled_tiles_have_no_bank_conflicts_and_plain_tiles_have_as_many_as_the_model_assumes() -> None:
    q, k, v = (torch.randn(1, 64, 1, 64).half() for _ in range(3))
    conflicts = {step: emulate_step(step, q, k, v, False)[1] for step in (5, 6, 7, 8)}
    assert [conflicts[step] for step in (6, 7, 8)] == [0, 0, 0]
    products = 4 * 64  # of S, and as many of O, by the block's four warps
    # Words of eight rows, or of four rows and two lanes each, lie in four banks: 28 of 32 lanes clash with another one.
    # A product of S loads one such word, a product of O two.
    assert conflicts[5] == products * 3 * 28


@compiled
@pytest.mark.parametrize(("step", "head_dim"), some_of([*((step, 64) for step in STEPS), (8, 128)], 5))
def test_each_step_fits_turing_and_the_model_counts_its_products(step: int, head_dim: int) -> None:
    found = kernel_ladder.apply_model(step, head_dim, causal=True)
    assert found is not None and found.spilled == 0
    kernel = make_variant(step, head_dim, True)
    assert found.registers * kernel.threads <= offline.REGISTERS and kernel.shared <= offline.SHARED_MEMORY[75]
    if step >= 4:
        assert found.pipes.tensor == 16 * head_dim
    else:
        products = 2 * 2 * head_dim * 64 / 4 * 2  # 2 warps, 64 keys, on one of four quarters in 2 cycles
        assert found.pipes.tensor == 0 and products * (1.5 if step == 0 else 1) <= found.pipes.fma < 2 * products
    assert 0.02 < found.share <= 1


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def make_model(share: float) -> Model:
    return Model(Pipes(1024.0, 1024.0 / share, 1.0, 1.0, 1.0, 1.0), share, 255, 0)


def make_options(seqlen: int, causal: bool) -> argparse.Namespace:
    return argparse.Namespace(batch=2, heads=2, seqlen=seqlen, head_dim=64, causal=causal, repeats=1)


def test_each_step_and_todays_kernel_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, number=75)
    found = kernel_ladder.measure(make_options(35, True), 1.0, "cpu")
    assert [kernel_ladder.describe_fault(each) for each in found] == [""] * (TODAY + 1)
    assert all(each.tflops == each.share > 0 for each in found)
    assert {*launches.entries} == {"ladder", "forward"}


@compiled
def test_the_loop_that_measures_the_peak_is_four_products_and_little_else() -> None:
    compiler = next(reversed(offline.compilers().values()))
    loop = offline.main_loop(offline.instructions(offline.compiled(compiler, kernel_ladder.PEAK, "sm_75").cubin))
    products = sum(count for name, count in loop.items() if name.startswith("HMMA.1688.F32"))
    assert products and products % 4 == 0 and sum(loop.values()) < 4 * products


def test_a_step_whose_answer_is_wrong_or_that_fails_is_named_and_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = Timing(2.0, 2.0, 2.0, 1)
    right, wrong = Measured(timing, 1e-4, 5.0, 0.5), Measured(timing, 0.1, 5.0, 0.5)
    failed = Measured(Failed("out of memory"), math.inf, 0.0, 0.0)
    monkeypatch.setattr(kernel_ladder, "apply_model", lambda *what: None)
    monkeypatch.setattr(kernel_ladder, "describe", lambda devices: {})
    monkeypatch.setattr(kernel_ladder, "measure_peak", lambda: 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    for found, code in (([right] * 10, 0), ([*[right] * 8, wrong, failed], 1)):
        monkeypatch.setattr(kernel_ladder, "measure", lambda *what: found)
        assert kernel_ladder.main([]) == code
    said = capsys.readouterr().out
    assert "step 8: the answer is off by 0.1" in said and "step 9: out of memory" in said and "step 7: " not in said


def test_without_a_gpu_the_table_and_the_file_have_the_models_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_ladder, "apply_model", lambda step, *what: make_model(0.05 * (1 + step)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    saved = tmp_path / "ladder.json"
    assert kernel_ladder.main(["--json", str(saved)]) == 0
    said = capsys.readouterr().out
    assert "| 1 | online softmax: every score once | 255 | shared | 10,240 | 2.00 | 0.100 |" in said
    assert "nothing was timed" in said
    rows = json.loads(saved.read_text())["rows"]
    assert [row["model"]["pipes"]["shared"] for row in rows][:2] == [20480, 10240] and not any(
        row["gpu"] for row in rows
    )


def test_without_a_gpu_and_without_compilers_the_benchmark_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_ladder, "apply_model", lambda *what: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernel_ladder.main([]) == 1 and "needs a CUDA GPU, or NVRTC" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "change"), [
    ("k", lambda x: x.float()),
    ("v", lambda x: x[:, :-1]),
    ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    ("out", lambda x: x[..., :32].contiguous()),
])  # fmt: skip
def test_tensors_that_the_kernels_cannot_read_are_refused_by_name(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    given = {each: torch.zeros(1, 40, 2, 64, dtype=torch.half) for each in ("q", "k", "v", "out")}
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=f"^{name} must be contiguous fp16"):
        pack_argument(make_variant(6, 64, False), **given, causal=False)
