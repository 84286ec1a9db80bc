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
from verify.contestants import RIVALS, ours

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

    return replay, out


def _stale(call, device):
    """Reads what it read when it was captured."""
    return (lambda: None), call.run()


def _refused(call, device):
    raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


def _plan(*names, contestants=None, **settings):
    contestants = contestants or [ours(), RIVALS["pad_sdpa"]]
    settings = {"device": "cpu", "dtype": torch.float32, "repeats": 1, "budget_s": 0.01, "graphs": True, **settings}
    return Plan([TINY[name] for name in names], contestants, **settings)


def _measured(plan):
    rows = [row for found in run(plan) for row in found]
    graphs.add_graphs(plan, rows)
    return {(row.workload, row.contestant): row for row in rows}


def test_what_wants_no_gradients_is_timed_in_a_graph_too(faithful):
    for backward, expected in ((True, DECODES[:1]), (False, ["cross_short_q", *DECODES[:1]])):
        found = _measured(_plan("cross_short_q", *DECODES[:1], backward=backward))
        assert {key for key, row in found.items() if row.graph} == {
            (workload, name) for workload in expected for name in ("default", "pad_sdpa")
        }
        assert all(row.forward and not row.graph_reason and not row.graph_wrong for row in found.values())


@pytest.mark.parametrize("name", [*DECODES, "skewed_causal"])
def test_a_replay_that_does_not_see_new_inputs_is_wrong_and_has_no_time(name, monkeypatch):
    monkeypatch.setattr(graphs, "capture", _stale)
    row = _measured(_plan(name, backward=False))[name, "default"]
    assert row.graph is None and row.graph_wrong and "another answer" in row.graph_reason


@pytest.mark.parametrize("stale", ["cache_seqlens", "block_table"])
def test_a_replay_with_old_lengths_or_pages_is_wrong(stale):
    workload = TINY["decode_32x4096_paged"]
    inputs = workload.call("cpu", torch.float32)
    old = replace(inputs, args={**inputs.args, stale: inputs.args[stale].clone()})
    assert _job(workload, inputs, old) is graphs.DIFFERENT
    assert not isinstance(_job(workload, inputs, inputs), graphs.Failed)


def _job(workload, inputs, replayed):
    """The call on `inputs`, while its graph reads `replayed`."""

    def capture(call, device):
        return _faithful(graphs.forward_job(ours("chunked").prepare(workload, replayed), replayed), device)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(graphs, "capture", capture)
        return graphs.replay_job(ours("chunked"), workload, inputs)


ARGUMENTS = ["bench", "--repeats", "1", "--rivals", "pad_sdpa"]


@pytest.mark.parametrize(("capture", "code"), [(_faithful, 0), (_refused, 0), (_stale, 1)])
def test_terminal_markdown_and_json_say_what_a_graph_takes_or_why_there_is_none(
    capture, code, monkeypatch, tmp_path, capsys
):
    planned = bench.plan_from
    monkeypatch.setattr(bench, "plan_from", lambda arguments: replace(planned(arguments), graphs=True))
    monkeypatch.setattr(bench, "SMALL", (TINY["decode_1x8192"],))
    monkeypatch.setattr(graphs, "capture", capture)
    saved, markdown = tmp_path / "a.json", tmp_path / "a.md"
    assert main([*ARGUMENTS, "--json", str(saved), "--markdown", str(markdown)]) == code
    rows = {(row["workload"], row["contestant"]): row for row in json.loads(saved.read_text())["rows"]}
    row = rows["decode_1x8192", "default"]
    reason = {_faithful: "", _refused: "operation not permitted", _stale: "another answer"}[capture]
    assert bool(row["graph"]) is not bool(reason) and reason in row["graph_reason"]
    written, shown = markdown.read_text(), " ".join(capsys.readouterr().out.split())
    for text in (written, shown):
        assert reason in text if reason else "in graph" in text
    assert ("WRONG OR FAILED" in shown) is (code == 1)


def test_on_a_cpu_there_is_no_column_of_graphs(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SMALL", (TINY["decode_1x8192"],))
    markdown = tmp_path / "a.md"
    assert main([*ARGUMENTS, "--markdown", str(markdown)]) == 0
    assert "graph" not in markdown.read_text()
