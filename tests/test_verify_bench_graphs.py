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


def _faithful(call, device):
    """Computes the call again."""
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


def _measured(names, backward):
    settings = {"device": "cpu", "dtype": torch.float32, "repeats": 1, "budget_s": 0.01, "graphs": True}
    plan = Plan([TINY[name] for name in names], [ours(), RIVALS["pad_sdpa"]], **settings, backward=backward)
    rows = [row for found in run(plan) for row in found]
    graphs.add_graphs(plan, rows)
    return {(row.workload, row.contestant): row for row in rows}


def test_what_wants_no_gradients_is_timed_in_a_graph_too(monkeypatch):
    monkeypatch.setattr(graphs, "capture", _faithful)
    for backward, expected in ((True, DECODES[:1]), (False, ["cross_short_q", *DECODES[:1]])):
        found = _measured(["cross_short_q", *DECODES[:1]], backward)
        timed = {key for key, row in found.items() if row.graph}
        assert timed == {(workload, name) for workload in expected for name in ("default", "pad_sdpa")}
        assert all(row.forward and not row.graph_reason and not row.graph_wrong for row in found.values())


@pytest.mark.parametrize("name", [*DECODES, "skewed_causal"])
def test_a_replay_that_does_not_see_new_inputs_is_wrong_and_has_no_time(name, monkeypatch):
    monkeypatch.setattr(graphs, "capture", _stale)
    row = _measured([name], backward=False)[name, "default"]
    assert row.graph is None and row.graph_wrong and "another answer" in row.graph_reason


@pytest.mark.parametrize("stale", ["cache_seqlens", "block_table", None])
def test_a_replay_with_old_lengths_or_pages_is_wrong(stale, monkeypatch):
    workload = TINY["decode_32x4096_paged"]
    given = workload.call("cpu", torch.float32)
    replayed = replace(given, args={**given.args, **({stale: given.args[stale].clone()} if stale else {})})

    def capture(call, device):
        return _faithful(graphs.forward_job(ours("chunked").prepare(workload, replayed), replayed), device)

    monkeypatch.setattr(graphs, "capture", capture)
    job = graphs.replay_job(ours("chunked"), workload, given)
    assert (job is graphs.DIFFERENT) is bool(stale) and isinstance(job, graphs.Failed) is bool(stale)


@pytest.mark.parametrize(
    ("capture", "reason"),
    [(_faithful, ""), (_refused, "RuntimeError: operation not permitted when stream is capturing"),
     (_stale, "a replay on other inputs gives another answer")],
)  # fmt: skip
def test_terminal_markdown_and_json_say_what_a_graph_takes_or_why_there_is_none(
    capture, reason, monkeypatch, tmp_path, capsys
):
    planned = bench.plan_from
    monkeypatch.setattr(bench, "plan_from", lambda arguments: replace(planned(arguments), graphs=True))
    monkeypatch.setattr(bench, "SMALL", (TINY["decode_1x8192"],))
    monkeypatch.setattr(graphs, "capture", capture)
    saved, markdown = tmp_path / "a.json", tmp_path / "a.md"
    arguments = ["bench", "--repeats", "1", "--rivals", "none", "--json", str(saved), "--markdown", str(markdown)]
    assert main(arguments) == (1 if capture is _stale else 0)
    (row,) = json.loads(saved.read_text())["rows"]
    assert row["forward"] and bool(row["graph"]) is not bool(reason) and row["graph_reason"].startswith(reason)
    shown = " ".join(capsys.readouterr().out.split())
    for text in (markdown.read_text(), shown):
        assert reason in text if reason else "in graph" in text
    assert ("WRONG OR FAILED" in shown) is (capture is _stale)
