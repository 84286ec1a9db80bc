"""flash-attn-compat tune with the tests' own clock: its candidates, its results, and failures that must not end it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_attn_compat import backend_counts, cli, explain, flash_attn_func, reset_backend_counts, settings, tune
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import KernelError
from flash_attn_compat.backends.fused.choosing import enumeration, variants
from flash_attn_compat.backends.fused.choosing.kinds import (
    FP16,
    HEAD_DIMS,
    Hints,
    KernelFeatures,
    Kind,
    Sizes,
    choose_tile,
)
from flash_attn_compat.backends.fused.choosing.tiles import TWO_GROUPS, Tile
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.launching import grids
from flash_attn_compat.backends.fused.tuning import candidates, tuned
from flash_attn_compat.backends.fused.tuning.tuned import Card
from flash_attn_compat.backends.sdpa import Sdpa
from flash_attn_compat.card import NO_LIMITS, Limits
from flash_attn_compat.dispatch import call_cache
from flash_attn_compat.gpu_state import GpuState, Monitor
from flash_attn_compat.tune import Tuning
from tests import paper_gpu
from tests.forms.inputs import randn
from tests.forms.plain import pairwise, some_of
from tests.kernels import emulate, fused_on_cpu, offline
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.kernels.test_kernels import check
from tests.kernels.test_sizes import MASKS, TRAINED
from verify.examination import Examination
from verify.problems import Problem

GPU, CPU, HALF = "Tesla T4", torch.device("cpu"), torch.float16
FOUR_WARPS, EIGHT_WARPS = Tile(64, 4, 1, 2), Tile(64, 8, 1, 1)
Clock = Callable[[str, Sequence[Variant]], float]


_turing = paper_gpu.fixture(model=GPU, others=("torch_efficient",))


@pytest.fixture
def launches(_turing: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> LaunchRecord:
    monkeypatch.setattr(Sdpa, "capabilities", replace(Sdpa.capabilities, devices=frozenset({"mps"})))
    return _turing


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_CHANNELS", 256)


def tell(monkeypatch: pytest.MonkeyPatch, launches: LaunchRecord, clock: Clock) -> None:
    """clock: milliseconds by the backend and its launches"""

    def reading(run: tune.Run) -> float:
        before = len(launches.seen)
        reset_backend_counts()
        run()
        seen = [launch.variant for launch in launches.seen[before:]]
        return clock(next(iter(backend_counts()), "fused"), seen)

    monkeypatch.setattr(tune, "time_run", reading)


def tune_here(head_dim: int = 64, all_cases: bool = False) -> Tuning:
    found = Tuning(CPU, [head_dim], [HALF], 128, all_cases, batch=1)
    found.run_all()
    return found


def in_another_process() -> None:
    tuned._cards.clear()
    call_cache.forget()


def train(causal: bool = True) -> None:
    q, k, v = (randn(2, 80, 4, 64, seed=seed, dtype=HALF) for seed in range(3))
    flash_attn_func(q.requires_grad_(), k, v, causal=causal).sum().backward()


def has_four_warps(variant: Variant) -> bool:
    """Whether it is dkdv with FOUR_WARPS, which is no default."""
    return variant.entry == "dkdv" and variant.threads == 128 and ("STREAMED_ROWS", 64) in variant.macros


def by_warps(served: str, seen: Sequence[Variant]) -> float:
    """Four warps are best in dkdv; our forward is the fastest, and our backward the slowest."""
    if served != "fused":
        return 3.0
    times = {"dkdv": 4.0, "forward": 2.0}
    return sum(times.get(one.entry, 0.0) - has_four_warps(one) for one in seen)


def test_the_fastest_tile_and_backend_serve_all_later_calls(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(monkeypatch, launches, by_warps)
    found = tune_here()
    assert not found.failures
    assert found.card.tiles == {("dkdv", 64, "float16"): FOUR_WARPS}
    assert {(case, training): times for (case, _, _, training), times in found.card.times.items()} == {
        (case, training): {"fused": 5.0 if training else 2.0, "torch_efficient": 3.0}
        for case in ("full", "causal")
        for training in (False, True)
    }
    assert tuned.find_card(GPU) is None, "nothing counts before it is kept"
    assert tuned.store_card(found.card)
    in_another_process()
    q, k, v = (randn(2, 80, 4, 64, seed=seed, dtype=HALF) for seed in range(3))
    assert explain(flash_attn_func, q, k, v).backend == "fused"
    assert explain(flash_attn_func, q.clone().requires_grad_(), k, v).backend == "torch_efficient"
    monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", "1")
    train()
    assert has_four_warps([one.variant for one in launches.seen if one.variant.entry == "dkdv"][-1])


def test_the_clock_and_power_while_timing_go_into_the_card_and_its_file(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(monkeypatch, launches, by_warps)
    monkeypatch.setattr(Monitor, "read", lambda self: self.readings.append(GpuState(1200.0, 69.5)))
    found = tune_here()
    assert found.card.state == "clock 1,200 MHz (1,200 to 1,200), power 70 W (70 to 70)"
    assert set(found.card.clocks.values()) == {(1200.0, 69.5)} and found.card.clocks.keys() == found.card.times.keys()
    assert tuned.from_row(tuned.to_row(found.card)) == found.card
    assert found.card.state in found.summary()
    assert tuned.format_lines(found.card)[0].endswith(" at 1,200 MHz, 70 W")


def test_a_card_says_why_its_clock_and_power_are_unknown(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(monkeypatch, launches, by_warps)
    found = tune_here()
    assert found.card.state == "clock and power unknown: only NVIDIA GPUs have NVML"
    assert not found.card.clocks
    row = json.loads(tuned.to_row(found.card))
    del row["state"], row["times"][0]["clock_mhz"], row["times"][0]["power_w"]
    assert tuned.from_row(json.dumps(row)) == found.card._replace(state=""), "older files have none of the three"


def test_a_tile_must_be_faster_by_more_than_noise(launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, launches, lambda served, seen: 1.0 - 0.01 * any(map(has_four_warps, seen)))
    assert not tune_here().card.tiles


def test_failing_candidates_are_reported_and_the_others_are_timed(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = nvrtc.kernel

    def refuse(variant: Variant, device: int) -> nvrtc.Kernel:
        if has_four_warps(variant):
            raise KernelError("too many resources requested for launch")
        return kernel(variant, device)

    monkeypatch.setattr(nvrtc, "kernel", refuse)
    tell(monkeypatch, launches, by_warps)
    with pytest.warns(RuntimeWarning, match="too many resources"):
        found = tune_here()
    assert not found.card.tiles and len(found.card.times) == 4
    assert found.failures and all("too many resources" in one and "dkdv" in one for one in found.failures)
    assert not fused_on_cpu.FUSED._failures, "another tile's failure is not the kernel's"


def test_a_clock_or_rival_that_fails_is_no_verdict(launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(served: str, seen: Sequence[Variant]) -> float:
        if served != "fused":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB")
        return 1.0

    tell(monkeypatch, launches, clock)
    found = tune_here()
    assert not found.card.times and any("torch_efficient: CUDA out of memory" in one for one in found.failures)


def test_without_tensor_cores_every_kind_of_call_is_timed_beside_plain_pytorch(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(monkeypatch, launches, lambda served, seen: 1.0)
    found = tune_here(all_cases=True)
    assert {case for case, *_ in found.card.times} == set(tuned.CASES) and not found.failures
    assert all("chunked" in one and "reference" not in one for one in found.card.times.values())
    assert not any("chunked" in one for one in tune_here().card.times.values())


def test_a_kept_tile_that_is_none_of_the_candidates_is_not_taken(launches: LaunchRecord) -> None:
    """It may not fit, and then our kernels would not serve."""
    tiles = {("forward", 64, "float16"): Tile(64, 8, 4, 4), ("dkdv", 64, "float16"): FOUR_WARPS}
    tuned.store_card(Card(GPU, "", {}, {**tiles, ("dq", 128, "float16"): Tile(32, 8, 1, 1)}))
    train()
    assert [one.variant.threads for one in launches.seen] == [128, 256, 128, 128]


@pytest.mark.parametrize("name", ["softcap", "dropout", "few_rows", "window", "head_dim_v"])
def test_tuned_tiles_serve_kinds_like_the_timed_ones(name: str) -> None:
    kind = Kind(
        75,
        FP16,
        Sizes(64),
        KernelFeatures(local=True),
        Hints(tiles=(("forward", EIGHT_WARPS), ("dkdv", EIGHT_WARPS), ("dq", EIGHT_WARPS))),
    )
    for make in (variants.forward, variants.dkdv, variants.dq):
        assert make(kind).threads == make(kind.replace(alibi=True)).threads == 256
        other = kind.replace(**{name: 34 if name in ("window", "head_dim_v") else True})
        assert make(other) == make(other.replace(tiles=()))


# ---- the candidates

CANDIDATES = [
    (number, entry, D, tile)
    for number in (75, 90)
    for entry in candidates.ENTRIES
    for D in HEAD_DIMS
    for tile in candidates.candidate_tiles(entry, number, D)
    if tile != choose_tile(entry, Kind(number, FP16, Sizes(D), KernelFeatures(local=True)))
]


@pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())
@pytest.mark.parametrize(("number", "entry", "D", "tile"), some_of(CANDIDATES, 24), ids=str)
def test_candidates_fit_and_are_right(
    number: int, entry: str, D: int, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = getattr(variants, entry)(Kind(number, FP16, Sizes(D), hints=Hints(tiles=((entry, tile),))))
    assert variant.shared * (tile.min_blocks if number == 75 else 1) <= {75: 64, 90: 99}[number] * 1024
    launches = fused_on_cpu.emulate(monkeypatch, number)
    monkeypatch.setattr(tuned, "find_tiles", lambda *of: ((entry, tile),))
    problem = Problem(seqlens_q=(70,), seqlens_k=(83,), nheads_k=1, group=2, head_dim=D, dtype="float16", causal=True)
    verdict = Examination(replace(problem, backward=entry != "forward")).judge("fused")
    assert not verdict.failures and not verdict.refused, verdict
    assert variant.threads in [one.variant.threads for one in launches.seen if one.variant.entry == entry]


def test_turings_candidates_fit_its_registers() -> None:
    compilers = offline.compilers()
    if not compilers:
        pytest.skip("no NVRTC here: it comes with the test extra on x86-64 Linux")
    variant = variants.dkdv(
        Kind(75, FP16, Sizes(128), KernelFeatures(local=True), Hints(tiles=(("dkdv", Tile(16, 8, 1, 1)),)))
    )
    found = offline.compiled(compilers[max(compilers, key=float)], variant, "sm_75")
    assert list(offline.complaints(variant, found, 75)) == []


# ---- two groups of a forward's warps share rows and take alternate tiles of keys (cuda/groups.cuh)

# Rows and keys: tiles for one group alone, for both and an odd number of them; sequences without rows or without keys.
OF_GROUPS = (
    ((140,), (1,)), ((140,), (33,)), ((200,), (129,)), ((130,), (290,)), ((129, 0, 1, 77, 5), (70, 9, 99, 129, 0)),
)  # fmt: skip


@pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())
@pytest.mark.parametrize(
    ("head_dim", "dtype", "mask", "lengths", "splits"),
    some_of(pairwise((128, 120, 112), ("float16", "bfloat16"), ("full", "causal", "window"), OF_GROUPS, (1, 3)), 8),
)
def test_two_groups_of_warps_merge_their_results_of_alternate_tiles(
    head_dim: int, dtype: str, mask: str, lengths: tuple[tuple[int, ...], ...], splits: int,
    turing: LaunchRecord, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(grids, "count_splits", lambda *shapes: splits)
    monkeypatch.setattr(variants, "choose_tile", lambda *asked: TWO_GROUPS)
    rows, keys = lengths
    problem = replace(TRAINED, kind="varlen" if len(rows) > 1 else "dense", backward=False, **MASKS[mask])
    check(replace(problem, seqlens_q=rows, seqlens_k=keys, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype))
    assert any(("KEY_GROUPS", 2) in one.variant.macros for one in turing.seen)


@pytest.mark.parametrize("D", [112, 128])
def test_no_call_with_more_than_a_mask_by_position_takes_two_groups(D: int) -> None:
    """Even if `tune` found that tile: with other features the kernel spills, or skips tiles of its own."""
    found = set()
    for kind in enumeration.every_kind(75):
        if kind.D == D and not kind.features.bias_pairs:
            variant = variants.forward(kind.replace(tiles=(("forward", TWO_GROUPS),)))
            found |= {frozenset(variant.macros)} if ("KEY_GROUPS", 2) in variant.macros else set()
    features = {name for macros in found for name, value in macros if value} - {name for name, _ in TWO_GROUPS.macros()}
    assert features == {"D", "TYPE", "VEC", "LOCAL", "COPIED", "KEY_GROUPS"}
    assert all(("VEC", 8) in macros for macros in found)
    flex = variants.forward(Kind(75, FP16, Sizes(D), hints=Hints(tiles=(("forward", TWO_GROUPS),), flex=True)))
    assert ("KEY_GROUPS", 2) not in flex.macros


# ---- the command


@pytest.fixture
def command(launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> LaunchRecord:
    tell(monkeypatch, launches, by_warps)
    small = functools.partial(Tuning, batch=1)
    monkeypatch.setattr(tune, "plan_tuning", lambda dims, dtypes, seqlen: small(CPU, dims or [64], [HALF], seqlen))
    return launches


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("has_rich", [True, False])
def test_tune_shows_progress_and_keeps_prints_and_writes_its_results(
    has_rich: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["tune", "--head-dim", "64", "--seqlen", "128", "--json", str(tmp_path / "t4.json")]) == 0
    out, err = capsys.readouterr()
    assert "causal, head_dim 64, float16, training" in out and "torch_efficient 3 ms, fused 5 ms" in out
    assert "dkdv of head_dim 64, float16" in out and "4 warps" in out
    assert err.splitlines()[0].startswith("1/") and "head_dim 64, float16" in err
    card = tuned.from_row((tmp_path / "t4.json").read_text())
    in_another_process()
    assert tuned.find_card(GPU) == card and tuned.summarize(GPU)[1:] == tuned.format_lines(card)


@pytest.mark.usefixtures("command")
def test_the_command_fails_where_nothing_could_be_timed_or_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuned.kernel_files, "write", lambda name, payload: False)
    assert cli.main(["tune", "--seqlen", "128"]) == 1 and "could not be written" in capsys.readouterr().err
    monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", "0")
    assert cli.main(["tune", "--seqlen", "128"]) == 1
    assert "FLASH_ATTN_COMPAT_FUSED=0 forbids it" in capsys.readouterr().err


@pytest.fixture
def questions(command: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> list[Tuning]:
    """Of each tuning that began."""
    begun: list[Tuning] = []
    run_all = Tuning.run_all
    monkeypatch.setattr(Tuning, "run_all", lambda tuning: begun.append(tuning) or run_all(tuning))
    return begun


@pytest.mark.parametrize("name", ["", "missing/t4.json", "x" * 300, "null\0byte"])
def test_a_result_that_has_no_place_is_told_before_anything_is_timed(
    name: str, questions: list[Tuning], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tune", "--seqlen", "128", "--json", str(tmp_path / name)])
    assert "argument --json: cannot write" in capsys.readouterr().err.splitlines()[-1]
    assert not questions and not list(tmp_path.glob("*.json"))


def test_a_cache_that_keeps_nothing_is_told_before_anything_is_timed_unless_a_file_is_written(
    questions: list[Tuning], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", str(tmp_path / "file"))
    assert cli.main(["tune", "--seqlen", "128"]) == 1
    assert f"{tmp_path / 'file'} cannot be written" in capsys.readouterr().err and not questions
    cli.main(["tune", "--seqlen", "128", "--json", str(tmp_path / "t4.json")])
    assert len(questions) == 1 and tuned.from_row((tmp_path / "t4.json").read_text()).gpu == GPU


@pytest.mark.usefixtures("command")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_unwritable_output_loses_no_tuning_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["tune", "--seqlen", "128", "--json", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert "causal, head_dim 64" in out and "cannot write /dev/full: No space left on device" in err
    in_another_process()
    assert tuned.find_card(GPU) is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune"]) == 1 and "no CUDA GPU found" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--seqlen", "12"], ["--head-dim", "0"], ["--dtype", "float32"]])
def test_tuning_for_an_unsupported_target_is_a_usage_error(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tune", *arguments])


@pytest.mark.parametrize(
    ("gpu", "capability", "dtype"),
    [("GeForce GTX 1650", (7, 5), torch.float16), (GPU, (7, 5), torch.float16), (GPU, (8, 0), torch.bfloat16)],
)
def test_usual_shapes_follow_the_gpus_models(
    gpu: str, capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(nvrtc, "decline_reason", lambda: None)
    monkeypatch.setattr(settings, "capability", lambda device: capability)
    monkeypatch.setattr(settings, "gpu", lambda device: gpu)
    monkeypatch.setattr(tune, "measure_limits", lambda device, dtype: NO_LIMITS)
    found: Any = tune.plan_tuning([], [], 2048)
    assert (found.device.index, found.head_dims, found.dtypes) == (1, [64, 128], [dtype])
    assert found.all_cases == (gpu != GPU)
    assert tune.plan_tuning([96], ["bfloat16"], 512).dtypes == [torch.bfloat16]


@pytest.mark.parametrize(
    ("gib", "teraflops", "seqlen", "expected"),
    [
        (16, 10.0, 2048, 4),
        (16, 0.3, 2048, 4),
        (16, 0.04, 2048, 1),
        (1, 10.0, 4096, 4),
        (1, 10.0, 16384, 1),
        (1, 10.0, 2**20, None),
        (16, 0.001, 2048, None),
    ],
)
def test_a_batch_fits_the_gpus_memory_and_no_launch_takes_longer_than_it_may(
    gib: int, teraflops: float, seqlen: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_CHANNELS", 1024)
    limits = Limits(gib * 2.0**30, teraflops * 1e12)
    if expected is None:
        with pytest.raises(tune.CannotTune, match="choose a smaller --seqlen"):
            tune.find_batch(seqlen, limits)
    else:
        assert tune.find_batch(seqlen, limits) == expected


def test_a_fault_ends_the_tuning_with_the_advice_to_rerun(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clock(served: str, seen: Sequence[Variant]) -> float:
        if any(map(has_four_warps, seen)):
            raise nvrtc.ContextLost("dkdv broke this process's use of the GPU")
        return 1.0

    tell(monkeypatch, launches, clock)
    found = tune_here()
    assert len(found.failures) == 2 and found.failures[0].startswith("tiles of dkdv") and not found.card.times
    assert "dkdv broke" in found.failures[0] and "Run tune once more" in found.failures[1]
