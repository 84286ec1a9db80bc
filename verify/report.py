"""`python -m verify report`: one self-contained HTML page from saved or quick runs of compare, bench and locate."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from verify import bench, compare, heatmap, inputs
from verify.environment import checked_devices
from verify.errors import UsageError
from verify.locate import candidate, locate, picture, to_json
from verify.output import console
from verify.page import to_html
from verify.probe import Setting
from verify.report_facts import (
    FLASH,
    WORKAROUNDS,
    Answers,
    Json,
    Pair,
    Score,
    Speed,
    answers,
    forced_capability,
    load,
    machine,
    speed,
    typical,
)
from verify.tables import Bar, Picture, Report, Table

Facts = TypeVar("Facts")

QUICK_COMPARE = ("--quick",)
QUICK_WORKLOADS = "uniform_varlen,skewed_varlen,llm_gqa_causal,mistral_window,decode_32x4096"
DEFAULT_OUTPUT = Path("verify-report.html")
PLANTED = "verify.planted:maximum_without_tile_offset"


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="one HTML page: verdicts, speed, memory, error heat maps, machine",
        description="Writes one page that needs no network and opens from disk, on a phone too. Takes saved runs, and "
        "runs quick ones of what it was not given. Exit code 0: every answer is right; 1: one is wrong; 2: arguments "
        "that make no sense.",
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a run saved by `verify compare --json`")
    parser.add_argument("--bench", type=Path, metavar="FILE", help="a run saved by `verify bench --json`")
    parser.add_argument(
        "--locate",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a run saved by `verify locate --json` (may be repeated)",
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help="of the quick runs: cpu, cuda, cuda:1, mps (default: the best)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE", help=f"default {DEFAULT_OUTPUT}"
    )
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UsageError(
            f"cannot write {output}: " + ("it is a folder" if output.is_dir() else "there is no such folder")
        )
    inputs.check_matplotlib()
    device = checked_devices([arguments.device] if arguments.device else [])[-1]
    # Everything given is read before anything slow begins.
    compared = load(arguments.compare, "compare") if arguments.compare else None
    benched = load(arguments.bench, "bench") if arguments.bench else None
    located = [load(path, "locate") for path in arguments.locate]

    quick_compare = [*QUICK_COMPARE, "--device", device]
    quick_bench = ["--device", device, "--only", QUICK_WORKLOADS, "--repeats", "5"]
    bench_data = benched or _run(bench, "bench", quick_bench)
    compare_data = compared or _run(compare, "compare", quick_compare)
    facts = _read(answers, compare_data, arguments.compare), _read(speed, bench_data, arguments.bench)
    pictures, how = _pictures(located, device)
    environment = {
        "answers": _command("compare", quick_compare, arguments.compare),
        **compare_data["environment"],
        "speed and memory": _command("bench", quick_bench, arguments.bench),
        **{
            label: fact for label, fact in bench_data["environment"].items() if label not in compare_data["environment"]
        },
        "heat maps": how,
    }
    made = report(*facts, environment, pictures)
    output.write_text(to_html(made), encoding="utf-8")
    console().print(f"wrote {output}")
    return 0 if made.ok else 1


def _others(environment: Json, known: Json) -> dict[str, str]:
    """What one run has beside, or other than, the run that is known already."""
    return {
        f"{label} (speed)" if label in known else label: fact
        for label, fact in environment.items()
        if known.get(label) != fact
    }


def _read(facts_of: Callable[[Json], Facts], data: Json, saved: Path | None) -> Facts:
    """The facts of a run; a saved one may be of another version, or edited by hand."""
    try:
        return facts_of(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if saved is None:
            raise
        raise UsageError(f"{saved} is not as this version writes it: {type(error).__name__} {error}") from error


def _command(command: str, quick: Sequence[str], saved: Path | None) -> str:
    return f"saved run {saved.name}" if saved else f"python -m verify {command} {' '.join(quick)}"


def _run(command: ModuleType, name: str, arguments: Sequence[str]) -> Json:
    """Another command as a user would run it, its tables and progress on this terminal."""
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    threads = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / f"{name}.json"
            command.main(parser.parse_args([name, *arguments, "--json", str(saved)]))
            return load(saved, name)
    finally:
        torch.set_num_threads(threads)


# ---- what it says ---------------------------------------------------------------------------------------------------


def report(answers: Answers, speed: Speed, environment: dict[str, str], pictures: Sequence[Picture]) -> Report:
    score = answers.all
    ok = score.ok and score.given > 0 and not speed.wrong
    lines = [machine(environment)]
    if forced_capability(environment):
        lines.append(
            "The GPU was treated as another one (its capability was forced): the choice of backend is the other GPU's, "
            f"every time is this one's. {environment.get('settings', '')}"
        )
    if speed.wrong:
        lines.append(f"Wrong or failed while timed: {', '.join(speed.wrong)}")
    if answers.idle:
        lines.append("Not in use here: " + "; ".join(f"{name} ({why})" for name, why in answers.idle))
    verdict = f"{score.right} of {score.given} answers are right." if score.given else "No case ran here."
    lines.append(f"All {score.given} answers are right." if score.ok and score.given else verdict)
    tables = [_scores("Answers by backend", answers.by_backend), _scores("Answers by function", answers.by_function)]
    if answers.wrong:
        tables.insert(0, Table("Wrong answers", ("case", "what is wrong"), answers.wrong))
    for names, rival in ((FLASH, "flash-attn"), (WORKAROUNDS, "the fastest way without it")):
        if pairs := speed.against(names):
            tables.append(_race(f"Beside {rival}, forward", pairs))
    if speed.workloads:
        tables.append(_figures(speed))
    words = in_plain_words(answers, speed, machine(environment))
    return Report("Is flash_attn_compat right on this machine?", environment, tables, lines, ok, words, pictures)


def _scores(title: str, scores: Sequence[Score]) -> Table:
    rows = [
        (score.name, f"{score.right} of {score.given}", Bar(_percent(score.worst), score.worst),
         "pass" if score.ok else "FAIL")
        for score in scores if score.given
    ]  # fmt: skip
    return Table(title, (title.rpartition(" ")[2], "right", "worst error, of what is allowed", "verdict"), rows)


def _race(title: str, pairs: Sequence[Pair]) -> Table:
    longest = max(pair.times_as_fast for pair in pairs)
    rows = [
        (pair.workload, pair.rival, Bar(f"{pair.times_as_fast:.2f} x", pair.times_as_fast / longest),
         "" if pair.memory_share is None else _percent(pair.memory_share))
        for pair in pairs
    ]  # fmt: skip
    return Table(title, ("workload", "beside", "times as fast", "of its peak memory"), rows)


def _figures(speed: Speed) -> Table:
    rows = [
        (f"{workload.name} ({workload.description})", entry.label, *(
            "" if value is None else f"{value:.3g}" for value in (entry.forward_ms, entry.both_ms, entry.memory_mib)
        ))
        for workload in speed.workloads for entry in workload.entries
    ]  # fmt: skip
    columns = ("workload", "by", "forward ms", "forward + backward ms", "peak MiB beyond the inputs")
    return Table(f"Every figure, medians{f', {speed.dtype}' if speed.dtype else ''}", columns, rows, folded=True)


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else ">100x" if not share < 100 else f"{share:.0%}"


def in_plain_words(answers: Answers, speed: Speed, where: str) -> str:
    """One paragraph for readers who have never heard of attention kernels."""
    score = answers.all
    known = f", {answers.recorded} of them answered by flash-attn itself beforehand" if answers.recorded else ""
    methods = len(answers.by_backend)
    by = f", in the {methods} ways it has of computing here, {score.given} answers in all" if methods > 1 else ""
    missed = score.given - score.right
    about = (
        "Programs that understand and write text or draw pictures spend much of their time on one calculation, called "
        "attention. The best-known fast program for it, flash-attn, runs on certain graphics cards only; "
        "flash_attn_compat is meant to give the same answers everywhere. "
        f"For this page it was tried on one machine ({where}) with {answers.exercises} exercises whose right answers "
        f"are known{known}{by}."
    )
    right = (
        "Every answer was right. Computers round numbers, so no answer is exact to the last digit; the one furthest "
        f"off used {score.worst:.0%} of the error that is allowed for rounding."
    )
    wrong = f"{missed} {'was' if missed == 1 else 'were'} wrong, so do not rely on it here."
    sentences = [
        about,
        right if score.ok else wrong,
        _speed_in_words(speed.against(FLASH), "flash-attn"),
        _speed_in_words(speed.against(WORKAROUNDS), "the fastest of the ways that people use without flash-attn"),
    ]
    return " ".join(filter(None, sentences))


def _speed_in_words(pairs: Sequence[Pair], rival: str) -> str:
    if not pairs:
        return ""
    factors = [pair.times_as_fast for pair in pairs]
    factor, share = typical(factors), typical(pair.memory_share for pair in pairs)
    how = f"{factor:.1f} times as fast as" if factor > 1.1 else "about as fast as" if factor > 0.9 else "slower than"
    spread = f"{min(factors):.2g} to {max(factors):.2g} times its speed"
    less = f", with {_percent(share)} of its memory on average" if share < 0.95 else ", with no less memory"
    jobs = f"On {len(pairs)} typical jobs" if len(pairs) > 1 else "On the job that was timed"
    return f"{jobs} it was {how} {rival} ({spread}){'' if math.isnan(share) else less}."


# ---- heat maps ------------------------------------------------------------------------------------------------------


def _pictures(located: Sequence[Json], device: str) -> tuple[list[Picture], str]:
    """Of the saved runs of locate, or of two quick ones: the package as it is, and a mistake for comparison."""
    if located:
        how = "; ".join(f"python -m verify locate {_names(data, ' ')}" for data in located)
        return [_from_saved(data) for data in located], how
    shape = (2, 256, 4, 64)
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = inputs.draw({"q": shape, "k": shape, "v": shape}, dtype, 0).values()
    setting = Setting(q, k, v, causal=True, block_rows=64, block_columns=64, device=device)
    ours, reference, planted = (
        candidate(path) for path in ("flash_attn_compat:flash_attn_func", "verify.backend:reference", PLANTED)
    )
    pictures = []
    for kernel, title in ((ours, "flash_attn_compat on this machine"), (planted, "For comparison: a planted mistake")):
        found = locate(kernel, reference, setting)
        data = to_json(found)
        pictures.append(Picture(picture(found, title=""), title, _caption(data)))
    options = f"--causal --dtype {inputs.short(dtype)} --device {device}"
    return pictures, f"python -m verify locate {ours.name} {reference.name} {options}"


def _names(data: Json, between: str) -> str:
    return between.join(kernel["name"] for kernel in data["kernels"])


def _from_saved(data: Json) -> Picture:
    heat = data["heat_map"]
    values = [[float("inf") if value is None else value for value in line] for line in heat["values"]]
    drawn = heatmap.png(values, data["tolerance"], heat["rows_per_cell"], "", data["block_rows"])
    return Picture(drawn, _names(data, " against "), _caption(data))


def _caption(data: Json) -> str:
    names = _names(data, " against ")
    if data["same"]:
        return f"{names}: no element differs by more than {data['tolerance']:.1e}."
    first = ", ".join(f"{axis} {data['first'][axis]}" for axis in ("batch", "head", "row", "channel"))
    named = "; ".join(lines[-1].removeprefix("=> ") for lines in data["findings"].values() if lines)
    return f"{names}: {data['share']:.0%} of the elements differ, in {data['texture']}, the first at {first}." + (
        f" What locate makes of it: {named}." if named else ""
    )
