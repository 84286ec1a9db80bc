"""verify bench's ratios: whom a figure is held against."""

from __future__ import annotations

from verify import bench_report
from verify.bench_run import Row
from verify.judge import Check
from verify.timing import Timing


def _row(workload, contestant, forward=None, both=None, ok=True):
    times = (None if ms is None else Timing(ms, ms, ms, 3) for ms in (forward, both))
    ours, verdict = contestant == "default", Check("out", "fp64", 0.5 if ok else 2.0, 1.0)
    return Row(workload, contestant, ours, "", *times, verdict=verdict)


def _compared(*others, **ours):
    (found,) = bench_report.compared([_row("w", "default", **{"forward": 2.0, "both": 6.0} | ours), *others])
    return found


def test_a_ratio_is_theirs_over_ours_and_flash_attn_comes_before_pytorchs_build_of_it():
    real, aten = _row("w", "official", 1.0), _row("w", "aten_flash", 4.0, 3.0)
    assert _compared(real, aten).to_flash("forward") == 0.5
    assert _compared(real, aten).to_flash("both") == 0.5  # official has none: PyTorch's stands in
    assert _compared(_row("w", "official", 1.0, ok=False), aten).to_flash("forward") == 2.0
    assert _compared().to_flash("forward") is None


def test_the_fastest_other_way_that_is_right_is_the_one_to_be_compared_with():
    pad, plain = _row("w", "pad_sdpa", 8.0, 12.0), _row("w", "plain", 1.0, 18.0)
    found = _compared(pad, plain)
    assert (found.to_other("forward"), found.to_other("both")) == (0.5, 2.0)
    assert _compared(pad, _row("w", "plain", 1.0, ok=False)).to_other("forward") == 4.0
    table = bench_report.summary_table([found.mine, pad, plain])
    (row,) = (dict(zip(table.columns, row)) for row in table.rows)
    assert (row["fastest other"], row["to it"]) == ("plain / pad_sdpa", "0.50 / 2.00")


def test_our_backend_named_official_is_not_taken_for_flash_attn():
    ours = Row("w", "official", True, "official", Timing(1, 1, 1, 3))
    (found,) = bench_report.compared([_row("w", "default", 2.0), ours])
    assert found.mine.contestant == "default" and found.to_flash("forward") is None
