"""verify report: one self-contained page that says what the saved runs say, whatever they say."""

from __future__ import annotations

import copy
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from verify import report
from verify.cli import main
from verify.page import to_html
from verify.report_facts import WORKAROUNDS, answers, forced_capability, machine, speed, typical
from verify.tables import Report, Table

ENVIRONMENT = {"device cpu": "A Processor, 2 threads", "torch": "2.13.0", "date": "2026-11-21 00:00 UTC"}


def check(error=1e-4, bound=1e-3, ok=True, quantity="out"):
    return {"quantity": quantity, "against": "fp64", "error": error, "bound": bound, "counts": True, "ok": ok}


def answer(case="causal", implementation="chunked", verdict="pass", **other):
    return {
        "case": case, "function": "flash_attn_func", "implementation": implementation, "device": "cpu", "note": "",
        "recorded": True, "refused": verdict == "not supported", "bypassed": False, "verdict": verdict,
        "checks": [] if verdict == "not supported" else [check()], **other,
    }  # fmt: skip


def timed(contestant="default", ours=True, ms=2.0, mib=1.0, workload="small", **other):
    return {
        "workload": workload, "contestant": contestant, "ours": ours, "served_by": "sdpa" if ours else "",
        "forward": {"median_ms": ms}, "both": {"median_ms": 3 * ms}, "memory_mib": mib,
        "verdict": {"ok": True, "ratio": 0.5}, "failed": False, **other,
    }  # fmt: skip


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
    "workloads": {"small": "2 x 64, 2 heads, head_dim 64"},
    "rows": [
        timed(),
        timed("chunked", ms=5.0),
        timed("pad_sdpa", False, ms=8.0, mib=4.0),
        timed("plain", False, ms=1.0, mib=40.0),
        timed("sdpa", forward=None, both=None, verdict=None),
    ],
}


def changed(data, row, **values):
    data = copy.deepcopy(data)
    data["rows"][row].update(values)
    return data


def saved(folder: Path, name: str, data) -> str:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def written(tmp_path, compared=COMPARED, benched=BENCHED, *more: str) -> tuple[int, str]:
    """The exit code and the page made of these runs; heat maps from a saved run, which costs nothing."""
    output = tmp_path / "r.html"
    located = saved(tmp_path, "l.json", LOCATED)
    code = main(
        ["report", "--compare", saved(tmp_path, "c.json", compared), "--bench", saved(tmp_path, "b.json", benched),
         "--locate", located, "-o", str(output), *more]
    )  # fmt: skip
    return code, output.read_text(encoding="utf-8")


LOCATED = {
    "environment": ENVIRONMENT,
    "kernels": [{"name": "mine:kernel"}, {"name": "theirs:kernel"}],
    "same": False,
    "tolerance": 1e-6,
    "share": 0.5,
    "texture": "whole tiles",
    "first": {"batch": 0, "head": 1, "row": 64, "channel": 0, "query_tile": 1, "key_tile": 1},
    "findings": {"A": ["query tile 0 is right", "=> the running maximum"]},
    "block_rows": 64,
    "heat_map": {"rows_per_cell": 32, "values": [[0.0, 0.0, 0.0, 0.0], [0.0, 1e-7, 1e-3, None]]},
}


class Reader(HTMLParser):
    """Checks that tags are closed, and collects the text and what would be fetched."""

    VOID = frozenset({"meta", "br", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.words += data


def test_the_page_is_well_formed_and_fetches_nothing(tmp_path):
    code, text = written(tmp_path)
    reader = Reader(text)
    assert code == 0
    assert reader.open == [] and reader.fetched == []
    assert not re.search(r"https?:|@import|url\(|<script src|<link", text)
    assert '<meta name="viewport" content="width=device-width' in text


def test_the_page_says_the_verdicts_speed_memory_machine_and_commands(tmp_path):
    _, text = written(tmp_path)
    words = Reader(text).words
    for part in (
        "All 3 answers are right",
        "A Processor, 2 threads",
        "2 of 2",
        "80%",  # the worst answer, of its bound
        "official (flash-attn is not installed)",
        "small (2 x 64, 2 heads, head_dim 64)",
        "saved run c.json",
        "2026-11-21 00:00 UTC",
    ):
        assert part in words, part


def test_the_paragraph_for_everyone_counts_exercises_once_and_names_the_spread(tmp_path):
    words = Reader(written(tmp_path)[1]).words
    assert "2 exercises whose right answers are known, 1 of them answered by flash-attn itself beforehand" in words
    assert "in the 2 ways it has of computing here, 3 answers in all" in words
    assert "the one furthest off used 80% of the error that is allowed" in words
    assert "it was slower than the fastest of the ways that people use without flash-attn (0.5 to 0.5 times" in words


def test_ours_is_held_against_the_fastest_rival_that_is_right(tmp_path):
    (pair,) = speed(BENCHED).against(WORKAROUNDS)
    assert (pair.rival, pair.times_as_fast, pair.memory_share) == ("plain attention", 0.5, 1.0 / 40.0)
    wrong = changed(BENCHED, 3, verdict={"ok": False, "ratio": 9.0})
    (pair,) = speed(wrong).against(WORKAROUNDS)
    assert (pair.rival, pair.times_as_fast, pair.memory_share) == ("padding + SDPA", 4.0, 0.25)
    words = Reader(written(tmp_path, COMPARED, wrong)[1]).words
    assert "4.00 x" in words and "25%" in words and "0.50 x" not in words


def test_a_wrong_answer_turns_the_page_red_and_the_exit_code_1(tmp_path):
    wrong = changed(COMPARED, 2, verdict="FAIL", checks=[check(5e-3, ok=False)])
    code, text = written(tmp_path, wrong)
    words = Reader(text).words
    assert code == 1
    assert "2 of 3 answers are right" in words and "All 3" not in words
    assert "flash_attn_func: window" in words and "chunked: out is off by 5.0e-03, allowed is 1.0e-03" in words
    assert "1 was wrong, so do not rely on it here" in words


def test_an_error_that_is_no_number_and_an_exception_are_shown(tmp_path):
    wrong = changed(COMPARED, 0, verdict="FAIL", checks=[check("nan", ok=False)])
    wrong = changed(wrong, 1, verdict="FAIL", checks=[], note="ZeroDivisionError: planted")
    code, text = written(tmp_path, wrong)
    assert code == 1
    assert "out is off by nan" in text and "ZeroDivisionError: planted" in text and "&gt;100x" in text


def test_nothing_that_ran_is_no_success(tmp_path):
    none = {**COMPARED, "rows": COMPARED["rows"][3:]}
    code, text = written(tmp_path, none)
    assert code == 1 and "No case ran here" in text


def test_a_wrong_timed_answer_fails_the_page_and_has_no_speed(tmp_path):
    code, text = written(tmp_path, COMPARED, changed(BENCHED, 0, verdict={"ok": False, "ratio": 9.0}))
    assert code == 1
    assert "Wrong or failed while timed: small: default" in text and "0.50 x" not in text


def test_the_real_flash_attn_comes_before_the_workaround(tmp_path):
    both = copy.deepcopy(BENCHED)
    both["rows"].append(timed("official", False, ms=1.0, mib=1.0))
    words = Reader(written(tmp_path, COMPARED, both)[1]).words
    assert "it was slower than flash-attn (0.5 to 0.5 times its speed" in words
    assert words.index("Beside flash-attn") < words.index("Beside the fastest way without it")


def test_our_backend_named_official_is_not_taken_for_a_rival():
    ours = copy.deepcopy(BENCHED)
    ours["rows"].append(timed("official", True, ms=1.0))
    assert speed(ours).against(("official",)) == []


def test_a_forced_capability_is_said(tmp_path):
    forced = {**COMPARED, "environment": {**ENVIRONMENT, "settings": "FLASH_ATTN_COMPAT_CAPABILITY=7.5"}}
    assert "capability was forced" in written(tmp_path, forced)[1]
    assert "capability was forced" not in written(tmp_path)[1]
    assert forced_capability({"device cuda": "H200, capability 9.0 treated as 7.5 (forced)"})


def test_names_from_a_file_cannot_become_markup(tmp_path):
    evil = changed(COMPARED, 0, implementation="<script>alert(1)</script>")
    evil_bench = changed(BENCHED, 2, contestant="<img src=x>")
    text = written(tmp_path, evil, evil_bench)[1]
    assert "<script>alert" not in text and "<img src=x" not in text and "&lt;script&gt;" in text


def test_a_saved_heat_map_is_drawn_and_explained(tmp_path):
    text = written(tmp_path)[1]
    assert text.count('src="data:image/png;base64,iVBOR') == 1
    assert "50% of the elements differ, in whole tiles, the first at batch 0, head 1, row 64, channel 0" in text
    assert "What locate makes of it: the running maximum" in text


def test_without_saved_runs_quick_ones_are_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "QUICK_COMPARE", ("--quick", "-k", "varlen_paged"))
    monkeypatch.setattr(report, "QUICK_WORKLOADS", "cross_short_q")
    output = tmp_path / "r.html"
    assert main(["report", "--device", "cpu", "-o", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.open == [] and reader.fetched == []
    assert "cross_short_q" in text and "python -m verify bench --device cpu --only cross_short_q" in text
    assert text.count('src="data:image/png;base64,iVBOR') == 2
    assert "For comparison: a planted mistake" in text and "What locate makes of it: the running maximum m" in text
    assert "flash_attn_compat:flash_attn_func against verify.backend:reference: no element differs" in text
    assert f"wrote {output.name}" in capsys.readouterr().out.replace("\n", "").replace(f"{tmp_path}/", "")


def test_a_bench_of_nobody_else_still_makes_a_page():
    alone = {**BENCHED, "rows": BENCHED["rows"][:2]}
    facts = speed(alone)
    assert facts.against(WORKAROUNDS) == [] and typical([]) != typical([])  # NaN
    text = to_html(report.report(answers(COMPARED), facts, ENVIRONMENT, []))
    assert Reader(text).open == [] and "nan" not in Reader(text).words


def test_the_verdict_comes_first_then_the_short_tables_then_the_folded_ones():
    long = Table("Every case", ("case", "verdict"), [(f"case {i}", "pass") for i in range(50)] + [("odd", "FAIL")])
    short = Table("Summary", ("backend", "verdict"), [("chunked", "FAIL")])
    text = to_html(Report("verify", ENVIRONMENT, [long, short], ["a remark", "FAIL: 50 of 51"], ok=False))
    places = [text.index(part) for part in ('"verdict FAIL">FAIL: 50', "a remark", "<details open><summary>Summary",
                                           "<details><summary>Every case", "Where and how")]  # fmt: skip
    assert places == sorted(places)
    assert '51 rows, <span class="FAIL">1 FAIL</span>' in text and '<td data-label="verdict" class="FAIL">' in text
    assert 'id="filter"' in text and "max-width: 40rem" in text


def test_accelerators_come_first_in_the_machine_line():
    assert machine({"device cpu": "a CPU", "device cuda": "a GPU"}) == "a GPU; a CPU"


@pytest.mark.parametrize(
    ("option", "content", "part"),
    [
        ("--compare", None, "cannot read"),
        ("--compare", "not json", "is no JSON file"),
        ("--compare", "[]", "is not a file that `python -m verify compare --json` wrote"),
        ("--compare", BENCHED, "is not a file that `python -m verify compare --json` wrote"),
        ("--bench", COMPARED, "is not a file that `python -m verify bench --json` wrote"),
        ("--compare", changed(COMPARED, 0, checks=[{"ok": True}]), "is not as this version writes it"),
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
        (["-o", "/no/such/folder/r.html"], "there is no such folder"),
        (["-o", "/"], "it is a folder"),
    ],
)
def test_a_wrong_question_ends_in_one_line_and_exit_code_2(arguments, part, capsys):
    assert main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert part in captured.err and len(captured.err.splitlines()) == 1
