"""README and docs contradict themselves in no figure, and .ci/figures.py would see it if they did."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest

from flash_attn_compat.backends.fused import aot, variants
from flash_attn_compat.backends.fused.variants import Kind
from tests.support import load_file

ROOT = Path(__file__).resolve().parents[1]
ORIGIN = "One H200, torch 2.11, 2026-11-24, by `python -m verify bench`.\n"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return load_file(ROOT / ".ci/figures.py")


@pytest.fixture(scope="module")
def pages(figures: ModuleType) -> dict[str, str]:
    found: dict[str, str] = figures.read_pages()
    return found


def test_the_pages_have_no_contradictory_figure_and_none_without_origin(
    figures: ModuleType, pages: dict[str, str]
) -> None:
    assert figures.findings(pages) == []


@pytest.mark.parametrize(
    ("page", "old", "new", "said"),
    [
        ("README.md", "reaches 1.10 of its speed", "reaches 1.11 of its speed", "the table gives: ours"),
        ("README.md", "| 3.51 / 13.0 |", "| 4.51 / 13.0 |", "the table gives: ours"),
        ("docs/kernels.md", "| 0.66 | 0.80 |", "| 0.66 | 0.90 |", "the mean of row 'forward' is 0.8"),
        ("CHANGELOG.md", "run at 0.78 of", "run at 0.87 of", "['0.78'] in one place, ['0.87'] in another"),
        ("docs/kernels.md", "gives 0.80, 0.66 and", "gives 0.80, 0.67 and", "bounds of flash-attention-turing"),
        ("docs/bench.md", "| 93.5 | 411 |", "| 93.6 | 411 |", "a packed training step by SDPA"),
        ("docs/exactness.md", "62 answers", "sixty answers", "stated elsewhere now?"),
        ("README.md", "2026-11-24", "yesterday", "README.md#speed: a figure without date"),
    ],
)
def test_a_figure_that_is_changed_in_one_place_is_found(
    page: str, old: str, new: str, said: str, figures: ModuleType, pages: dict[str, str]
) -> None:
    assert old in pages[page]
    changed = {**pages, page: pages[page].replace(old, new)}
    assert any(said in line for line in figures.findings(changed))


TABLE = "| program | ours |\n|---|---|\n| BERT, 8 x 512 | 1.25 |\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TABLE, None),
        (TABLE + "\nBERT's 8 x 512 take 1.25 ms here.", None),
        (TABLE + "\nBERT's 8 x 512 take 1.35 ms here.", "'bert 8 x 512' takes 1.35 ms"),
        (TABLE + "\nLater:\n\n" + TABLE.replace("1.25", "1.45"), "page says 1.25, page says 1.45"),
    ],
    ids=["one value", "the same in prose", "another in prose", "another in a second table"],
)
def test_a_row_has_one_value_on_all_pages(text: str, said: str | None, figures: ModuleType) -> None:
    found = list(figures.two_values({"page": text}))
    assert found == [] if said is None else said in found[0]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (f"# Speed\n\n{ORIGIN}It takes 3 ms.", None),
        ("# Speed\n\nIt takes 3 ms.", "date, machine, version, command"),
        (f"# Speed\n\n{ORIGIN.replace('H200', 'GPU')}It takes 3 ms.", "machine"),
        (f"# Speed\n\n{ORIGIN}\n## Decoding\n\nIt takes 3 ms.", None),
        (f"# Speed\n\n{ORIGIN}\n# Limits\n\nIt takes 3 ms ([more](#speed)).", None),
        (f"# Speed\n\n{ORIGIN}\n# Limits\n\nIt takes 3 ms.", "date, machine, version, command"),
        ("# Others\n\n2026-11-25: 3 ms on a [T4](https://example.org).", None),
        ("# Others\n\n3 ms on a [T4](https://example.org).", "date, machine, version, command"),
        (f"# Speed\n\n{ORIGIN}It takes 3 ms.".replace("-m verify", "-m\nverify"), None),
        ("# Speed\n\nIt takes half a minute.", "date, machine, version, command"),
        ("# Speed\n\n| calls | ms |\n|---|---|\n| BERT | 1.25 |\n| GPT | 1.75 |\n", "date, machine, version, command"),
        ("# Versions\n\n| library | version |\n|---|---|\n| trl | 1.16.0 |\n| peft | 0.21.2 |\n", None),
        ("# Sizes\n\nIt takes some minutes for values 2^30 times smaller, in tiles of 64.", None),
        ("# Code\n\n```bash\nrun    # takes 3 ms\n```\n", "date, machine, version, command"),
        ("# Code\n\n```text\nrun: 3 ms\n```\n", None),
    ],
)
def test_a_measured_figure_needs_a_date_a_machine_a_version_and_a_command(
    text: str, missing: str | None, figures: ModuleType
) -> None:
    found = list(figures.without_origin({"README.md": text}))
    assert found == [] if missing is None else [line.split("without ")[1].split(":")[0] for line in found] == [missing]


def test_the_list_names_the_date_machine_version_and_command_of_every_figure(
    figures: ModuleType, pages: dict[str, str]
) -> None:
    lines = list(figures.list_figures(pages))
    assert len(lines) > 30
    assert not [line for line in lines if re.search(r"no (date|machine|version|command|link)", line)]


def test_an_exception_that_no_page_needs_any_more_is_found(figures: ModuleType, pages: dict[str, str]) -> None:
    changed = {**pages, "docs/verify.md": pages["docs/verify.md"].replace("23 MB", "24 MB")}
    assert "no page says 'which take 23 MB' any more: .ci/figures.py" in figures.findings(changed)


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        (r"compile --for sm_75 +# (\d+) kernels", lambda: aot.usual_kinds(75)),
        (r"time for its (\d+) kernels", lambda: aot.usual_kinds(75)),
        (r"`--all` has ([\d,]+) kernels for sm_75", lambda: aot.common_kinds(75, (), ())),
    ],
)
def test_the_page_says_how_many_kernels_compile_makes(
    said: str, kinds: Callable[[], Iterable[Kind]], pages: dict[str, str]
) -> None:
    number = re.search(said, re.sub(r"\s+", " ", pages["docs/kernels.md"]))
    assert number is not None and int(number[1].replace(",", "")) == len(variants.made_for(kinds()))


def test_two_saved_runs_of_the_bench_give_readmes_table_and_means(figures: ModuleType) -> None:
    def run(official: float, default: float) -> str:
        times = {"official": official, "default": default}
        rows = [
            {"workload": name, "contestant": who, "forward": {"median_ms": ms}, "both": {"median_ms": 10 * ms}}
            for name in figures.WORKLOADS
            for who, ms in times.items()
        ]
        return json.dumps(
            {"rows": [*rows, {"workload": "decode", "contestant": "default", "forward": {}, "both": None}]}
        )

    shown = figures.readme_table(figures.read_run(run(1.0, 2.0)), figures.read_run(run(1.5, 4.0)))
    assert "\n| 4 x 2048, ALiBi, 16 heads | 1.00 / 10.0 | 2.00 / 20.0 | 4.00 / 40.0 |\n" in shown
    assert shown.endswith("0.50 of its speed forward and 0.50 with the backward; forced to 7.5, 0.25 and 0.25.")


def test_the_workloads_of_readmes_table_are_the_benchs(figures: ModuleType, pages: dict[str, str]) -> None:
    from verify.workloads import FULL

    assert list(figures.WORKLOADS) == [workload.name for workload in FULL]
    assert all(f"| {label} |" in pages["README.md"] for label in figures.WORKLOADS.values())
