"""`python -m verify bench`: how fast, and how much memory, beside what people write without us and flash-attn itself.

Options and the order of events; what is timed is in workloads.py, by whom in contestants.py, how in timing.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from verify import bench_report as tables
from verify import graphs
from verify import implementations as impl
from verify.bench_run import Plan, Row, run, tiny_host_times
from verify.contestants import RIVALS, USUAL_RIVALS, Contestant, Official, Ours
from verify.environment import checked_devices, describe
from verify.errors import UsageError
from verify.inputs import positive
from verify.output import (
    add_output_arguments,
    check_output_arguments,
    console,
    deliver,
    progress_bar,
    show,
)
from verify.tables import COLOURS, Report
from verify.thresholds import judged
from verify.timing import DeviceLost
from verify.workloads import DECODE, FULL, SMALL, Workload

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time and memory beside the pad/SDPA/unpad scheme and flash-attn",
        description="Times what the package chooses on workloads taken from well-known models, beside the "
        "pad/SDPA/unpad scheme and flash-attn (or PyTorch's own build of it), and checks every answer against fp64. "
        "Exit code 0: all answers right; 1: one is wrong or failed, or --against found a regression.",
    )
    add = parser.add_argument
    add("--device", default=None, metavar="DEVICE", help="cpu (default), cuda, cuda:1, mps")
    add("--gpu", action="store_true", help="the full workloads on the CUDA device: --device cuda")
    add("--dtype", choices=DTYPES, help="default fp16, on a CPU fp32")
    add("--only", action="append", default=[], metavar="NAME[,NAME]", help="workloads with this in their name")
    add("--backends", default="default", metavar="A,B", help="of ours these: 'default' is what dispatch chooses, 'all'")
    add("--rivals", default="", metavar="A,B", help=f"only these of the others ('none': nobody): {', '.join(RIVALS)}")
    add("--repeats", type=positive, default=7, metavar="N", help="readings of each figure (default 7)")
    add("--forward-only", action="store_true", help="no gradients")
    add("--small", action="store_true", help="the small workloads, which are the default on a CPU")
    add("--against", type=Path, metavar="FILE", help="compare with a run saved by --json")
    add(
        "--tolerance", type=_share, default=0.1, metavar="SHARE", help="with --against: how much slower is a regression"
    )
    add_output_arguments(parser)
    parser.set_defaults(run=main)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text!r}")
    return value


def plan_from(arguments: argparse.Namespace) -> Plan:
    """The plan the arguments describe, or a UsageError."""
    if arguments.gpu and arguments.device not in (None, "cuda"):
        raise UsageError(f"--gpu means --device cuda, not {arguments.device}")
    device = checked_devices([arguments.device or ("cuda" if arguments.gpu else "cpu")])[0]
    kind = device.partition(":")[0]
    return Plan(
        workloads=_workloads(arguments, kind),
        contestants=[*_ours(_names(arguments.backends)), *_rivals(_names(arguments.rivals) or USUAL_RIVALS[kind])],
        device=device,
        dtype=DTYPES[arguments.dtype or ("fp32" if kind == "cpu" else "fp16")],
        repeats=arguments.repeats,
        backward=not arguments.forward_only,
        graphs=kind == "cuda",
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _ours(names: Sequence[str]) -> list[Contestant]:
    known = [backend.name for backend in impl.backends([])]
    names = ["default", *known] if list(names) == ["all"] else names
    for name in names:
        if name not in ("default", *known):
            raise UsageError(f"unknown backend {name!r}; there are default, all, {', '.join(known)}")
    return [Ours(None if name == "default" else name) for name in names]


def _rivals(names: Sequence[str]) -> list[Contestant]:
    names = [] if list(names) == ["none"] else names
    for name in names:
        if name not in RIVALS:
            raise UsageError(f"unknown rival {name!r}; there are {', '.join(RIVALS)}, none")
    return [RIVALS[name]() for name in names]


def _workloads(arguments: argparse.Namespace, kind: str) -> list[Workload]:
    there = SMALL if arguments.small or kind != "cuda" else (*FULL, *DECODE)
    wanted = [name for text in arguments.only for name in _names(text)]
    for name in wanted:
        if not any(name in workload.name for workload in there):
            raise UsageError(f"no workload {name!r}; there are {', '.join(workload.name for workload in there)}")
    return [workload for workload in there if not wanted or any(name in workload.name for name in wanted)]


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: argparse.Namespace) -> int:
    check_output_arguments(arguments)
    plan, terminal = plan_from(arguments), console()
    saved = tables.load(arguments.against) if arguments.against else None
    environment = {**describe([plan.device]), "dtype": str(plan.dtype).removeprefix("torch."),
                   "official flash-attn": Official().version}  # fmt: skip
    terminal.print(Text("; ".join(environment.values()), style="dim"), soft_wrap=True)
    rows: list[Row] = []
    host_us: dict[str, float] = {}
    lost = ""
    with progress_bar(terminal) as progress:
        task = progress.add_task("host time", total=len(plan.workloads))

        def step(what: str) -> None:
            progress.update(task, description=what)

        try:
            host_us = tiny_host_times(plan) if plan.device.startswith("cuda") else {}
            for workload, found in zip(plan.workloads, run(plan, step)):
                rows += found
                _print_rows(workload, found, terminal)
                progress.advance(task)
            for found in graphs.measured(plan, rows, step):
                rows = [next((new for new in found if new.key == row.key), row) for row in rows]
        except DeviceLost as reason:
            lost = f"the CUDA device gave up, nothing could be measured after: {reason}"
        except KeyboardInterrupt:
            lost = "interrupted: these are the figures up to then"

    on_cuda = plan.device.startswith("cuda")
    recorded_applies = on_cuda and plan.dtype == torch.float16 and "H200" in torch.cuda.get_device_name(plan.device)
    lines = []
    if host_us:
        figures = ", ".join(f"{name} {us:.1f} us" for name, us in host_us.items())
        lines.append(f"host time of a tiny varlen call: {figures}")
    lines += tables.mean_lines(plan.workloads, rows, recorded_applies)
    by_workload = tables.rows_by_workload(rows)
    ratios = [tables.ratios(each, by_workload.get(each.name, {}), recorded_applies) for each in plan.workloads]
    promises = judged([each for each in ratios if each], host_us) if on_cuda else []
    lines += promises
    graph_table = tables.graph_table(plan.workloads, rows)
    summary = [tables.summary_table(plan.workloads, rows, recorded_applies), *([graph_table] if graph_table else [])]
    regressed = False
    if saved:
        table, conclusion, regressed = tables.against(saved, rows, arguments.tolerance)
        summary.append(table)
        warning = tables.differing_devices(saved, environment)
        lines += [*conclusion, *([warning] if warning else [])]
    wrong = [
        f"{row.workload} {row.contestant}: {tables.remarks(row)}"
        for row in rows
        if row.ours and (row.wrong or row.graph_wrong)
    ]
    lines += [f"WRONG OR FAILED  {line}" for line in wrong] + ([lost] if lost else [])
    bad = [what for what, there in (("wrong", wrong), ("slower", regressed), ("unfinished", lost)) if there]
    lines.append(f"FAIL: {', '.join(bad)}" if bad else "PASS: every answer of ours is right")

    # The terminal has seen every row already.
    show(Report("verify bench", environment, summary, lines, not bad), terminal)
    data = {
        "rows": [row.to_json() for row in rows],
        "workloads": {workload.name: workload.describe() for workload in plan.workloads},
        "host_microseconds": host_us,
        "promises": promises,
    }
    full = Report("verify bench", environment, [*summary, tables.detail_table(rows)], lines, not bad)
    deliver(full, data, arguments, Console(quiet=True))
    return 1 if bad else 0


def _print_rows(workload: Workload, rows: Sequence[Row], terminal: Console) -> None:
    terminal.print(Text(f"{workload.name}: {workload.describe()}", style="bold"))
    for row in rows:
        if not row.forward and not row.failed:
            terminal.print(Text(f"  without {row.contestant}: {row.reason}", style="dim"), soft_wrap=True)
            continue
        _, name, forward, both, _, memory, verdict, remarks = tables.detail(row)
        line = Text(f"  {name:28} {forward:>13} {both:>13} ms {memory:>8} MiB  ")
        line.append(verdict, style=COLOURS.get(verdict, ""))
        line.append(f"  {remarks}", style="dim")
        terminal.print(line, soft_wrap=True)
    terminal.file.flush()
