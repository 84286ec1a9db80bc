"""verify bench's calls in CUDA graphs, without a GPU: captures, right replays, and their report."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch

from tests.verify.test_bench import TINY
from verify import bench, graphs
from verify.bench_run import Plan, Row, run
from verify.cli import main
from verify.contestants import RIVALS, Contestant, Prepared, ours

BOTH = ours(), RIVALS["pad_sdpa"]
DECODE, PAGED = "decode_1x8192", "decode_32x4096_paged"


def _faithful(call, device):
    """Computes the call again."""
    with call.around():
        out = call.run()

    def replay():
        with call.around():
            out.copy_(call.run())

    return replay, out


def _stale(call, device):
    """A replay that returns the captured result again."""
    return (lambda: None), call.run()


def _refused(call, device):
    raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


def _graphed(names, backward=False, contestants=BOTH) -> dict[tuple[str, str], Row]:
    settings = {"device": "cpu", "dtype": torch.float32, "repeats": 1, "budget_s": 0.01, "graphs": True}
    plan = graphs.graphed(Plan([TINY[name] for name in names], contestants, **settings, backward=backward))
    return {(row.workload, row.contestant): row for each in plan.workloads for row in run(plan, each)}


def test_workloads_without_gradients_and_dropout_are_timed_in_a_graph_too(monkeypatch):
    monkeypatch.setattr(graphs, "capture", _faithful)
    for backward, expected in ((True, [DECODE]), (False, ["cross_short_q", DECODE])):
        found = _graphed(["cross_short_q", "dropout_train", DECODE], backward)
        assert set(found) == {(f"{name} in a graph", who) for name in expected for who in ("default", "pad_sdpa")}
        assert all(row.forward and row.verdict.ok and not row.reason for row in found.values())


@pytest.mark.parametrize("name", [DECODE, PAGED, "skewed_causal"])
def test_a_replay_that_does_not_see_new_inputs_is_wrong(name, monkeypatch):
    monkeypatch.setattr(graphs, "capture", _stale)
    assert _graphed([name])[f"{name} in a graph", "default"].wrong


@pytest.mark.parametrize("stale", ["cache_seqlens", "block_table"])
def test_a_replay_with_old_lengths_or_pages_is_wrong(stale, monkeypatch):
    monkeypatch.setattr(graphs, "capture", _faithful)

    def prepare(workload, given):
        """At the first call, which is that of the capture, it looks at one of its inputs for the last time."""
        seen = {}

        def attention(q, k, v):
            seen.setdefault(stale, given.args[stale].clone())
            then = replace(given, args={**given.args, **seen})
            return ours("chunked").prepare(workload, then).run(q, k, v)

        return Prepared(attention)

    assert _graphed([PAGED], contestants=[Contestant("forgetful", prepare, ours=True)])[
        f"{PAGED} in a graph", "forgetful"
    ].wrong


def test_a_captured_append_leaves_no_row_in_other_sequences_pages():
    given = TINY[f"{PAGED}_append"].call("cpu", torch.float32, 0)
    held = {name: given.args[name].clone() for name in given.caches}
    run = ours("chunked").prepare(TINY[f"{PAGED}_append"], given).run
    for name, rows in held.items():
        given.args[name].copy_(rows)
    with graphs.other_inputs(given):
        run(*given.qkv)
    assert all(torch.equal(given.args[name], rows) for name, rows in held.items())


def test_a_graphs_inputs_live_as_long_as_its_replays(monkeypatch):
    monkeypatch.setattr(graphs, "capture", lambda call, device: ((lambda: None), call.run()))
    masks = []

    def prepare(workload, given):
        mask = torch.ones(1)
        masks.append(weakref.ref(mask))
        return Prepared(lambda q, k, v: q * mask)

    workload = TINY[DECODE]
    prepared = graphs.in_graph(Contestant("masked", prepare), workload, workload.call("cpu", torch.float32))
    gc.collect()
    assert prepared and masks[0]() is not None


REASON = "cannot be captured: RuntimeError: operation not permitted when stream is capturing"


@pytest.mark.parametrize(("capture", "verdict"), [(_faithful, "PASS"), (_refused, REASON), (_stale, "WRONG OR FAILED")])
def test_terminal_and_json_have_the_graphs_time_or_the_reason_against_it(
    capture, verdict, monkeypatch, tmp_path, capsys
):
    planned = bench.plan_from
    monkeypatch.setattr(bench, "plan_from", lambda arguments: replace(planned(arguments), graphs=True))
    monkeypatch.setattr(bench, "SMALL", (TINY[DECODE],))
    monkeypatch.setattr(graphs, "capture", capture)
    saved = tmp_path / "a.json"
    assert main(["bench", "--repeats", "1", "--rivals", "none", "--json", str(saved)]) == (capture is _stale)
    eager, graph = json.loads(saved.read_text())["rows"]
    assert (eager["workload"], graph["workload"]) == (DECODE, f"{DECODE} in a graph")
    assert eager["forward"] and bool(graph["forward"]) is (capture is not _refused)
    assert verdict in " ".join(capsys.readouterr().out.split())
