"""verify bench's column of CUDA graphs: what is captured, when a replay counts, where it is shown. No GPU needed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.test_verify_bench import TINY
from verify import bench, graphs
from verify.bench_run import Plan, run
from verify.cli import main
from verify.contestants import Ours, PadSdpa
from verify.timing import Timing

DECODES = ["decode_1x8192", "decode_32x4096_paged"]


@pytest.fixture
def faithful(monkeypatch):
    """Replays that compute the call again."""
    monkeypatch.setattr(graphs, "capture", _faithful)


def _faithful(call, device):
    with call.around():
        out = call.run()

    def replay():
        with call.around():
            out.copy_(call.run())

    return graphs.Captured(replay, out)


def _stale(call, device):
    """Reads what it read when it was captured."""
    return graphs.Captured(lambda: None, call.run())


def _refused(call, device):
    raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


def _plan(*names, contestants=None, **settings):
    contestants = contestants or [Ours(), PadSdpa()]
    settings = {"device": "cpu", "dtype": torch.float32, "repeats": 2, "budget_s": 0.05, "graphs": True, **settings}
    return Plan([TINY[name] for name in names], contestants, **settings)


def _measured(plan):
    rows = [row for found in run(plan) for row in found]
    return {(row.workload, row.contestant): row for found in graphs.measured(plan, rows) for row in found}


def test_ours_and_the_rivals_are_timed_in_a_graph_where_no_gradients_are_wanted(faithful):
    found = _measured(_plan("cross_short_q", *DECODES))
    assert set(found) == {(workload, name) for workload in DECODES for name in ("default", "pad_sdpa")}
    for row in found.values():
        assert isinstance(row.graph, Timing) and row.forward and not row.graph_reason and not row.graph_wrong


def test_without_the_backward_every_workload_is_one_without_gradients(faithful):
    found = _measured(_plan("cross_short_q", "dropout_train", contestants=[Ours()], backward=False))
    assert [workload for workload, _ in found] == ["cross_short_q", "dropout_train"]
    assert all(row.graph for row in found.values())


def test_where_graphs_are_not_wanted_nothing_is_captured(monkeypatch):
    monkeypatch.setattr(graphs, "capture", _refused)
    assert _measured(_plan(*DECODES, graphs=False)) == {}


def test_a_capture_that_fails_keeps_the_eager_figures_and_gives_its_reason(monkeypatch):
    monkeypatch.setattr(graphs, "capture", _refused)
    row = _measured(_plan(DECODES[0]))[DECODES[0], "default"]
    assert row.graph is None and row.forward and not row.wrong and not row.graph_wrong
    assert row.graph_reason == "RuntimeError: operation not permitted when stream is capturing"


@pytest.mark.parametrize("name", [*DECODES, "skewed_causal"])
def test_a_replay_that_does_not_see_new_inputs_is_wrong_and_has_no_time(name, monkeypatch):
    monkeypatch.setattr(graphs, "capture", _stale)
    row = _measured(_plan(name, backward=False))[name, "default"]
    assert row.graph is None and row.graph_wrong and "another answer" in row.graph_reason


@pytest.mark.parametrize("stale", ["cache_seqlens", "block_table"])
def test_a_replay_with_old_lengths_or_pages_is_wrong(stale):
    workload = TINY["decode_32x4096_paged"]
    inputs = graphs.make_inputs(workload, "cpu", torch.float32)
    old = replace(inputs, **{stale: getattr(inputs, stale).clone()})
    assert isinstance(_job(workload, inputs, old), graphs.DifferentAnswer)
    assert not isinstance(_job(workload, inputs, inputs), graphs.Failed)


def _job(workload, inputs, replayed):
    """The call on `inputs`, while its graph reads `replayed`."""

    def capture(call, device):
        return _faithful(graphs.forward_job(Ours("chunked").prepare(workload, replayed), replayed), device)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(graphs, "capture", capture)
        return graphs._replay_job(Ours("chunked"), workload, inputs)


def test_trying_other_inputs_leaves_the_inputs_as_they_were(faithful):
    workload = TINY["decode_32x4096_paged"]
    inputs, untouched = (graphs.make_inputs(workload, "cpu", torch.float32) for _ in range(2))
    graphs._replay_job(Ours(), workload, inputs)
    for name in ("q", "k", "v", "cache_seqlens", "block_table"):
        assert torch.equal(getattr(inputs, name), getattr(untouched, name)), name


ARGUMENTS = ["bench", "--only", "decode_1x", "--repeats", "1", "--backends", "default", "--rivals", "pad_sdpa"]


@pytest.mark.parametrize(("capture", "code"), [(_faithful, 0), (_refused, 0), (_stale, 1)])
def test_terminal_markdown_and_json_say_what_a_graph_takes_or_why_there_is_none(
    capture, code, monkeypatch, tmp_path, capsys
):
    planned = bench.plan_from
    monkeypatch.setattr(bench, "plan_from", lambda arguments: replace(planned(arguments), graphs=True))
    monkeypatch.setattr(graphs, "capture", capture)
    saved, markdown = tmp_path / "a.json", tmp_path / "a.md"
    assert main([*ARGUMENTS, "--json", str(saved), "--markdown", str(markdown)]) == code
    rows = {(row["workload"], row["contestant"]): row for row in json.loads(saved.read_text())["rows"]}
    row = rows["decode_1x8192", "default"]
    reason = {_faithful: "", _refused: "operation not permitted", _stale: "another answer"}[capture]
    assert bool(row["graph"]) is not bool(reason) and reason in row["graph_reason"]
    written, shown = markdown.read_text(), " ".join(capsys.readouterr().out.split())
    for text in (written, shown):
        assert "in graph ms" in text and "replayed from a CUDA graph" in text and reason in text
    assert ("WRONG OR FAILED" in shown) is (code == 1)


def test_on_a_cpu_there_is_no_column_of_graphs(tmp_path):
    markdown = tmp_path / "a.md"
    assert main([*ARGUMENTS, "--markdown", str(markdown)]) == 0
    assert "graph" not in markdown.read_text()
