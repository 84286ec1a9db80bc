"""verify bench: contestants, wrong answers, figures and reports, and the same calls in CUDA graphs."""

from __future__ import annotations

import gc
import json
import math
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from flash_attn_compat.gpu_state import GpuState, Monitor
from tests.forms.plain import some
from verify import bench, bench_report, graphs, spot_check
from verify.bench_run import Plan, Row, run
from verify.cli import main
from verify.contestants import RIVALS, Contestant, Prepared, ours, plain
from verify.errors import NotSupported
from verify.judge import Check
from verify.spot_check import check, pieces
from verify.timing import Allocations, Failed, Job, Timing, allocations, fastest, time_together
from verify.workloads import DECODE, FULL, Workload, of_lengths, shrunk

TINY = {one.name: replace(shrunk(one, batch=32, seqlen=64, heads=8), name=one.name) for one in (*FULL, *DECODE)}
QUICK = ["bench", "--repeats", "2", "--backends", "default,chunked"]


@pytest.fixture
def cross_short_q(monkeypatch):
    """The only workload there is."""
    monkeypatch.setattr(bench, "SMALL", (TINY["cross_short_q"],))


# ---- the command, on tiny problems -----------------------------------------------------------------------------------


def test_a_run_shows_and_saves_every_figure_with_where_it_was_obtained(cross_short_q, tmp_path, capsys):
    saved, markdown = tmp_path / "a.json", tmp_path / "a.md"
    assert main([*QUICK, "--json", str(saved), "--markdown", str(markdown)]) == 0
    data = json.loads(saved.read_text(encoding="utf-8"))
    rows = {row["contestant"]: row for row in data["rows"]}
    assert {"default", "chunked", "pad_sdpa", "plain"} <= set(rows)
    for name in ("default", "pad_sdpa"):
        row = rows[name]
        assert row["forward"]["median_ms"] > 0 and row["both"]["median_ms"] > 0
        assert row["verdict"]["ok"] and row["memory_mib"] > 0
    assert rows["default"]["served_by"]
    assert {"device cpu", "torch", "date", "dtype"} <= set(data["environment"])
    for text in (capsys.readouterr().out, markdown.read_text(encoding="utf-8")):
        told = "geometric mean speed-up over the fastest way without flash-attn"
        assert "cross_short_q" in text and "pad_sdpa" in text and told in text


def test_rows_and_a_closing_line_have_the_clock_and_power_of_their_workload(
    cross_short_q, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(Monitor, "read", lambda self: self.readings.append(GpuState(1200.0, 69.5)))
    saved = tmp_path / "a.json"
    assert main([*QUICK, "--forward-only", "--rivals", "none", "--json", str(saved)]) == 0
    timed = [row for row in json.loads(saved.read_text(encoding="utf-8"))["rows"] if row["forward"]]
    assert timed and {(row["clock_mhz"], row["power_w"]) for row in timed} == {(1200.0, 69.5)}
    told = "the GPU while it was timed: clock 1,200 MHz (1,200 to 1,200), power 70 W (70 to 70)"
    assert told in " ".join(capsys.readouterr().out.split())
    assert main([*QUICK, "--forward-only", "--rivals", "none", "--against", str(saved), "--tolerance", "1e9"]) == 0


def test_against_names_slower_rows_and_exits_with_1(cross_short_q, tmp_path, capsys):
    saved = tmp_path / "a.json"
    arguments = [*QUICK, "--forward-only", "--rivals", "none"]
    assert main([*arguments, "--json", str(saved)]) == 0
    data = json.loads(saved.read_text(encoding="utf-8"))
    assert main([*arguments, "--against", str(_scaled(data, 1e6, tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert "nothing of ours is slower by more than 10%" in shown and "graph" not in shown  # which a CPU has not
    assert main([*arguments, "--against", str(_scaled(data, 1e-6, tmp_path))]) == 1
    assert "slower by more than 10%: cross_short_q default forward" in " ".join(capsys.readouterr().out.split())


def test_a_saved_run_of_another_device_or_with_other_settings_is_announced():
    here, there = {"device cpu": "A", "settings": "X=1", "date": "1"}, {"device cpu": "A", "date": "2"}
    for then, now, said in ((here, there, "X=1"), (there, here, "none")):
        found = bench_report.differing_devices(bench_report.Saved({}, then), now)
        assert found == [f"the saved run had settings: {said}"]


def _scaled(data, factor, folder):
    path = folder / f"{factor}.json"
    rows = [
        {**row, "forward": row["forward"] and {**row["forward"], **{key: row["forward"][key] * factor for key in
         ("median_ms", "low_ms", "high_ms")}}}
        for row in data["rows"]
    ]  # fmt: skip
    path.write_text(json.dumps({**data, "rows": rows}))
    return path


# ---- one contestant does not spoil the others ------------------------------------------------------------------------


def _stub(name, attention):
    return Contestant(name, lambda workload, inputs: Prepared(attention(workload, inputs)), ours=True)


def _unavailable(workload, inputs):
    raise NotSupported("lacks everything")


def _right(workload, inputs):
    return plain(workload, inputs).run


def _raising(workload, inputs):
    def attention(q, k, v):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 EiB")

    return attention


def _no_backward(workload, inputs):
    def attention(q, k, v):
        if torch.is_grad_enabled():
            raise RuntimeError("no gradients here\nand more lines")
        return _right(workload, inputs)(q, k, v)

    return attention


def _off(workload, inputs):
    right = _right(workload, inputs)
    return lambda q, k, v: right(q, k, v) * 1.001


def _rows_of(*contestants, **plan):
    settings = {"device": "cpu", "dtype": torch.float32, "repeats": 1, "budget_s": 0.1, **plan}
    rows = run(Plan([TINY["llm_gqa_causal"]], contestants, **settings), TINY["llm_gqa_causal"])
    return {row.contestant: row for row in rows}


def test_a_failure_is_a_row_with_its_reason_and_the_others_keep_their_figures():
    made = {"oom": _raising, "half": _no_backward, "absent": _unavailable, "off": _off, "fine": _right}
    rows = _rows_of(*(_stub(name, attention) for name, attention in made.items()))
    assert rows["oom"].failed and rows["oom"].reason == "out of memory" and rows["oom"].forward is None
    assert rows["half"].failed and rows["half"].reason == "RuntimeError: no gradients here"
    assert rows["half"].forward is not None and rows["half"].both is None
    assert rows["absent"].verdict is None and not rows["absent"].wrong and rows["absent"].reason == "lacks everything"
    assert rows["off"].wrong and rows["off"].forward is not None
    assert rows["fine"].verdict.ok and rows["fine"].forward and rows["fine"].both and not rows["fine"].wrong


def test_inputs_that_do_not_fit_are_a_failure_of_everybody(monkeypatch):
    monkeypatch.setattr(Workload, "call", lambda *arguments: _raising(None, None)(0, 0, 0))
    assert {row.reason for row in _rows_of(_stub("one", _right), RIVALS["plain"]).values()} == {"out of memory"}


def test_a_wrong_answer_of_the_package_gives_exit_code_1(cross_short_q, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ours", lambda name: _stub("default", _off))
    assert main([*QUICK, "--rivals", "none"]) == 1
    assert "WRONG OR FAILED  cross_short_q default: " in capsys.readouterr().out


# ---- right and wrong answers -----------------------------------------------------------------------------------------


def _checked(contestant, workload, dtype=torch.float32):
    workload = replace(workload, dropout_p=0.0)
    inputs = workload.call("cpu", dtype)
    judged = pieces(inputs)  # first: a call that appends writes to its cache
    prepared = contestant.prepare(workload, inputs)
    return check(prepared, inputs, judged, backward=not workload.decode)


@pytest.mark.parametrize("name", some((name for name in TINY if not name.startswith(("decode_8x16", "decode_64"))), 2))
def test_every_rival_and_the_default_are_right_on_every_workload(name):
    for contestant in (ours(), ours("reference"), *RIVALS.values()):
        try:
            found = _checked(contestant, TINY[name])
        except NotSupported:
            assert not contestant.ours and (contestant.name in ("official", "sdpa_loop")
                                            or TINY[name].new_keys)  # fmt: skip
            continue
        assert found.ok, (contestant.name, found)


def _changed(**fields):
    """The plain computation of a workload with something about it changed."""
    return lambda workload, inputs: plain(replace(workload, **fields), inputs).run


def _forgets_dk(workload, inputs):
    right = _right(workload, inputs)
    return lambda q, k, v: right(q, k.detach() + 0.5 * (k - k.detach()), v)


def _nan_in(longest_or_shortest):
    """In the last row of that sequence."""

    def spoiled(workload, inputs):
        right = _right(workload, inputs)
        index = longest_or_shortest(range(workload.batch), key=lambda index: workload.seqlens_k[index])

        def attention(q, k, v):
            out = right(q, k, v).contiguous()
            off = torch.zeros_like(out)
            off.flatten(0, -3)[sum(workload.seqlens_q[: index + 1]) - 1] = math.nan
            return out + off

        return attention

    return spoiled


@pytest.mark.parametrize(
    ("name", "wrong", "quantity"),
    [
        ("mistral_window", _changed(window=(17, 0)), None),
        ("skewed_varlen", _forgets_dk, "dk"),
        ("skewed_varlen", _nan_in(max), None),
        ("skewed_varlen", _nan_in(min), None),
        ("uniform_varlen", lambda workload, inputs: lambda q, k, v: q[:-1], "out"),
        ("decode_32x4096", lambda workload, inputs: lambda q, k, v: q, "out"),
    ],
)
def test_every_kind_of_wrong_answer_is_found(name, wrong, quantity):
    found = _checked(_stub("wrong", wrong), TINY[name])
    assert not found.ok
    assert quantity is None or found.quantity == quantity


@pytest.mark.parametrize("name", ["llm_gqa_causal", "mistral_window", "alibi_causal", "cross_short_q"])
def test_where_fp64_has_no_room_for_all_rows_the_last_ones_are_judged(name, monkeypatch):
    workload = TINY[name]
    monkeypatch.setattr(spot_check, "MOST_SCORES", 7 * workload.group * workload.max_seqlen_k)
    assert len(pieces(workload.call("cpu", torch.float32))[0].rows) == min(7, workload.max_seqlen_q)
    assert _checked(ours("chunked"), workload).ok
    for wrong in (_nan_in(min), _forgets_dk):
        assert not _checked(_stub("wrong", wrong), workload).ok


def test_a_step_that_does_not_rotate_is_seen():
    def forgetful(workload, inputs):
        call = ours().prepare(workload, inputs).run
        kept = {key: value for key, value in call.keywords.items() if not key.startswith("rotary")}
        return lambda q, k, v: call.func(q, k, v, **kept)

    assert not _checked(_stub("wrong", forgetful), TINY["decode_32x4096_paged_append"]).ok


def test_a_call_with_dropout_is_judged_without_it():
    """Compare judges dropout; here it must not hide a wrong answer."""
    settings = {"device": "cpu", "dtype": torch.float32, "repeats": 1, "budget_s": 0.1}
    contestants = [ours(), RIVALS["plain"], _stub("wrong", _off)]
    rows = run(Plan([TINY["dropout_train"]], contestants, **settings), TINY["dropout_train"])
    assert [row.verdict.ok for row in rows] == [True, True, False] and all(row.forward and row.both for row in rows)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


class SetClock:
    """A clock that only ``wait`` moves, in seconds; the machine's load does not."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3


def test_peak_memory_on_a_cpu_counts_live_tensors():
    def work():
        first = torch.ones(2**18)  # 1 MiB
        second = first + first
        del first
        return second + second

    assert allocations(work) == Allocations(2 * 2**20, 2**20)


def test_timings_come_with_a_median_between_their_quartiles_and_failures_with_a_reason():
    """The first call may compile kernels: neither its time nor the number of readings may show it."""
    clock, calls = SetClock(), iter([200.0])

    def broken():
        raise ValueError("not today")

    jobs = {"job": Job(lambda: clock.wait(next(calls, 2.0))), "broken": Job(broken)}
    found = time_together(jobs, "cpu", 5, 1.0, clock)
    assert found["broken"] == Failed("ValueError: not today")
    timed = found["job"]
    assert isinstance(timed, Timing) and timed.readings == 5
    assert (timed.low_ms, timed.median_ms, timed.high_ms) == pytest.approx((2.0, 2.0, 2.0))


def test_the_fastest_reading_counts_and_the_first_call_does_not():
    clock, waits = SetClock(), [0.0, 20.0, 20.0, 2.0, 4.0, 20.0, 20.0]
    found = fastest(lambda: clock.wait(waits.pop(0)), "cpu", readings=3, calls=2, clock=clock)
    assert found == pytest.approx(3.0) and not waits


def test_a_call_that_stays_slow_is_read_once_and_within_its_context():
    clock, inside = SetClock(), []

    @contextmanager
    def around():
        inside.append(True)
        yield
        inside.pop()

    def slow():
        assert inside
        clock.wait(20.0)

    found = time_together({"job": Job(slow, around)}, "cpu", 5, 0.01, clock)["job"]
    assert isinstance(found, Timing) and found.readings == 1 and found.median_ms == pytest.approx(20.0)


# ---- ratios ----------------------------------------------------------------------------------------------------------


def timed(contestant, forward=None, both=None, ok=True, ours=False):
    times = (None if ms is None else Timing(ms, ms, ms, 3) for ms in (forward, both))
    return Row("w", contestant, ours, "", *times, verdict=Check("out", "fp64", 0.5 if ok else 2.0, 1.0))


def test_a_ratio_is_the_fastest_right_rivals_time_over_ours():
    pad, plain = timed("pad_sdpa", 8.0, 12.0), timed("plain", 1.0, 18.0)
    rows = [timed("default", 2.0, 6.0, ours=True), pad, plain, timed("official", 1.0)]
    (found,) = bench_report.compared(rows)
    assert [found.ratio(bench_report.WORKAROUNDS, mode) for mode in ("forward", "both")] == [0.5, 2.0]
    assert [found.ratio(bench_report.FLASH, mode) for mode in ("forward", "both")] == [0.5, None]
    table = bench_report.summary_table(rows)
    shown = dict(zip(table.columns, table.rows[0]))
    rival = "the fastest way without flash-attn, ms"
    assert (shown[rival], shown["speed-up"]) == ("1 / 12 plain / pad_sdpa", "0.500 / 2.000")
    assert bench_report.mean_lines(rows)[0] == "geometric mean speed-up over flash-attn: forward 0.500 (1 workload)"
    (found,) = bench_report.compared([rows[0], pad, replace(plain, failed=True)])
    assert found.ratio(bench_report.WORKAROUNDS, "forward") == 4.0


def test_our_backend_named_official_is_not_taken_for_flash_attn():
    (found,) = bench_report.compared([timed("official", 1.0, ours=True), timed("default", 2.0, ours=True)])
    assert found.mine.contestant == "default" and found.ratio(bench_report.FLASH, "forward") is None


def test_a_forward_slower_than_with_its_backward_is_marked():
    assert "DOUBTFUL" in bench_report.remarks(timed("default", 9.0, 3.0)) and not bench_report.remarks(
        timed("w", 1.0, 3.0)
    )


def test_mistakes_that_differ_in_a_doubt_about_their_times_are_alike():
    """The machine's load decides whether a time is doubtful."""
    doubtful, plain = (timed("default", *times, ok=False, ours=True) for times in ((9.0, 3.0), (1.0, 3.0)))
    rows = [doubtful, replace(plain, workload="other"), replace(plain, workload="third", contestant="chunked")]
    first, second = bench_report.wrong_lines(rows)
    assert first.endswith("; alike in other") and "DOUBTFUL" not in first and "alike" not in second


def test_a_curve_keeps_its_tokens_while_the_length_allows():
    assert [len(each.seqlens_q) for each in of_lengths([256, 1024, 4096], small=True)] == [4, 1, 1]


# ---------------------------------------------------------------- verify bench's calls in CUDA graphs

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
