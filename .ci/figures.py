"""Find figures in README, CHANGELOG and docs that contradict each other, or that nobody could measure again.

python .ci/figures.py                            # what is wrong, a line each; exit code 1 if anything is
python .ci/figures.py --list                     # all figures, each place with its date, machine, version and command
python .ci/figures.py native.json forced.json    # README's table and means of two runs of `verify bench --gpu --json`

A contradiction is a mean that does not follow from its table, a restated figure that is not its original's, or two
values for one row and column. A measured figure needs, in its section or in one that the section links to: a date,
the machine, a version and a command. A figure that others published needs a date, the machine and a link.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = "README.md", "CHANGELOG.md", "docs/*.md"
Pages = Mapping[str, str]


class Section(NamedTuple):
    """A heading's text up to the next heading, fenced code included; above: the sections that contain it."""

    page: str
    anchor: str
    text: str
    above: tuple[str, ...]


class Table(NamedTuple):
    page: str
    header: list[str]
    rows: list[list[str]]


def read_pages(root: Path = ROOT) -> dict[str, str]:
    paths = (path for pattern in PATTERNS for path in sorted(root.glob(pattern)))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def flat(text: str) -> str:
    """The text with single spaces for line breaks, and without the marks of lists and of bold type."""
    return re.sub(r"\s+", " ", text.replace("**", ""))


def sections(page: str, text: str) -> Iterator[Section]:
    title, lines = "", list[str]()
    path: list[tuple[int, str]] = []  # the sections that are open: the depth and text of each
    fenced = False
    for line in [*text.splitlines(), "# end"]:
        fenced ^= line.startswith("```")
        heading = None if fenced else re.fullmatch(r"(#+) (.+)", line)
        if heading is None:
            lines.append(line)
            continue
        body = "\n".join(lines)
        yield Section(page, slug(title), body, tuple(above for _, above in path[:-1]))
        if path:
            path[-1] = (path[-1][0], body)
        path = [*(each for each in path if each[0] < len(heading[1])), (len(heading[1]), "")]
        title, lines = heading[2], []


def slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def tables(page: str, text: str) -> Iterator[Table]:
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield Table(page, lines[0], lines[2:])


# ---- means -----------------------------------------------------------------------------------------------------------


def speed_rows(readme: str) -> list[list[float]]:
    """Of each workload: forward and forward + backward by flash-attn, by us, and by us forced to 7.5, in ms."""
    table = next((each for each in tables("README.md", readme) if each.header[:2] == ["workload", "flash-attn"]), None)
    return [[float(ms) for cell in row[1:] for ms in cell.split(" / ")] for row in table.rows] if table else []


def mean_sentence(rows: Sequence[Sequence[float]]) -> str:
    """README's sentence on the geometric means, from the figures that its table shows."""
    forward, both, forced, forced_both = (
        geometric_mean([row[theirs] / row[ours] for row in rows]) for theirs, ours in ((0, 2), (1, 3), (0, 4), (1, 5))
    )
    return (
        f"ours without flash-attn reaches {forward:.2f} of its speed forward and {both:.2f} with the backward; "
        f"forced to 7.5, {forced:.2f} and {forced_both:.2f}."
    )


def wrong_means(pages: Pages) -> Iterator[str]:
    """Means that the tables above them do not give: README's, and every column "all" of a row of ratios."""
    readme = pages.get("README.md", "")
    rows = speed_rows(readme)
    if rows and mean_sentence(rows) not in flat(readme):
        yield f"README.md: the table gives: {mean_sentence(rows)}"
    for table in (table for page, text in pages.items() for table in tables(page, text)):
        for label, *cells in table.rows if table.header[-1:] == ["all"] else ():
            *ratios, shown = map(float, cells)
            # Each ratio is rounded as well, and so its mean may be off by as much.
            if abs(geometric_mean(ratios) - shown) > 0.0101:
                yield f"{table.page}: the mean of row {label!r} is {geometric_mean(ratios):.2f}, not {shown}"


# ---- restated figures ------------------------------------------------------------------------------------------------

Place = Callable[[Pages], list[str]]  # the figures at a place; LookupError: it states none any more


def in_text(page: str, pattern: str) -> Place:
    """The groups of a pattern, in the page's text without line breaks."""

    def read(pages: Pages) -> list[str]:
        match = re.search(pattern, flat(pages.get(page, "")))
        if match is None:
            raise LookupError(f"{page} has nothing like {pattern!r}")
        return list(match.groups())

    return read


def in_table(page: str, header: str, *cells: tuple[str, str], pick: str = r"([\d.]+)") -> Place:
    """Of the table with this header: of each (row's beginning, column), the group of a pattern in the cell."""

    def read(pages: Pages) -> list[str]:
        for table in tables(page, pages.get(page, "")):
            if " | ".join(table.header).startswith(header):
                rows = {" | ".join(row[: len(label.split(" | "))]): row for label, _ in cells for row in table.rows}
                found = [re.search(pick, rows[label][table.header.index(column)]) for label, column in cells]
                return [match[1] for match in found if match]
        raise LookupError(f"{page} has no table {header!r}")

    return read


KERNELS = "forward", "dkdv", "dq"
RESTATED: Mapping[str, Sequence[Place]] = {
    "training steps forced to 7.5, as a share of flash-attn's speed": [
        in_text("README.md", r"forced to 7\.5, [\d.]+ and (\d\.\d+)\."),
        in_text("CHANGELOG.md", r"training steps run at (\d\.\d+) of flash-attn's speed"),
    ],
    "eager decoding of one sequence": [
        in_text("README.md", r"one sequence waits for the host and runs at ([\d.]+) to ([\d.]+) of"),
        in_text("CHANGELOG.md", r"eager decoding of one sequence, which waits for the host, at ([\d.]+) to ([\d.]+)\."),
    ],
    "bf16's time beside fp16's": [
        in_table("docs/kernels.md", "head_dim | 80", ("bf16, its time beside fp16's, forward", "all"),
                 ("the same with the backward", "all")),
        in_text("README.md", r"([\d.]+) times as long as fp16 forward and ([\d.]+) times with the backward"),
    ],
    "bf16's time beside fp16's at its worst head_dim": [
        in_table("docs/kernels.md", "head_dim | 80", ("bf16, its time beside fp16's, forward", "96")),
        in_text("README.md", r"at most ([\d.]+) times for a head_dim"),
    ],
    "recorded answers and errors": [
        in_text("README.md", r"(\d+) answers recorded from flash-attn .*? errors for (\d+) malformed"),
        in_text("docs/exactness.md", r"(\d+) answers recorded from flash-attn .*? (?:to|for) (\d+) malformed"),
    ],
    "the model's bounds of flash-attention-turing at 128": [
        in_table("docs/kernels.md", "share of useful products",
                 *(("flash-attention-turing", f"{kernel} 128") for kernel in KERNELS)),
        in_text("docs/kernels.md", r"the model gives ([\d.]+), ([\d.]+) and ([\d.]+) as bounds"),
    ],
    **{
        f"the model's bounds of ours at {head_dim}": [
            in_table("docs/kernels.md", "head_dim | kernel",
                     *((f"{head_dim} | {kernel}", "fp16") for kernel in KERNELS)),
            in_table("docs/kernels.md", "share of useful products",
                     *(("ours", f"{kernel} {head_dim}") for kernel in KERNELS)),
            in_table("docs/kernels.md", "head_dim | forward | dkdv",
                     *((str(head_dim), kernel) for kernel in KERNELS), pick=r"; ([\d.]+)"),
        ]
        for head_dim in (64, 128)
    },
    "a prefill of 8k tokens by us, flash-attn and SDPA": [
        in_table("docs/bench.md", "program",
                 *(("Qwen3-0.6B, prefill of 8k", column) for column in ("ours", "flash-attn 2.8.3", "SDPA"))),
        in_text("README.md", r"prefill of 8k .+? takes ([\d.]+) ms, with flash-attn ([\d.]+) and with SDPA (\d+)"),
    ],
    "generation from one prompt by us, flash-attn and SDPA": [
        in_table("docs/bench.md", "program",
                 *(("its generation, 1 prompt", column) for column in ("ours", "flash-attn 2.8.3", "SDPA")),
                 pick=r"([\d,]+)"),
        in_text("README.md", r"from one prompt takes ([\d,]+) ms, with flash-attn ([\d,]+) and with SDPA ([\d,]+)"),
    ],
    "a packed training step by SDPA and on our kernels": [
        in_table("docs/bench.md", "program", *(("a quarter of Llama 3.2 1B, packed step of 16k tokens", column)
                                               for column in ("SDPA", "switched"))),
        in_text("docs/sdpa.md", r"a quarter of Llama 3\.2 1B, a dense mask \| \| ([\d.]+) / ([\d.]+) \|"),
    ],
}  # fmt: skip


def wrong_restatements(pages: Pages, facts: Mapping[str, Sequence[Place]] = RESTATED) -> Iterator[str]:
    """Figures that differ from their original, which is the first place, and places that state none any more."""
    for name, places in facts.items():
        try:
            original, *restated = (place(pages) for place in places)
        except LookupError as error:
            yield f"{name}: stated elsewhere now? .ci/figures.py looks in vain: {error}"
            continue
        yield from (f"{name}: {original} in one place, {other} in another" for other in restated if other != original)


def two_values(pages: Pages) -> Iterator[str]:
    """One row and column with two values, or prose that gives a table's row other milliseconds than the table."""
    known: dict[tuple[str, str], tuple[str, str]] = {}
    rows: dict[str, set[str]] = {}
    for table in (table for page, text in pages.items() for table in tables(page, text)):
        for label, *cells in table.rows:
            key = plain(label)
            if len(key.split()) < 2 or not any(re.search(r"\d\.\d", cell) for cell in cells):
                continue
            rows.setdefault(key, set()).update(re.findall(r"[\d.]+", " ".join(cells)))
            for number, (column, cell) in enumerate(zip(table.header[1:], cells, strict=False)):
                # Two columns of one table may have one name.
                occurrence = table.header[1 : number + 1].count(column)
                page, value = known.setdefault((key, f"{column} {occurrence}"), (table.page, cell))
                if value != cell and not key.startswith("the same"):
                    yield f"{label!r}, {column!r}: {page} says {value}, {table.page} says {cell}"
    for page, text in pages.items():
        for sentence in re.split(r"(?<=\.) ", flat(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE))):
            stated, words = re.findall(r"([\d.]*\d) ms\b", sentence), plain(sentence)
            for key, ms in itertools.product(rows, stated):
                if key in words and ms not in rows[key]:
                    yield f"{page}: {key!r} takes {ms} ms, which its table does not say"


def plain(label: str) -> str:
    return re.sub(r"'s\b|[^\w ]", "", label.lower()).strip()


# ---- where a figure comes from ---------------------------------------------------------------------------------------

_UNIT = r"(?:microseconds?|milliseconds?|seconds?|minutes?|hours?|tokens/s|TFLOP/s|GB|MiB|MB|%|times)"
MEASURED = re.compile(
    r"(?<![\w^.-])\d[\d.,]*(?<=\d)(?:(?: / |,? (?:to|and|or) )[\d.,]*\d)*"
    rf" ?(?:{_UNIT}|[mu]?s)(?!\w)(?: as (?:fast|long))?"
    rf"|\b(?:half an?|a quarter of an?|about an?) {_UNIT}\b"
    r"|[\d.]+(?: to [\d.]+)? of (?:its|flash-attn's|PyTorch's|the|this) (?:speed|time|peak)"
)
_CELL = re.compile(r"[\d.,]*\d(?:e-?\d+)?%?(?:(?: /|,|;) [\d.,]*\d(?:e-?\d+)?)*")
_EXACT = re.compile(r"\d\.\d|\d,\d{3}|\de-\d")  # a count of tiles or heads has no such digits
_VERSION = re.compile(r"\d\.\d+\.\d")
# Numbers with a unit that nobody measured: what they are instead.
NOT_MEASURED = {
    "more than half a second under a display's timer": "a limit in the code",
    "may use 90 % of the memory": "a limit in the code",
    "at least 2 % faster": "a limit in the code",
    "losses within 0.2 %": "a bound of a test",
    "if q, k and v are 3% larger": "a parameter of a test",
    "off by 0.4 %": "arithmetic of fp32",
    "by 4 % at a million": "arithmetic of fp32",
    "off by up to 6 %": "arithmetic of a format",
    "and up to 12 %": "arithmetic of a format",
    "which take 23 MB": "the size of a folder",
    "A T4 has 15 GB": "NVIDIA's figure",
}
NEEDED = {
    "date": re.compile(r"\b20\d\d-\d\d-\d\d\b"),
    "machine": re.compile(r"\b(?:H100|H200|EPYC|CPU|emulator|cubin|[Mm]ain loops?)\b"),
    "version": re.compile(r"(?:torch|PyTorch|NVRTC|flash-attn) (?:2|1[1-3])\.\d+|\b[0-9a-f]{7}\b"),
    "command": re.compile(r"python -m [\w.]+|flash-attn-compat [a-z]+|git show \S+"),
}
PUBLISHED = {
    "date": NEEDED["date"],
    "machine": re.compile(r"\b(?:T4|RTX|V100|H200)\b"),
    "link": re.compile(r"\]\(http"),
}
LINK = re.compile(r"\]\((?!http)([^)\s#]*)#([^)\s]+)\)")


class Figures(NamedTuple):
    """The measured figures of one paragraph, item or table."""

    section: Section
    shown: list[str]
    block: str  # the paragraph, item or table
    before: str  # what the section says up to it
    origins: list[str]  # texts that may say where they come from: the section, and sections that the figures link to


def all_figures(pages: Pages) -> Iterator[Figures]:
    known = {(each.page, each.anchor): each for page, text in pages.items() for each in sections(page, text)}
    for section in known.values():
        parts = blocks(section.text)
        for number, block in enumerate(parts):
            if shown := [*measured(block)]:
                linked = (known.get((target(section.page, path), anchor)) for path, anchor in LINK.findall(block))
                texts = [section.text + " ".join(section.above), *(each.text for each in linked if each)]
                yield Figures(section, shown, flat(block), flat(" ".join(parts[:number])), [*map(flat, texts)])


def measured(block: str) -> Iterator[str]:
    """Measured figures of a paragraph: amounts with a unit, and cells of tables that hold nothing but numbers."""
    text = flat(block)
    for phrase in NOT_MEASURED:
        text = text.replace(phrase, "")
    yield from (match[0] for match in MEASURED.finditer(text))
    cells = [cell for table in tables("", block) for row in table.rows for cell in row[1:] if _CELL.fullmatch(cell)]
    if sum(bool(_EXACT.search(cell)) for cell in cells) > 1 and not any(map(_VERSION.search, cells)):
        yield from cells


def without_origin(pages: Pages) -> Iterator[str]:
    """Measured figures without date, machine, version or command in their section or in one that they link to."""
    for section, shown, *_, texts in all_figures(pages):
        missing = [*(lacking(NEEDED, text) for text in texts), lacking(PUBLISHED, flat(section.text))]
        if all(missing):
            where = f"{section.page}#{section.anchor}".rstrip("#")
            yield f"{where}: a figure without {', '.join(missing[0])}: {', '.join(shown[:4])}"


def list_figures(pages: Pages) -> Iterator[str]:
    """A line for each place with figures: the first of them, and the nearest date, machine, version and command."""
    for section, shown, block, before, (text, *linked) in all_figures(pages):
        needed = PUBLISHED if lacking(NEEDED, text) and not lacking(PUBLISHED, text) else NEEDED
        origin = []
        for name, pattern in needed.items():
            first = (match[0] for match in map(pattern.search, (block, *linked)) if match)
            earlier = [match[0] for match in pattern.finditer(before)][-1:]
            elsewhere = [match[0] for match in pattern.finditer(text)][:1]
            origin.append(next(first, None) or (earlier or elsewhere or [f"no {name}"])[0])
        more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
        said = ", ".join(origin).replace("](http", "linked")
        yield f"{section.page}#{section.anchor}: {'; '.join(shown[:4])}{more} ({said})"


def blocks(text: str) -> list[str]:
    """The paragraphs, items of lists and tables of a section; of fenced code the comments alone."""
    comments = re.sub(
        r"^```.*?^```", lambda code: "\n".join(re.findall(r" # .*$", code[0], re.MULTILINE)), text,
        flags=re.MULTILINE | re.DOTALL,
    )  # fmt: skip
    return re.split(r"\n\s*\n|\n(?=\s*- )", comments)


def lacking(needed: Mapping[str, re.Pattern[str]], text: str) -> list[str]:
    return [name for name, pattern in needed.items() if not pattern.search(text)]


def target(page: str, path: str) -> str:
    """The page that a link of this page leads to."""
    return (ROOT / page).parent.joinpath(path).resolve().relative_to(ROOT).as_posix() if path else page


def stale_exceptions(pages: Pages) -> Iterator[str]:
    text = " ".join(map(flat, pages.values()))
    yield from (f"no page says {phrase!r} any more: .ci/figures.py" for phrase in NOT_MEASURED if phrase not in text)


def findings(pages: Pages) -> list[str]:
    checks = wrong_means, wrong_restatements, two_values, without_origin, stale_exceptions
    return [finding for check in checks for finding in check(pages)]


# ---- README's table --------------------------------------------------------------------------------------------------

WORKLOADS = {
    "uniform_varlen": "32 sequences of 4096, 8 heads, d 64",
    "skewed_varlen": "128 skewed sequences, 16 heads, d 64",
    "skewed_causal": "the same, causal",
    "ptv3_patches": "512 x 1024 points, 4 heads, d 16",
    "llm_gqa_causal": "8 x 2048 causal, 32/8 heads, d 128",
    "mistral_window": "16384 causal, window 1024, 32/8 heads",
    "modernbert_local": "8 packed, window 64 to either side, 12 heads",
    "alibi_causal": "4 x 4096 causal, ALiBi, 16 heads",
    "alibi_bidirectional": "4 x 2048, ALiBi, 16 heads",
    "gemma_softcap": "4096 causal, softcap, 8/4 heads, d 128",
    "gemma_softcap_window": "8192 causal, softcap, window 1024",
    "dropout_train": "8 x 1024 causal, dropout 0.1, 16 heads",
    "cross_short_q": "16 x 64 rows over 4096 keys, 16 heads",
}
Run = Mapping[tuple[str, str], Sequence[float]]


def read_run(text: str) -> Run:
    """(workload, contestant): medians in ms of the forward and of forward + backward, of a run saved by --json."""
    return {
        (row["workload"], row["contestant"]): [row[mode]["median_ms"] for mode in ("forward", "both")]
        for row in json.loads(text)["rows"]
        if row["forward"] and row["both"]
    }


def readme_table(native: Run, forced: Run) -> str:
    """README's table and the sentence below it. flash-attn has the better of its two figures."""
    lines = ["| workload | flash-attn | ours without it | ours, forced 7.5 |", "|---|---|---|---|"]
    for name, label in WORKLOADS.items():
        theirs = [min(pair) for pair in zip(native[name, "official"], forced[name, "official"], strict=True)]
        cells = [theirs, native[name, "default"], forced[name, "default"]]
        lines.append("| " + " | ".join([label, *(" / ".join(map(milliseconds, each)) for each in cells)]) + " |")
    table = "\n".join(lines)
    return f"{table}\n\nIn the geometric mean over these, {mean_sentence(speed_rows(table))}"


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main(arguments: Iterable[str]) -> int:
    given = list(arguments)
    if given == ["--list"]:
        print("\n".join(list_figures(read_pages())))
        return 0
    if paths := [Path(argument) for argument in given]:
        native, forced = (read_run(path.read_text(encoding="utf-8")) for path in paths)
        print(readme_table(native, forced))
        return 0
    found = findings(read_pages())
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
