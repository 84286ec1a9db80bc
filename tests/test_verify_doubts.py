"""verify bench: figures that cannot both be true are taken again, and are flagged where they stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from verify import bench, bench_report, bench_run
from verify.bench_run import Plan, run
from verify.cli import main
from verify.contestants import Contestant, plain
from verify.doubts import settled
from verify.timing import Timing
from verify.workloads import of_lengths

LENGTHS = (16, 32, 64)
STUB = Contestant("stub", plain, ours=True)


@pytest.fixture
def clock(monkeypatch):
    """What is read instead of a clock: a list of ms, by (seqlen, whether with gradients), used up but for its last."""
    readings: dict[tuple[int, bool], list[float]] = {}

    def time_together(jobs, device, repeats, budget_s, clock):
        found = {}
        for name, job in jobs.items():
            result = job.run()
            out = result if isinstance(result, torch.Tensor) else result[0]
            left = readings[out.shape[1], not isinstance(result, torch.Tensor)]
            ms = left.pop(0) if len(left) > 1 else left[0]
            found[name] = Timing(ms, ms, ms, 1)
        return found

    monkeypatch.setattr(bench_run, "time_together", time_together)
    monkeypatch.setattr(bench_run, "allocations", lambda *job: None)
    monkeypatch.setattr(bench_run, "free_memory", lambda: None)  # it collects garbage
    return readings


def plan(*lengths: int, backward: bool = False) -> Plan:
    return Plan(of_lengths(lengths, small=True), [STUB], "cpu", torch.float32, backward=backward)


@pytest.mark.parametrize(("second", "doubt"), [(1.0, False), (5.0, True)])
def test_a_forward_slower_than_with_its_backward_is_timed_again_and_flagged_if_it_stays(clock, second, doubt):
    clock[16, False], clock[16, True] = [9.0, second], [3.0]
    ((row,),) = run(plan(16, backward=True))
    assert row.forward.median_ms == second
    assert ("timed twice" in row.doubt) is doubt and ("timed twice" in bench_report.remarks(row)) is doubt


@pytest.mark.parametrize(
    ("times", "doubtful"),
    [
        ([[1.0], [4.0], [16.0]], []),
        ([[1.0], [1.0], [1.0]], []),  # the host's time
        ([[1.0], [400.0, 4.0], [16.0]], []),
        ([[900.0, 1.0], [4.0], [16.0]], []),
        ([[1.0], [400.0], [9000.0]], ["causal_16", "causal_32"]),
        ([[1.0], [4.0], [0.1]], ["causal_32", "causal_64"]),
    ],
)
def test_a_size_far_off_its_neighbours_is_timed_again_and_flagged_if_it_stays(clock, times, doubtful):
    for n, readings in zip(LENGTHS, times):
        clock[n, False] = [*readings]
    those = plan(*LENGTHS)
    rows = settled([row for found in run(those) for row in found], those)
    assert [row.workload for row in rows if row.doubt] == doubtful
    assert [row.forward.median_ms for row in rows] == [readings[-1] for readings in times]


def test_problems_that_differ_in_more_than_their_length_are_no_neighbours(clock):
    clock[16, False], clock[32, False] = [1.0], [9e9]
    short, long = of_lengths([16, 32], small=True)
    other = replace(plan(), workloads=[short, replace(long, causal=False)])
    rows = [row for found in run(other) for row in found]
    assert settled(rows, other) == rows


def test_the_command_names_its_columns_first_and_what_is_doubtful_last(clock, monkeypatch, capsys):
    for n, ms in zip((16, 32), (1.0, 900.0)):
        clock[n, False] = [ms]
    monkeypatch.setattr(bench, "ours", lambda name: replace(STUB, name="default"))
    assert main(["bench", "--lengths", "16", "32", "--forward-only", "--rivals", "none"]) == 0
    shown = capsys.readouterr().out
    said = ("device cpu: ", "and backward ms", "causal_16: ", "default on causal_32: DOUBTFUL")
    places = [shown.index(part) for part in said]
    assert places == sorted(places)


def test_a_curve_keeps_its_tokens_while_the_length_allows():
    assert [len(each.seqlens_q) for each in of_lengths([256, 1024, 4096], small=True)] == [4, 1, 1]
