"""Starts the implementations' processes, compares their answers, prints the table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import benchmarks.end_to_end
from benchmarks.end_to_end.agreement import compared, reference
from benchmarks.end_to_end.program import Implementation, figure
from benchmarks.end_to_end.programs import PROGRAMS
from flash_attn_compat import settings
from flash_attn_compat.installed import SITE
from verify.output import add_output_arguments, check_output_arguments, console, deliver
from verify.tables import Report, Table

REPOSITORY = Path(__file__).resolve().parents[2]
Rows = dict[str, dict[str, Any]]  # program -> what was found


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=benchmarks.end_to_end.__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="float16, on a CPU float32")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: does everything run?")
    parser.add_argument("--programs", nargs="+", choices=tuple(PROGRAMS), default=list(PROGRAMS), metavar="PROGRAM",
                        help=", ".join(PROGRAMS))  # fmt: skip
    parser.add_argument("--implementations", nargs="+", metavar="NAME",
                        help="ours, official, sdpa, switched (sdpa on our kernels), eager; ours@7.5, sdpa@7.5: on what "
                        "such a GPU has")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that one program may take")
    add_output_arguments(parser)
    options = parser.parse_args(argv)
    check_output_arguments(options)
    options.dtype = options.dtype or ("float16" if options.device.startswith("cuda") else "float32")
    options.implementations = options.implementations or _usual(options.device)
    for name in options.implementations:
        if Implementation(name).kind not in ("ours", "official", "sdpa", "switched", "eager"):
            parser.error(f"unknown implementation {name!r}")
    return options


def _usual(device: str) -> list[str]:
    """The most telling first, should time run out."""
    if device.startswith("cuda") and torch.cuda.get_device_capability(device) >= (8, 0):
        return ["official", "ours@7.5", "sdpa@7.5", "switched@7.5", "ours", "eager"]
    return ["ours", "sdpa", "eager"]


def _environment(implementation: Implementation) -> dict[str, str]:
    """Ours stands before a real flash-attn, which is not asked; the others see nothing of ours."""
    env = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    path = [str(REPOSITORY), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if implementation.kind == "ours":
        path.insert(0, SITE)
        env[settings.DISABLE_OFFICIAL] = "1"
    else:
        env.pop(settings.DISABLE_OFFICIAL, None)
    if implementation.forced:
        env[settings.CAPABILITY] = implementation.forced
    env["PYTHONPATH"] = os.pathsep.join(path)
    return env


def run(implementation: Implementation, options: argparse.Namespace, folder: Path) -> tuple[Rows, str]:
    """The rows of one implementation, and why there are none where it is not here.

    A process that dies or takes too long loses the program it was at; another one goes on behind it.
    """
    rows: Rows = {}
    waiting = list(options.programs)
    while waiting:
        how = [str(options.repeats), str(options.limit), "tiny" if options.tiny else "real"]
        command = [sys.executable, "-m", "benchmarks.end_to_end.worker", str(folder), implementation.name,
                   options.device, options.dtype, *how, *waiting]  # fmt: skip
        ended = subprocess.run(command, env=_environment(implementation), cwd=REPOSITORY, check=False, text=True,
                               stderr=subprocess.PIPE)  # fmt: skip
        if (folder / "not_here").exists():
            return rows, (folder / "not_here").read_text()
        while waiting and (folder / f"{waiting[0]}.json").exists():
            program = waiting.pop(0)
            rows[program] = json.loads((folder / f"{program}.json").read_text())
        if waiting:
            last = (ended.stderr.strip().splitlines() or ["without a word"])[-1]
            late = ended.returncode == -signal.SIGALRM
            what = f"took more than {options.limit:.0f} s" if late else f"exit code {ended.returncode}: {last}"
            rows[waiting.pop(0)] = {"error": what}
    return rows, ""


def main(argv: list[str] | None = None) -> int:
    """Prints; 0 if every program of ours ran and agrees, else 1."""
    options = _arguments(argv)
    data: dict[str, Any] = {"machine": _machine(options), "not_here": {}, "programs": {}}
    found: dict[str, Rows] = data["programs"]
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.implementations:
            folder = Path(temporary, name)
            folder.mkdir()
            found[name], why = run(Implementation(name), options, folder)
            if why:
                data["not_here"][name] = why
            _compare(found, options, Path(temporary))
            if options.json:  # should time run out
                options.json.write_text(json.dumps(data, indent=1))
    ours = [row for name in found if Implementation(name).kind in ("ours", "switched") for row in found[name].values()]
    wrong = sum(map(_is_wrong, ours))
    lines = [f"{name}: {why}" for name, why in data["not_here"].items()]
    lines.append(f"FAIL: {wrong} programs of ours" if wrong else "PASS: every program of ours ran and agrees")
    machine = {label: str(fact) for label, fact in data["machine"].items()}
    table = _table(found, options.programs)
    deliver(Report("benchmarks end_to_end", machine, [table], lines, not wrong), data, options, console())
    return int(wrong > 0)


def _is_wrong(row: dict[str, Any]) -> bool:
    return not row["agrees"] if "ms" in row else "not_here" not in row


def _compare(found: dict[str, Rows], options: argparse.Namespace, folder: Path) -> None:
    for program in options.programs:
        answers = {
            name: torch.load(folder / name / f"{program}.pt")
            for name, rows in found.items()
            if "ms" in rows.get(program, {})
        }
        judge = reference(list(answers))
        for name, answer in answers.items():
            row = found[name][program]
            row["reference"] = judge
            row["difference"], row["agrees"] = compared(answer, answers[judge], getattr(torch, options.dtype))


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else None
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"torch": torch.__version__, "device": gpu or options.device, "dtype": options.dtype, "tiny": options.tiny,
            "repeats": options.repeats, "threads": torch.get_num_threads(), "load": load}  # fmt: skip


def _table(found: dict[str, Rows], programs: list[str]) -> Table:
    def cells(name: str, row: dict[str, Any]) -> list[str]:
        if "error" in row:
            return ["-", "-", row["error"][:90], "-", "not supported" if "not_here" in row else "FAIL"]
        agreement = "the others' measure" if name == row["reference"] else row["difference"]
        memory = f"{row['peak_bytes'] / 2**20:,.1f} MiB"
        return [figure(row), memory, agreement, row["served_by"], "pass" if row["agrees"] else "FAIL"]

    rows = [
        [program, name, *cells(name, of_one[program])]
        for program in programs
        for name, of_one in found.items()
        if program in of_one
    ]
    columns = ("program", "implementation", "speed", "peak memory", "agreement", "served by", "")
    return Table("Whole programs", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
