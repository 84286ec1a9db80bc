"""verify report: one self-contained page of the saved runs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from verify import bench_report, output, page
from verify.bench_run import Row
from verify.cli import main
from verify.page import to_html
from verify.pictures import WRONG as WRONG_COLOUR
from verify.pictures import svg
from verify.reading import value_of
from verify.tables import Bar, Bars, Curves, Report, Table
from verify.timing import Timing

HERE = {"device cpu": "A Processor, 2 threads", "torch": "2.13.0", "date": "2026-11-21 00:00 UTC"}
ANSWERS = Table("Every answer", ("case", "backend", "vs fp64"), [("window", "chunked", "out 8.0e-04 (0.80)")])
ABSENT = "official on cpu: no case ran (flash-attn is not installed)"
COMPARED = Report("verify compare", HERE, [ANSWERS], [ABSENT, "PASS: 3 of 3 answers right"], True)
WRONG = replace(COMPARED, conclusion=["FAIL: 2 of 3 answers right"], ok=False)
MEAN = "geometric mean speed-up over the fastest way without flash-attn: forward 0.500"
THERE = {**HERE, "date": "2026-11-22 00:00 UTC"}
SPEED = Table("Speed", ("workload", "ms"), [("small", "2 / 6")])
BENCHED = Report("verify bench", THERE, [SPEED], [MEAN, "PASS: every answer of ours is right"], True)
WRONG_WHEN_TIMED = replace(BENCHED, conclusion=["WRONG OR FAILED  small default", "FAIL: wrong"], ok=False)
HEAT = Table("Error over (head, row)", ("head", "rows"), [("1", "··▒█")])
LOCATED = Report("verify locate", HERE, [HEAT], ["DIFFERENT: 50%", "  => the running maximum"], False)


def saved(folder: Path, name: str, run) -> str:
    path = folder / name
    path.write_text(run if isinstance(run, str) else json.dumps(asdict(run) if isinstance(run, Report) else run))
    return str(path)


def written(tmp_path, *runs) -> tuple[int, str]:
    """The exit code and the page made of these runs."""
    made = tmp_path / "r.html"
    files = [saved(tmp_path, f"{index}.json", run) for index, run in enumerate(runs)]
    return main(["report", *files, "-o", str(made)]), made.read_text(encoding="utf-8")


GROUPS = [("small", [Bar(0.5, "2 ms"), None]), ("large", [Bar(9.0, "1"), Bar(1.0, "")])]
PICTURES = (
    Bars("Speed", "flash-attn", ["forward", "both"], GROUPS),
    Curves("Time", "N", "ms", [("naive", [(1, 2.0), (2, 8.0)]), ("online", [(1, 1.0)])]),
)


class Reader(HTMLParser):
    """A parser that checks closed tags, and collects the text and the addresses to fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "input", "wbr"):
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.words += data


def test_the_page_is_well_formed_fetches_nothing_and_shows_the_runs(tmp_path):
    code, text = written(tmp_path, COMPARED, BENCHED)
    reader = Reader(text)
    assert code == 0
    assert reader.open == [] and reader.fetched == []
    assert not re.search(r"https?:|@import|url\((?!#)|<script src|<link", text)
    about, names = "one calculation, called attention", ("0.json: verify compare", "1.json: verify bench")
    for part in ("out 8.0e-04 (0.80)", ABSENT, MEAN, about, *names, HERE["device cpu"], HERE["date"], THERE["date"]):
        assert part in reader.words, part
    both = "PASS: 3 of 3 answers right; PASS: every answer of ours is right"
    assert f'<p class="verdict pass">flash_attn_compat: {both}</p>' in text


@pytest.mark.parametrize(
    ("runs", "verdict", "part"),
    [
        ((WRONG, BENCHED), "flash_attn_compat: FAIL: 2 of 3 answers right", "geometric mean"),
        ((COMPARED, WRONG_WHEN_TIMED), "flash_attn_compat: FAIL: wrong", "WRONG OR FAILED  small default"),
        ((COMPARED, LOCATED), "flash_attn_compat: =&gt; the running maximum", "··▒█"),
    ],
    ids=["wrong", "wrong when timed", "different"],
)
def test_any_wrong_row_makes_the_verdict_red_and_the_exit_code_1(runs, verdict, part, tmp_path):
    code, text = written(tmp_path, *runs)
    assert code == 1 and f'<p class="verdict FAIL">{verdict}</p>' in text
    assert part in Reader(text).words


def test_the_packages_verdict_comes_first_and_ignores_other_kernels(tmp_path):
    theirs = replace(WRONG, subject="their.py:kernel", tables=[replace(ANSWERS, title="Theirs")])
    code, text = written(tmp_path, theirs, COMPARED)
    places = [text.index(part) for part in (
        "Is flash_attn_compat right on this machine?", '"verdict pass">flash_attn_compat: PASS: 3 of 3 answers right<',
        '"verdict FAIL">their.py:kernel: FAIL: 2 of 3 answers right<', "Every answer", "Theirs",
    )]  # fmt: skip
    assert places == sorted(places) and code == 1


# Runs, what their page has, and what it has not.
PAGES = {
    "a user's kernel is what the page is about": (
        replace(WRONG, subject="their.py:kernel"),
        ["<h1>Is their.py:kernel right on this machine?</h1>"], ["flash_attn_compat is meant to"],
    ),
    "names from a file cannot become markup": (
        replace(COMPARED, tables=[Table("<script>alert(1)</script>", ("backend",), [('"><img src=x>',)])]),
        ["&lt;script&gt;"], ["<script>alert", "<img src=x"],
    ),
    "the options of a command are not broken at their hyphens": (
        replace(WRONG, conclusion=["locate a --seqlen-k 131 --n -5 a-b", "FAIL: 1"]),
        ['<span class="whole">--seqlen-k</span> 131 <span class="whole">--n</span>', "</span> a-b</p>"], [],
    ),
    "a table without anything in it is left out": (
        replace(COMPARED, tables=[Table("Nothing", ("a",), [("-",)]), ANSWERS]), [ANSWERS.title], ["Nothing"],
    ),
    "a verdict on too little is neither green nor red": (
        replace(WRONG, conclusion=["TOO LITTLE TO SAY: 1 of 1 answers right, 9 declined"]),
        ['<p class="verdict declined">flash_attn_compat: TOO LITTLE TO SAY: 1 of 1'], [],
    ),
    "a short table under a verdict is open": (
        replace(COMPARED, under=[Table("By feature", ("feature", "verdict"), [("causal", "pass")])]),
        ["<details open><summary>By feature"], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_what_its_run_needs_and_nothing_else(name, tmp_path):
    run, there, absent = PAGES[name]
    code, text = written(tmp_path, run)
    assert code == (not run.ok)
    assert [part for part in there if part not in text] == [] == [part for part in absent if part in text]


def test_a_file_of_before_there_were_pictures_is_still_read(tmp_path):
    old = {name: value for name, value in asdict(COMPARED).items() if name not in ("subject", "pictures")}
    assert written(tmp_path, old)[0] == 0


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.kind)
def test_a_picture_is_the_same_after_a_trip_through_a_file_and_is_drawn_into_the_page(picture, tmp_path):
    text = written(tmp_path, replace(COMPARED, pictures=[picture]))[1]
    kept = json.loads(json.dumps(asdict(picture)))
    assert json.loads(json.dumps(asdict(value_of(type(picture), kept)))) == kept
    assert text.count("<figure>") == 1 and "<svg" in text and "currentColor" in text and picture.title in text
    assert not re.search(r"https?:|url\((?!#)|xmlns|<metadata", text)
    assert svg(picture) == svg(picture)


def test_small_numbers_at_an_axis_are_written_as_numbers() -> None:
    text = svg(Curves("Speed", "N", "TFLOP/s", [("naive", [(16, 2e-6), (128, 3e-2)])]))
    assert "mathdefault" not in text and "$" not in text and ">0.001<" in text


def test_without_matplotlib_a_page_names_the_package_for_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "can_draw", lambda: False)
    text = written(tmp_path, replace(LOCATED, pictures=PICTURES))[1]
    assert "There would be pictures here: pip install" in text and "<svg" not in text and "··▒█" in text


def test_a_long_cell_is_printed_under_its_row(tmp_path):
    long = "a note of some length that would squeeze all other columns"
    table = Table("T", ("case", "verdict", "note"), [("one", "FAIL", long), (f"random {long}", "pass", "short")])
    text = written(tmp_path, replace(COMPARED, tables=[table]))[1]
    assert "<th>note</th>" not in text and f'<td class="under" colspan="2">note: {long}</td>' in text
    assert f'colspan="2">case: random {long}</td>' in text and " …</td>" in text
    assert text.count("<tbody>") == 2


def test_runs_in_files_of_one_name_are_all_on_the_page(tmp_path):
    folders = [tmp_path / name for name in ("before", "after")]
    for folder in folders:
        folder.mkdir()
    files = [saved(folder, "run.json", run) for folder, run in zip(folders, (LOCATED, BENCHED))]
    assert main(["report", *files, "-o", str(tmp_path / "r.html")]) == 1
    assert all(table in (tmp_path / "r.html").read_text(encoding="utf-8") for table in (HEAT.title, SPEED.title))


@pytest.mark.parametrize(
    ("label", "fact", "forced"),
    [
        ("settings", "FLASH_ATTN_COMPAT_CAPABILITY=7.5", True),
        ("device cuda", "H200, capability 9.0 treated as 7.5 (forced)", True),
        ("settings", "FLASH_ATTN_COMPAT_BACKEND=sdpa", False),
    ],
)
def test_a_forced_capability_is_said_and_accelerators_come_first(label, fact, forced, tmp_path):
    run = replace(COMPARED, environment={**HERE, "device cuda": "a GPU", label: fact})
    text = written(tmp_path, run)[1]
    assert ("capability was forced" in text) is forced
    assert f"{run.environment['device cuda']}; A Processor" in text


HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]x[/red] :bomb: <img src=x> $\\nothing$ \u202egnp \ud800 `a` | *b* __c__ &lt;"
SHOWN = r"\x1b]0;owned\x07\x1b[2J[red]x[/red] :bomb: <img src=x> $\nothing$ \u202egnp \ud800 `a` | *b* __c__ &lt;"


def hostile() -> Report:
    """One that holds such text wherever text can be."""
    table = Table(HOSTILE, (HOSTILE, "b"), [(HOSTILE, "pass")])
    bars = Bars(HOSTILE, HOSTILE, [HOSTILE], [(HOSTILE, [Bar(1.0, HOSTILE)])])
    curves = Curves(HOSTILE, HOSTILE, HOSTILE, [(HOSTILE, [(1.0, 2.0), (2.0, 4.0)])])
    facts = {HOSTILE: HOSTILE, "date": HOSTILE}
    return Report("verify compare", facts, [table], [HOSTILE], True, HOSTILE, [bars, curves])


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
@pytest.mark.parametrize("as_saved", [True, False])
def test_a_page_shows_escapes_and_markup_of_names_as_text(as_saved, tmp_path):
    text = written(tmp_path, hostile())[1] if as_saved else to_html("Right?", {"": hostile()})
    assert not [letter for letter in "\x1b\x07\u202e\ud800" if letter in text] and "<img" not in text
    assert Reader(text).words.count(SHOWN) >= 10


def test_a_terminal_shows_escapes_and_markup_of_names_as_text(capsys):
    terminal = output.console()
    terminal.width = 1000
    output.announce(hostile().environment, terminal)
    output._show(hostile(), terminal)
    shown = capsys.readouterr().out
    assert shown.count(SHOWN) == 7 and not set("\x1b\x07\u202e\ud800") & set(shown)


def test_the_date_of_a_saved_run_is_shown_as_text(capsys):
    then, row = Timing(**TIMING), Row("small", "default", True, forward=Timing(**TIMING))
    found = bench_report.Saved({("small", "default", True, "forward"): then}, {"date": HOSTILE})
    table, *_ = bench_report.against(found, [row], 0.1)
    output._show(Report("verify bench", HERE, [table], ["PASS"], True), output.console())
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Against the run of {SHOWN} (now / saved)" in shown


def test_markdown_reads_as_the_text_does():
    """Read as GitHub shows it: a backslash escapes the next character."""
    text = output.to_markdown(hostile())
    plain = re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text)
    assert plain.count(SHOWN) == 7 and not re.search(r"(?<!\\)[<`*&\[]", text)


def test_a_name_in_an_error_is_shown_as_text(capsys):
    assert main(["report", "\x1b[2Jmissing.json"]) == 2
    assert capsys.readouterr().err.endswith("cannot read \\x1b[2Jmissing.json: No such file or directory\n")


def test_the_verdict_comes_first_then_the_short_tables_then_the_folded_ones():
    long = Table("Every case", ("case", "verdict"), [(f"case {i}", "pass") for i in range(50)] + [("odd", "FAIL")])
    short = Table("Summary", ("backend", "verdict"), [("chunked", "FAIL")])
    text = to_html("verify", {"": Report("verify", HERE, [long, short], ["a remark", "FAIL: 50 of 51"], ok=False)})
    places = [text.index(part) for part in (
        '"verdict FAIL">flash_attn_compat: FAIL: 50', "a remark", "<details open><summary>Summary",
        "<details><summary>Every case", "Where and how",
    )]  # fmt: skip
    assert places == sorted(places)
    assert '51 rows, <span class="FAIL">1 FAIL</span>' in text and '<td data-label="verdict" class="FAIL">' in text
    assert 'id="filter"' in text and "max-width: 40rem" in text
    assert '<meta name="viewport" content="width=device-width' in text


WHOLE = json.loads(json.dumps(asdict(replace(COMPARED, pictures=PICTURES))))
TIMING = {"median_ms": 2.0, "low_ms": 1.0, "high_ms": 3.0, "readings": 5}
TIMED = {"workload": "small", "contestant": "default", "ours": True, "forward": TIMING, "both": None}


def report_with(**changed) -> dict:
    return WHOLE | changed


def table_with(**changed) -> dict:
    return report_with(tables=[WHOLE["tables"][0] | changed])


def picture_with(number: int, **changed) -> dict:
    return report_with(pictures=[WHOLE["pictures"][number] | changed])


def timing_with(**changed) -> dict:
    return run_with(forward=TIMING | changed)


def run_with(**changed) -> dict:
    return {"title": "verify bench", "environment": HERE, "rows": [TIMED | changed]}


# Files of other programs, of other versions, and of people who mean no good, by the command that wants them.
FOREIGN = {
    "COMMAND": {
        "a title that is a list": report_with(title=["verify compare"]),
        "no verdict": report_with(conclusion=[]),
        "a verdict that is text": report_with(conclusion="PASS"),
        "a verdict that is a number": report_with(conclusion=[1]),
        "words for whether all is right": report_with(ok="no"),
        "facts in a list": report_with(environment=["torch"]),
        "a fact that is a number": report_with(environment={"torch": 2.13}),
        "a subject that is an object": report_with(subject={}),
        "tables that are text": report_with(tables="tables"),
        "a short row": table_with(rows=[["window", "chunked"]]),
        "a row that is text": table_with(rows=["abc"]),
        "a cell that is a number": table_with(rows=[["window", "chunked", 0.8]]),
        "columns that are text": table_with(columns="abc"),
        "a word for whether a table is folded": table_with(folded="no"),
        "a picture of no kind": picture_with(0, kind="pie"),
        "a bar without a length": picture_with(0, groups=[["small", [[None, "2 ms"], None]]]),
        "a bar of no number": picture_with(0, groups=[["small", [[float("nan"), "2 ms"], None]]]),
        "an infinite bar": picture_with(0, groups=[["small", [[float("inf"), "2 ms"], None]]]),
        "a bar of 400 digits": picture_with(0, groups=[["small", [[10**400, "2 ms"], None]]]),
        "a bar of three": picture_with(0, groups=[["small", [[1.0, "2 ms", 3], None]]]),
        "a group of too many bars": picture_with(0, groups=[["small", [None] * 9]]),
        "a curve below zero": picture_with(1, lines=[["naive", [[1.0, -2.0]]]]),
        "a point of text": picture_with(1, lines=[["naive", ["ab"]]]),
        "nested too deeply": '{"title": "verify compare", "tables": ' + "[" * 200_000,
        "a number of 10,000 digits": '{"title": "verify compare", "ok": ' + "9" * 10_000 + "}",
    },
    "bench": {
        "rows that are text": run_with() | {"rows": "rows"},
        "a timing that is a number": run_with(forward=2.0),
        "a median in words": timing_with(median_ms="fast"),
        "a median of 0": timing_with(median_ms=0),
        "a median that is none": timing_with(median_ms=float("nan")),
        "a quartile that is nothing": timing_with(high_ms=None),
        "a half reading": timing_with(readings=0.5),
        "a workload that is a list": run_with(workload=["small"]),
        "words for whose it is": run_with(ours="yes"),
        "facts in a list": run_with() | {"environment": [["date", "today"]]},
        "a date that is a number": run_with() | {"environment": {"date": 20261121}},
        "nested too deeply": '{"title": "verify bench", "rows": ' + "[" * 200_000,
    },
}


def test_the_files_that_the_foreign_ones_are_made_of_are_read(tmp_path):
    assert written(tmp_path, WHOLE)[0] == 0
    found = bench_report.load(Path(saved(tmp_path, "bench.json", run_with())))
    assert found.timings == {("small", "default", True, "forward"): Timing(**TIMING)} and found.environment == HERE


@pytest.mark.parametrize(
    ("command", "content"),
    [
        *(
            pytest.param(command, content, id=f"{command}: {name}")
            for command, files in FOREIGN.items()
            for name, content in files.items()
        ),
        ("COMMAND", "not json"),
        ("COMMAND", "[]"),
        ("COMMAND", {"title": "another program"}),
        ("COMMAND", {"title": "verify compare"}),
        ("COMMAND", {**asdict(COMPARED), "tables": [{}]}),
        ("bench", COMPARED),
        ("bench", {"title": "verify bench", "rows": [{}]}),
    ],
)
def test_a_file_of_another_kind_ends_in_one_line_and_exit_code_2(command, content, tmp_path, capsys):
    path = saved(tmp_path, "a.json", content)
    assert main(["bench", "--against", path] if command == "bench" else ["report", path]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"is not a file that `python -m verify {command} --json` wrote" in line


# ---- what a page need not make its reader guess ----------------------------------------------------------------------


def words_of(picture) -> list[str]:
    """Return the words of a figure in their order."""
    return re.findall(r"<text[^>]*>(.*?)</text>", svg(picture))


def test_a_legend_names_only_series_with_a_bar():
    bars = Bars("Speed", "flash-attn", ["forward", "both"], [("small", [Bar(0.5, "2 ms"), None])])
    assert "forward" in words_of(bars) and "both" not in words_of(bars)


def test_the_bar_of_a_wrong_answer_is_red_hatched_and_labelled():
    bars = Bars("Error", "allowed", ["official", "fp64"], [("mine", [Bar(0.5, "out"), Bar(9.0, "dv", True)])])
    drawn = svg(bars)
    assert WRONG_COLOUR in drawn and "<pattern" in drawn and "\N{RIGHTWARDS ARROW} dv, wrong fp64" in words_of(bars)
    right = svg(replace(bars, groups=[("mine", [Bar(0.5, "out"), Bar(0.9, "dv")])]))
    assert WRONG_COLOUR not in right and "<pattern" not in right


def test_a_single_row_is_singular_and_a_note_explains_its_figures(tmp_path, capsys):
    table = replace(ANSWERS, note="in brackets: error / bound")
    code, text = written(tmp_path, replace(COMPARED, tables=[table]))
    assert code == 0 and "Every answer (1 row)" in text and "<p>in brackets: error / bound</p>" in text
    output._show(replace(COMPARED, tables=[table]), output.console())
    assert "in brackets: error / bound" in capsys.readouterr().out
    assert "in brackets: error / bound" in output.to_markdown(replace(COMPARED, tables=[table]))


def test_the_box_of_a_verdict_holds_the_next_command_and_the_worst_mistake_above_a_long_folded_table(tmp_path):
    under = Table("By feature", ("feature", "verdict"), [(f"feature {index}", "pass") for index in range(40)])
    headline = ["look closer: verify locate a.py:b", "the worst mistake: out off by 2"]
    run = replace(WRONG, under=[under], headline=headline, conclusion=["a remark", *headline, *WRONG.conclusion])
    text = written(tmp_path, run, BENCHED)[1]
    box, _, rest = text.partition('<p class="verdict')[2].partition("</p>")
    assert [Reader(f"<p{box}</p>").words.count(line) for line in (*WRONG.conclusion, *headline)] == [1, 1, 1]
    assert all(text.count(line) == 1 for line in headline) and "a remark" in rest
    places = [rest.index(part) for part in ("<details><summary>By feature", 'id="filter"')]
    assert places == sorted(places) and "Every answer" not in rest[: places[1]]


def test_the_features_behind_a_verdict_stand_below_its_next_command(tmp_path):
    run = replace(
        WRONG, headline=["look closer: verify"], conclusion=["look closer: verify", "FAIL: 2 of 3; judged: fp16"]
    )
    words = Reader(written(tmp_path, run)[1]).words
    places = [words.index(part) for part in ("FAIL: 2 of 3", "look closer: verify", "judged: fp16")]
    assert places == sorted(places)
