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
        "default": _row(workload, "default", 8.0, 40.0, ours=True, served_by="fused", memory_mib=140.0),
        "pad_sdpa": _row(workload, "pad_sdpa", 10.0, 80.0),
        "official": _row(workload, "official", 4.0, 10.0, memory_mib=132.0),
    }
    found = bench_report.ratios(workload, rows, recorded_applies=False)
    assert found == thresholds.Ratios(
        "uniform_varlen", "fused", 0.5, 0.25, None, 1.25, 2.0, memory_mib=140.0, official_memory_mib=132.0
    )


def test_a_run_without_gradients_shows_no_recorded_time_with_them():
    workload = FULL[0]
    for both, shown in ((None, "3.42 r"), (20.0, "3.42 r / 12.8 r")):
        rows = [_row(workload, "default", 8.0, both, ours=True, served_by="torch_efficient")]
        table = bench_report.summary_table([workload], rows, recorded_applies=True)
        assert table.rows[0][list(table.columns).index("official ms")] == shown


def _promises(ratio=0.9, both=0.7, pad=2.0, memory=10.0, both_memory=10.0, decode=1.2, graph=1.2, host_us=29.0):
    rows = [
        thresholds.Ratios(workload.name, "fused", ratio, both, None, pad, pad, memory, 10.0, both_memory, 10.0)
        for workload in FULL
    ]
    rows += [thresholds.Ratios(workload.name, "fused", decode, official_graph=graph) for workload in DECODE]
    return thresholds.judged(rows, {"default": host_us})


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        ({"ratio": 0.79}, "geometric mean to official, forward: 0.790"),
        ({"both": 0.61}, "geometric mean to official, forward + backward: 0.610"),
        ({"ratio": 0.59}, "no forward below 0.6 of official, 13 of 13 workloads: alibi_bidirectional 0.590"),
        ({"both": 0.39}, "no forward + backward below 0.4 of official, 13 of 13 workloads: alibi_bidirectional 0.390"),
        ({"pad": 0.9}, "never slower than the pad scheme: alibi_bidirectional 0.900x"),
        ({"memory": 15.1}, "cross_short_q 15 MiB, official 10"),
        ({"both_memory": 15.1}, "cross_short_q 15 MiB, official 10"),
        ({"decode": 0.99}, "decode_32x4096: 0.990 of official, 1.200 in a graph"),
        ({"graph": 0.99}, "decode_1x8192_paged: 1.200 of official, 0.990 in a graph"),
        ({"host_us": 31.0}, "host time of a tiny varlen call 31.0 us"),
    ],
)
def test_every_promise_is_met_by_figures_that_keep_it_and_unmet_by_others(monkeypatch, broken, part):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    assert not [line for line in _promises() if line.startswith("UNMET")]
    unmet = [line for line in _promises(**broken) if line.startswith("UNMET")]
    assert any(part in line for line in unmet), unmet


def test_where_the_capability_is_not_forced_the_means_are_higher(monkeypatch):
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CAPABILITY", raising=False)
    unmet = [line for line in _promises(ratio=0.96, both=0.92) if line.startswith("UNMET")]
    assert len(unmet) == 2 and all("geometric mean" in line for line in unmet)


@pytest.mark.parametrize("ratio", [0.99, 0.1])
def test_a_mean_over_fewer_than_all_workloads_is_open_whatever_it_is(ratio):
    row = thresholds.Ratios(FULL[0].name, "fused", official=ratio)
    (line,) = [line for line in thresholds.judged([row], {}) if "geometric mean" in line]
    assert line.startswith("open") and "1 of 13 workloads" in line


def test_the_pad_scheme_is_judged_only_where_it_was_in_the_run():
    assert any("pad scheme" in line for line in _promises(pad=1.5))
    assert not any("pad scheme" in line for line in _promises(pad=None))
