"""verify bench's ratios and promises: whom a figure is held against, and what is called kept."""

from __future__ import annotations

import pytest

from verify import bench_report, thresholds
from verify.bench_run import Row
from verify.spot_check import Verdict
from verify.timing import Timing
from verify.workloads import DECODE, FULL


def _row(workload, contestant, forward, both=None, ok=True, ours=False, served_by="", memory_mib=None):
    def timing_of(ms):
        return None if ms is None else Timing(ms, ms, ms, 3)

    return Row(workload.name, contestant, ours, served_by, timing_of(forward), timing_of(both), memory_mib,
               Verdict(0.5 if ok else 2.0, "out"))  # fmt: skip


def test_the_official_figure_is_measured_else_aten_else_recorded():
    workload, decode = FULL[0], DECODE[0]
    both = {"official": _row(workload, "official", 3.0), "aten_flash": _row(workload, "aten_flash", 4.0)}
    assert bench_report.official(workload, both, "forward", True) == bench_report.Yardstick(3.0, "official")
    wrong = {**both, "official": _row(workload, "official", 3.0, ok=False)}
    assert bench_report.official(workload, wrong, "forward", True) == bench_report.Yardstick(4.0, "aten_flash")
    assert bench_report.official(workload, {}, "both", True) == bench_report.Yardstick(12.8, "recorded")
    assert bench_report.official(workload, {}, "both", False) is None
    aten = {"aten_flash": _row(decode, "aten_flash", 4.0)}
    assert bench_report.official(decode, aten, "forward", True) == bench_report.Yardstick(0.030, "recorded")


def test_ratios_are_theirs_over_ours():
    workload = FULL[0]
    rows = {
        "default": _row(workload, "default", 8.0, 40.0, ours=True, served_by="torch_efficient", memory_mib=140.0),
        "pad_sdpa": _row(workload, "pad_sdpa", 10.0, 80.0),
        "official": _row(workload, "official", 4.0, 10.0),
        "bare": _row(workload, "bare", 7.6),
    }
    found = bench_report.ratios(workload, rows, recorded_applies=False)
    assert found == thresholds.Ratios(
        "uniform_varlen", "torch_efficient", 0.5, 0.25, 0.5, 1.25, 2.0, 0.95, None, memory_mib=140.0
    )


def test_a_run_without_gradients_shows_no_recorded_time_with_them():
    workload = FULL[0]
    for both, shown in ((None, "3.42 r"), (20.0, "3.42 r / 12.8 r")):
        rows = [_row(workload, "default", 8.0, both, ours=True, served_by="torch_efficient")]
        table = bench_report.summary_table([workload], rows, recorded_applies=True)
        assert table.rows[0][list(table.columns).index("official ms")] == shown


def _promises(ratio=0.5, pad=2.0, bare=0.99, memory=10.0, **more):
    rows = [
        thresholds.Ratios(workload.name, "torch_efficient", ratio, ratio, None, pad, pad, bare, bare, memory)
        for workload in FULL
    ]
    rows += [thresholds.Ratios(workload.name, "torch_efficient", official=ratio) for workload in DECODE]
    return thresholds.judged(rows, {"default": more.get("host_us", 30.0)}, more.get("compiled", False))


def test_every_promise_is_met_by_figures_that_keep_it_and_unmet_by_others():
    assert not [line for line in _promises(ratio=0.8) if line.startswith("UNMET")]
    for broken, part in [
        ({"ratio": 0.37}, "geometric mean to official, forward: 0.370"),
        ({"ratio": 0.31}, "geometric mean to official, forward + backward: 0.310"),
        ({"ratio": 0.5, "compiled": True}, "geometric mean to official, forward: 0.500"),
        ({"ratio": 0.1}, "no workload below 0.12 of official, 13 of 13 workloads: alibi_bidirectional 0.100"),
        ({"pad": 0.9}, "never slower than the pad scheme, 13 of 13 workloads: alibi_bidirectional 0.900x"),
        ({"bare": 0.94}, "within 5 % of the bare kernel, 13 of 13 workloads: alibi_bidirectional 0.940"),
        ({"memory": 60.0}, "cross_short_q 60 MiB, at most 35"),
        ({"memory": 600.0}, "gemma_softcap 600 MiB, at most 512"),
        ({"ratio": 0.7}, "decode_32x4096: 0.700 of official, at least 0.75"),
        ({"ratio": 0.3}, "decode_1x8192_paged: 0.300 of official, at least 0.4"),
        ({"host_us": 49.0}, "host time of a tiny varlen call 49.0 us"),
    ]:
        unmet = [line for line in _promises(**{"ratio": 0.8, **broken}) if line.startswith("UNMET")]
        assert any(part in line for line in unmet), (broken, unmet)


@pytest.mark.parametrize("ratio", [0.9, 0.1])
def test_a_mean_over_fewer_than_all_workloads_is_open_whatever_it_is(ratio):
    row = thresholds.Ratios(FULL[0].name, "torch_efficient", official=ratio)
    (line,) = [line for line in thresholds.judged([row], {}, compiled=False) if "geometric mean" in line]
    assert line.startswith("open") and "1 of 13 workloads" in line


@pytest.mark.parametrize(("ratio", "verdict"), [(0.56, "met"), (0.54, "UNMET")])
def test_with_compilation_the_forward_is_held_to_the_promise_for_compilation(ratio, verdict):
    (line,) = [line for line in _promises(ratio=ratio, compiled=True) if "official, forward:" in line]
    assert line.startswith(verdict) and "at least 0.55 (aim 0.65)" in line


def test_the_pad_scheme_is_judged_only_where_it_was_in_the_run():
    assert any("pad scheme, 13 of 13" in line for line in _promises(pad=1.5))
    assert not any("pad scheme" in line for line in _promises(pad=None))


def test_torch_flash_is_judged_only_where_the_capability_is_not_forced(monkeypatch):
    row = thresholds.Ratios(FULL[0].name, "torch_flash", official=1.0, official_itself=0.9)
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    assert not any("torch_flash" in line for line in thresholds.judged([row], {}, compiled=False))
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CAPABILITY")
    assert any(
        line.startswith("UNMET") and "torch_flash" in line for line in thresholds.judged([row], {}, compiled=False)
    )
