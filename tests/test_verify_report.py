"""verify report: one self-contained page that says what the saved runs say, whatever they say."""

from __future__ import annotations

import copy
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from verify import bench_report, report
from verify.cli import main
from verify.page import to_html
from verify.tables import Report, Table

ENVIRONMENT = {"device cpu": "A Processor, 2 threads", "torch": "2.13.0", "date": "2026-11-21 00:00 UTC"}


def check(error=1e-4, bound=1e-3, note=""):
    return {"quantity": "out", "against": "fp64", "error": error, "bound": bound, "note": note, "ok": not note}


def answer(case="causal", implementation="chunked", verdict="pass", **other):
    return {
        "case": case, "function": "flash_attn_func", "dtype": "fp16", "implementation": implementation,
        "device": "cpu", "note": "", "recorded": True, "refused": verdict == "not supported", "bypassed": False,
        "verdict": verdict, "checks": [] if verdict == "not supported" else [check()], **other,
    }  # fmt: skip


def timed(contestant="default", ours=True, ms=2.0, **other):
    def timing(value):
        return {"median_ms": value, "low_ms": value, "high_ms": value, "readings": 3}

    return {
        "workload": "small", "contestant": contestant, "ours": ours, "served_by": "sdpa" if ours else "",
        "forward": timing(ms), "both": timing(3 * ms), "memory_mib": 1.0, "failed": False,
        "verdict": {"ok": True, "ratio": 0.5, "quantity": "out", "note": ""}, **other,
    }  # fmt: skip


WRONG_WHEN_TIMED = {"ok": False, "ratio": 9.0, "quantity": "out", "note": ""}
COMPARED = {
    "environment": ENVIRONMENT,
    "rows": [
        answer(),
        answer(implementation="reference"),
        answer("window", recorded=False, checks=[check(8e-4)]),
        answer(implementation="official", verdict="not supported", note="flash-attn is not installed"),
        answer("no keys", "official", bypassed=True),
    ],
}
BENCHED = {
    "environment": {**ENVIRONMENT, "dtype": "float32"},
    "rows": [
        timed(),
        timed("pad_sdpa", False, ms=8.0),
        timed("plain", False, ms=1.0),
        timed("sdpa", forward=None, both=None, verdict=None),
    ],
}
LOCATED = {
    "environment": ENVIRONMENT,
    "kernels": [{"name": "mine:kernel"}, {"name": "theirs:kernel"}],
    "same": False,
    "tolerance": 1e-6,
    "share": 0.5,
    "texture": "whole tiles",
    "first": {"batch": 0, "head": 1, "row": 64, "channel": 0, "query_tile": 1, "key_tile": 1},
    "findings": {"A": ["query tile 0 is right", "=> the running maximum"]},
    "heat_map": {"rows_per_cell": 32, "values": [[0.0, 0.0, 0.0, 0.0], [0.0, 1e-7, 2e-5, None]]},
}


def changed(data, row, **values):
    data = copy.deepcopy(data)
    data["rows"][row].update(values)
    return data


def saved(folder: Path, name: str, data) -> str:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def written(tmp_path, compared=COMPARED, benched=BENCHED) -> tuple[int, str]:
    """The exit code and the page made of these runs."""
    output = tmp_path / "r.html"
    runs = [["--compare", saved(tmp_path, "c.json", compared)], ["--bench", saved(tmp_path, "b.json", benched)],
            ["--locate", saved(tmp_path, "l.json", LOCATED)]]  # fmt: skip
    code = main(["report", *itertools.chain(*runs), "-o", str(output)])
    return code, output.read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Checks that tags are closed, and collects the text and what would be fetched."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.words += data


def test_the_page_is_well_formed_fetches_nothing_and_says_what_the_runs_say(tmp_path):
    code, text = written(tmp_path)
    reader = Reader(text)
    assert code == 0
    assert reader.open == [] and reader.fetched == []
    assert not re.search(r"https?:|@import|url\(|<script src|<link", text)
    for part in (
        "PASS: 3 of 3 answers right",
        "A Processor, 2 threads",
        "out 8.0e-04 (0.80)",  # the worst answer, of its bound
        "official on cpu: no case ran (flash-attn is not installed)",
        "geometric mean to the fastest way without it: forward 0.500",
        "It was slower than what people use without flash-attn (0.5 to 0.5 times its speed)",
        "mine:kernel against theirs:kernel: 50% of the elements differ, in whole tiles, the first at batch 0, head 1",
        "=> the running maximum".removeprefix("=> "),
        "··▒█",  # the heat map's second head
        "saved run c.json",
        "2026-11-21 00:00 UTC",
    ):
        assert part in reader.words, part


@pytest.mark.parametrize(
    ("compared", "benched", "parts"),
    [
        (changed(COMPARED, 2, verdict="FAIL", checks=[check(5e-3, note="error 5.0e-03")], note="out error 5.0e-03"),
         BENCHED, ["FAIL: 2 of 3 answers right", "out error 5.0e-03", "do not rely on it here"]),
        (changed(COMPARED, 0, verdict="FAIL", checks=[check("nan", note="x")]), BENCHED, ["out nan (inf)"]),
        (changed(COMPARED, 1, verdict="FAIL", checks=[], note="ZeroDivisionError: planted"), BENCHED, ["planted"]),
        ({**COMPARED, "rows": COMPARED["rows"][3:]}, BENCHED, ["no case ran on any backend"]),
        (COMPARED, changed(BENCHED, 0, verdict=WRONG_WHEN_TIMED),
         ["FAIL: wrong or failed while timed: small: default"]),
    ],
    ids=["wrong", "no number", "raised", "nothing ran", "wrong when timed"],
)  # fmt: skip
def test_whatever_is_wrong_turns_the_page_red_and_the_exit_code_1(compared, benched, parts, tmp_path):
    code, text = written(tmp_path, compared, benched)
    assert code == 1 and '<p class="verdict FAIL">FAIL' in text
    assert all(part in Reader(text).words for part in parts)


def test_a_forced_capability_is_said(tmp_path):
    forced = {**COMPARED, "environment": {**ENVIRONMENT, "settings": "FLASH_ATTN_COMPAT_CAPABILITY=7.5"}}
    assert "capability was forced" in written(tmp_path, forced)[1]
    assert "capability was forced" not in written(tmp_path)[1]
    assert report.forced_capability({"device cuda": "H200, capability 9.0 treated as 7.5 (forced)"})


def test_names_from_a_file_cannot_become_markup(tmp_path):
    evil = changed(COMPARED, 0, implementation="<script>alert(1)</script>")
    text = written(tmp_path, evil, changed(BENCHED, 1, contestant='"><img src=x>'))[1]
    assert "<script>alert" not in text and "<img src=x" not in text and "&lt;script&gt;" in text


def test_without_saved_runs_quick_ones_are_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(report.QUICK, report.compare, ["compare", "--quick", "-k", "varlen_paged"])
    monkeypatch.setitem(report.QUICK, report.bench, ["bench", "--only", "cross_short_q", "--repeats", "1"])
    output = tmp_path / "r.html"
    assert main(["report", "--device", "cpu", "-o", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    assert Reader(text).open == [] and Reader(text).fetched == []
    assert "python -m verify bench --only cross_short_q --repeats 1 --device cpu" in text
    assert "flash_attn_compat:flash_attn_func against verify.backend:reference: no element differs" in text
    assert f"wrote {output.name}" in capsys.readouterr().out.replace("\n", "").replace(f"{tmp_path}/", "")


def test_a_run_that_an_earlier_version_saved_is_still_read(tmp_path):
    """Its checks said whether they count, its rows not whether they failed."""
    old = changed(COMPARED, 0, checks=[{**check(), "counts": True, "widest_bound": 1.0}])
    assert written(tmp_path, old)[0] == 0
    rows = bench_report.load(Path(saved(tmp_path, "b.json", BENCHED))).rows
    assert rows[0].verdict.ok and rows[0].forward.median_ms == 2.0 and rows[3].verdict is None


def test_the_verdict_comes_first_then_the_short_tables_then_the_folded_ones():
    long = Table("Every case", ("case", "verdict"), [(f"case {i}", "pass") for i in range(50)] + [("odd", "FAIL")])
    short = Table("Summary", ("backend", "verdict"), [("chunked", "FAIL")])
    text = to_html(Report("verify", ENVIRONMENT, [long, short], ["a remark", "FAIL: 50 of 51"], ok=False))
    places = [text.index(part) for part in ('"verdict FAIL">FAIL: 50', "a remark", "<details open><summary>Summary",
                                           "<details><summary>Every case", "Where and how")]  # fmt: skip
    assert places == sorted(places)
    assert '51 rows, <span class="FAIL">1 FAIL</span>' in text and '<td data-label="verdict" class="FAIL">' in text
    assert 'id="filter"' in text and "max-width: 40rem" in text
    assert '<meta name="viewport" content="width=device-width' in text


def test_accelerators_come_first_in_the_machine_line():
    assert report.machine({"device cpu": "a CPU", "device cuda": "a GPU"}) == "a GPU; a CPU"


@pytest.mark.parametrize(
    ("option", "content", "part"),
    [
        ("--compare", None, "cannot read"),
        ("--compare", "not json", "is not a file that `python -m verify compare --json` wrote"),
        ("--compare", "[]", "is not a file that `python -m verify compare --json` wrote"),
        ("--compare", BENCHED, "is not a file that `python -m verify compare --json` wrote"),
        ("--bench", COMPARED, "is not a file that `python -m verify bench --json` wrote"),
        ("--compare", changed(COMPARED, 0, checks=[{"ok": True}]), "is not a file that `python -m verify compare"),
        ("--locate", BENCHED, "is not a file that `python -m verify locate --json` wrote"),
    ],
)
def test_a_file_of_another_kind_ends_in_one_line_and_exit_code_2(option, content, part, tmp_path, capsys):
    path = str(tmp_path / "missing.json") if content is None else saved(tmp_path, "a.json", content)
    others = {"--compare": COMPARED, "--bench": BENCHED, "--locate": LOCATED} | {option: None}
    good = [[name, saved(tmp_path, f"{name[2:]}.json", data)] for name, data in others.items() if data]
    assert main(["report", option, path, *itertools.chain(*good), "-o", str(tmp_path / "r.html")]) == 2
    captured = capsys.readouterr()
    assert part in captured.err and len(captured.err.splitlines()) == 1
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--device", "tpu"], "no device 'tpu' here"),
        (["-o", "/no/such/folder/r.html"], "there is no folder"),
        (["-o", "/"], "it is a folder"),
    ],
)
def test_a_wrong_question_ends_in_one_line_and_exit_code_2(arguments, part, capsys):
    assert main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert part in captured.err and len(captured.err.splitlines()) == 1
