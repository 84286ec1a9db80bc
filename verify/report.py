"""`python -m verify report`: one self-contained HTML page from saved or quick runs of compare, bench and locate."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from verify import bench, bench_report, compare, locate
from verify.bench_report import FORWARD, Compared, Saved
from verify.environment import checked_devices
from verify.output import check_writable, console
from verify.page import to_html
from verify.tables import Report, Table
from verify.timing import geometric_mean

Read = TypeVar("Read")

QUICK_WORKLOADS = "uniform_varlen,skewed_varlen,llm_gqa_causal,mistral_window,decode_32x4096"
QUICK: dict[ModuleType, list[str]] = {
    compare: ["compare", "--quick"],
    bench: ["bench", "--only", QUICK_WORKLOADS, "--repeats", "5"],
    locate: ["locate", locate.REFERENCE, "verify.backend:reference", "--causal"],
}


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="one HTML page: verdicts, speed, memory, error heat maps, machine",
        description="Writes one page that needs no network and opens from disk, on a phone too. Takes saved runs, and "
        "runs quick ones of what it was not given. Exit code 0: every answer is right; 1: one is wrong; 2: arguments "
        "that make no sense.",
    )
    add = parser.add_argument
    add("--compare", type=Path, metavar="FILE", help="a run saved by `verify compare --json`")
    add("--bench", type=Path, metavar="FILE", help="a run saved by `verify bench --json`")
    add("--locate", type=Path, action="append", default=[], metavar="FILE",
        help="a run saved by `verify locate --json` (may be repeated)")  # fmt: skip
    add("--device", metavar="DEVICE", help="of the quick runs: cpu, cuda, cuda:1, mps (default: the best)")
    add("-o", "--output", type=Path, default=Path("verify-report.html"), metavar="FILE", help="verify-report.html")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    check_writable(arguments.output)
    device = checked_devices([arguments.device] if arguments.device else [])[-1]
    # Everything given is read before anything slow begins.
    compared = compare.load(arguments.compare) if arguments.compare else None
    speed = bench_report.load(arguments.bench) if arguments.bench else None
    maps = [locate.load(path) for path in arguments.locate]
    speed = speed or _run(bench, device, bench_report.load)
    answers, where = compared or _run(compare, device, compare.load)
    maps = maps or [_run(locate, device, locate.load)]
    environment = {
        "answers": _obtained(compare, device, arguments.compare), **where,
        "speed and memory": _obtained(bench, device, arguments.bench),
        **{label: fact for label, fact in speed.environment.items() if where.get(label) != fact and label != "date"},
    }  # fmt: skip
    made = report(compare.report(answers, environment), speed, maps)
    arguments.output.write_text(to_html(made), encoding="utf-8")
    console().print(f"wrote {arguments.output}")
    return 0 if made.ok else 1


def _obtained(command: ModuleType, device: str, saved: Path | None) -> str:
    return f"saved run {saved.name}" if saved else f"python -m verify {' '.join([*QUICK[command], '--device', device])}"


def _run(command: ModuleType, device: str, read: Callable[[Path], Read]) -> Read:
    """Another command as a user would run it, its tables and progress on this terminal."""
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    threads = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder, "a.json")
            command.main(parser.parse_args([*QUICK[command], "--device", device, "--json", str(saved)]))
            return read(saved)
    finally:
        torch.set_num_threads(threads)


def report(answers: Report, speed: Saved, maps: Sequence[tuple[Table, str]]) -> Report:
    """The page of these runs."""
    wrong = [f"{row.workload}: {row.contestant}" for row in speed.rows if row.ours and (row.wrong or row.graph_wrong)]
    lines = [machine(answers.environment)]
    if forced_capability({**answers.environment, **speed.environment}):
        what = "The GPU was treated as another one (its capability was forced)"
        lines.append(f"{what}: the choice of backend is the other GPU's, every time is this one's.")
    lines += [*bench_report.mean_lines(speed.rows), *(caption for _, caption in maps), *answers.conclusion]
    lines += [f"FAIL: wrong or failed while timed: {', '.join(wrong)}"] if wrong else []
    tables = [*answers.tables, bench_report.summary_table(speed.rows), bench_report.detail_table(speed.rows)]
    words = in_plain_words(answers, bench_report.compared(speed.rows))
    return Report("Is flash_attn_compat right on this machine?", answers.environment,
                  [*tables, *(table for table, _ in maps)], lines, answers.ok and not wrong, words)  # fmt: skip


def machine(environment: Mapping[str, str]) -> str:
    """The devices in one line, accelerators first."""
    devices = [fact for label, fact in environment.items() if label.startswith("device ")]
    return "; ".join(reversed(devices)) or "an unknown device"


def forced_capability(environment: Mapping[str, str]) -> bool:
    """Whether the run pretended that the GPU was another one."""
    return "FLASH_ATTN_COMPAT_CAPABILITY=" in environment.get("settings", "") or any(
        "(forced)" in fact for fact in environment.values()
    )


def in_plain_words(answers: Report, speed: Sequence[Compared]) -> str:
    """One paragraph for readers who have never heard of attention kernels."""
    about = (
        "Programs that understand and write text or draw pictures spend much of their time on one calculation, called "
        "attention. The best-known fast program for it, flash-attn, runs on certain graphics cards only; "
        "flash_attn_compat is meant to give the same answers everywhere. For this page it was given exercises whose "
        "right answers are known. "
    )
    about += "Every answer was right." if answers.ok else "Not every answer was right, so do not rely on it here."
    for rival, ratio in (("flash-attn", Compared.to_flash), ("what people use without flash-attn", Compared.to_other)):
        if factors := [factor for each in speed if not each.mine.wrong and (factor := ratio(each, FORWARD))]:
            mean = geometric_mean(factors)
            how = f"{mean:.1f} times as fast as" if mean > 1.1 else "about as fast as" if mean > 0.9 else "slower than"
            about += f" It was {how} {rival} ({min(factors):.2g} to {max(factors):.2g} times its speed)."
    return about
