"""`python -m verify report`: one self-contained HTML page from saved or quick runs of compare, bench and locate."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from verify import heatmap, inputs
from verify.environment import checked_devices, describe
from verify.errors import UsageError
from verify.locate import candidate, locate, picture, to_json
from verify.output import console
from verify.page import Picture, Source, page
from verify.probe import Setting
from verify.report_facts import Json, answers, load, speed

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
        "runs quick ones of what it was not given. Exit code 0: every answer is right; 1: one is wrong; 2: a question "
        "that makes no sense.",
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

    quick_compare = ["compare", *QUICK_COMPARE, "--device", device]
    quick_bench = ["bench", "--device", device, "--only", QUICK_WORKLOADS, "--backends", "default", "--repeats", "5"]
    bench_data = benched or _run(quick_bench, "bench")
    compare_data = compared or _run(quick_compare, "compare")
    pictures, found = _pictures(located, device)
    sources = [
        Source("Answers", _command(quick_compare, arguments.compare), compare_data["environment"]),
        Source("Speed and memory", _command(quick_bench, arguments.bench), bench_data["environment"]),
        *found,
    ]
    facts = _read(answers, compare_data, arguments.compare), _read(speed, bench_data, arguments.bench)
    output.write_text(page(*facts, pictures, sources), encoding="utf-8")
    terminal = console()
    terminal.print(f"wrote {output}")
    right = facts[0].all.ok and facts[0].all.given > 0 and not facts[1].wrong
    return 0 if right else 1


def _read(facts_of: Callable[[Json], Facts], data: Json, saved: Path | None) -> Facts:
    """The facts of a run; a saved one may be of another version, or edited by hand."""
    try:
        return facts_of(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if saved is None:
            raise
        raise UsageError(f"{saved} is not as this version writes it: {type(error).__name__} {error}") from error


def _command(quick: Sequence[str], saved: Path | None) -> str:
    return f"saved run {saved.name}" if saved else "python -m verify " + " ".join(quick)


def _run(arguments: list[str], command: str) -> Json:
    """One of the other commands as a user would run it, its tables and progress on this terminal."""
    from verify.cli import main as run_command  # it knows this module, so not before it is needed

    threads = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / f"{command}.json"
            run_command([*arguments, "--json", str(saved)])
            return load(saved, command)
    finally:
        torch.set_num_threads(threads)


# ---- heat maps ------------------------------------------------------------------------------------------------------


def _pictures(located: Sequence[Json], device: str) -> tuple[list[Picture], list[Source]]:
    """Of the saved runs of locate, or of two quick ones: the package as it is, and a mistake for comparison."""
    if located:
        sources = [
            Source("Error heat map", f"python -m verify locate {_names(data, ' ')}", data["environment"])
            for data in located
        ]
        return [_from_saved(data) for data in located], sources
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
    command = (
        f"python -m verify locate {ours.name} {reference.name} --causal --dtype {inputs.short(dtype)} --device {device}"
    )
    return pictures, [Source("Error heat maps", command, describe([device]))]


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
