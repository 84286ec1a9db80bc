"""`python -m verify bench`: times the package beside flash-attn and PyTorch's own attention, and checks answers.

Options and the order of steps. workloads.py holds the problems, contestants.py the contestants, timing.py the clock.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from flash_attn_compat.backends import BACKENDS
from flash_attn_compat.card import measure_limits
from flash_attn_compat.gpu_state import Monitor
from flash_attn_compat.isolation import Ended, run_in_children

from . import bench_pictures
from . import bench_report as tables
from . import implementations as impl
from .bench_run import Plan, Row, run
from .contestants import RIVALS, USUAL_RIVALS, Contestant, ours
from .environment import checked_devices, describe
from .errors import UsageError
from .graphs import graphed
from .inputs import dtype, number, positive
from .native import is_isolated
from .output import announce, console, deliver, progress_bar, shown
from .own import own
from .tables import COLOURS, OURS, TOO_LITTLE, Picture, Report, counted
from .timing import DeviceLost, Failed, attempt
from .workloads import DECODE, FULL, PLAIN, SMALL, Workload, fitted, of_lengths, shrunk

LADDER = "verify's ladder"
FP32_ASKED = "the tensors were fp32, the default on a CPU: for a kernel of half precision add --dtype fp16"
ISOLATE = "run in child processes, so that a crash is named (default for a kernel on a GPU or with native code)"
Step = Callable[[str], None]
Problem = tuple[str, Callable[[Step], list[Row]]]  # its name, and a function that returns its rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default=None, metavar="DEVICE", help="cpu (default), cuda, cuda:1, mps")
    add("--gpu", action="store_true", help="the full workloads on the CUDA device: --device cuda")
    add("--dtype", type=dtype, help="fp16 (default), bf16, fp32 (default on a CPU)")
    add("--only", action="append", default=[], metavar="NAME[,NAME]", help="workloads with this text in their name")
    add("--lengths", type=positive, nargs="+", metavar="N", help="causal problems of these sequence lengths instead")
    what = "time this kernel beside the package and the others, on plain squares first"
    add("--implementation", metavar="MODULE_OR_FILE.py[:ATTRIBUTE]", help=what)
    add("--isolate", action=argparse.BooleanOptionalAction, default=None, help=ISOLATE)
    add("--backends", default="default", metavar="A,B", help="our contestants: 'default', backend names, or 'all'")
    add("--rivals", default="", metavar="A,B", help=f"only these rivals ('none': no rival): {', '.join(RIVALS)}")
    add("--repeats", type=positive, default=7, metavar="N", help="readings of each figure (default 7)")
    add("--forward-only", action="store_true", help="no gradients")
    add("--small", action="store_true", help="the small workloads, the default on a CPU")
    add("--against", type=Path, metavar="FILE", help="compare with a run saved by --json")
    add(
        "--tolerance",
        type=number,
        default=0.1,
        metavar="SHARE",
        help="a larger increase over --against is a regression",
    )


def plan_from(arguments: argparse.Namespace) -> Plan:
    """Return the plan that the arguments describe. Raises UsageError"""
    if arguments.gpu and arguments.device not in (None, "cuda"):
        raise UsageError(f"--gpu means --device cuda, not {arguments.device}")
    device = checked_devices([arguments.device or ("cuda" if arguments.gpu else "cpu")])[0]
    kind = device.partition(":")[0]
    mine = {name or "default": ours(name) for name in (None, *(backend.name for backend in BACKENDS))}
    backends = ",".join(mine) if arguments.backends == "all" else arguments.backends
    package = _chosen(backends, mine, "backend")
    if arguments.implementation:
        package = [own(arguments.implementation), *(replace(each, ours=False) for each in package)]
    rivals = "" if arguments.rivals == "none" else arguments.rivals or ",".join(USUAL_RIVALS[kind])
    return Plan(
        workloads=_workloads(arguments, kind),
        contestants=[*package, *_chosen(rivals, RIVALS, "rival")],
        device=device,
        dtype=arguments.dtype or (torch.float32 if kind == "cpu" else torch.float16),
        repeats=arguments.repeats,
        backward=not arguments.forward_only,
        graphs=kind == "cuda",
        only_served=bool(arguments.implementation),
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _chosen(text: str, there: dict[str, Contestant], what: str) -> list[Contestant]:
    for name in _names(text):
        if name not in there:
            raise UsageError(f"unknown {what} {name!r}; choose from {', '.join(there)}")
    return [there[name] for name in _names(text)]


def _workloads(arguments: argparse.Namespace, kind: str) -> list[Workload]:
    small = arguments.small or kind != "cuda"
    if arguments.lengths:
        return of_lengths(sorted(set(arguments.lengths)), small)
    plain = PLAIN if arguments.implementation else ()
    there = (*map(shrunk, plain), *SMALL) if small else (*plain, *FULL, *DECODE)
    wanted = [name for text in arguments.only for name in _names(text)]
    for name in wanted:
        if not any(name in workload.name for workload in there):
            raise UsageError(f"no workload {name!r}; choose from {', '.join(workload.name for workload in there)}")
    return [workload for workload in there if not wanted or any(name in workload.name for name in wanted)]


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: argparse.Namespace) -> int:
    kernel: str | None = arguments.implementation
    plan, terminal = plan_from(arguments), console()
    isolated = is_isolated(arguments.isolate, kernel, plan.device)
    if kernel:
        (impl.check_loads if isolated else impl.imported)(kernel)  # raises for a wrong path before the work
    environment = {**describe([plan.device]), "dtype": str(plan.dtype).removeprefix("torch."),
                   "official flash-attn": impl.official()[1]}  # fmt: skip
    if plan.device.startswith("cuda"):
        monitor = Monitor(torch.device(plan.device))
        monitor.read()
        environment["clock and power"] = monitor.decline_reason or "read while each workload is timed"
    saved = tables.load(arguments.against) if arguments.against else None
    announce(environment, terminal)
    try:
        plan = on_card(plan)
        rows, lost = gathered(isolated_problems(plan, kernel) if isolated else problems(plan), terminal)
    except DeviceLost as reason:
        rows, lost = [], f"the CUDA device failed at the first call: {reason}"
    data = {"workloads": {workload.name: workload.describe() for workload in plan.workloads}}
    pictures = bench_pictures.curves(rows, plan.workloads if arguments.lengths else ())
    yardsticks = tables.YARDSTICKS
    if kernel:
        package = [each.name for each in plan.contestants if not each.ours and each.name not in RIVALS]
        yardsticks = {OURS: package, **yardsticks}
    is_default_fp32 = not arguments.dtype and plan.dtype == torch.float32
    ran = any(row.ours and not row.declined for row in rows)
    closing = [FP32_ASKED] if kernel and is_default_fp32 and not ran else []
    return conclude("verify bench", environment, rows, lost, arguments, saved, yardsticks, closing, data,
                    pictures, kernel or OURS)  # fmt: skip


def on_card(plan: Plan) -> Plan:
    """Return the plan with workloads cut to the device's memory and speed. Raises DeviceLost"""
    limits = attempt(plan.device, measure_limits, torch.device(plan.device), plan.dtype)
    if isinstance(limits, Failed):  # each workload then reports the reason
        return plan
    return replace(plan, workloads=[fitted(workload, limits) for workload in plan.workloads])


def problems(plan: Plan) -> list[Problem]:
    in_graphs = graphed(plan)
    return [(f"{workload.name}: {workload.describe()}", functools.partial(run, each, workload))
            for each in (plan, in_graphs) for workload in each.workloads]  # fmt: skip


def isolated_problems(plan: Plan, kernel: str | None) -> list[Problem]:
    """Return the plan's problems, run in child processes. If one ends, the kernel or our first contestant failed."""
    given = problems(plan)
    results = run_in_children(len(given), steps, plan)
    blamed = kernel or next(each.name for each in plan.contestants if each.ours)

    def of_next(name: str, step: Step) -> list[Row]:
        step(name)
        found = next(results)
        return [Row(name, blamed, True).but(Failed(found.how))] if isinstance(found, Ended) else found

    return [(heading, functools.partial(of_next, heading.partition(":")[0])) for heading, _ in given]


def steps(first: int, plan: Plan) -> Iterator[list[Row]]:
    """Yield the rows of the problems from number ``first`` on. A contestant that breaks the GPU counts as failed."""
    for heading, of_one in problems(plan)[first:]:
        begun = [""]
        try:
            found = of_one(begun.append)
        except DeviceLost as reason:
            broke = [each for each in plan.contestants if begun[-1].endswith(f"checking {each.name}")]
            broke = broke or [each for each in plan.contestants if each.ours]
            failed = Failed(f"it broke the GPU, or found it broken: {reason}")
            found = [Row(heading.partition(":")[0], broke[0].name, broke[0].ours).but(failed)]
        yield found


def gathered(given: Sequence[Problem], terminal: Console) -> tuple[list[Row], str]:
    """Show the rows as they come. Return the rows, and the reason if the run ended early."""
    rows: list[Row] = []
    terminal.print(Text(f"  {'':28} {'forward':>13} {'and backward':>13} ms {'peak':>8} MiB  answer", style="dim"))
    with progress_bar(terminal, in_a_thread=False) as progress:
        task = progress.add_task("", total=len(given))

        def step(what: str) -> None:
            progress.update(task, description=what, refresh=True)

        try:
            for heading, of_one in given:
                found = of_one(step)
                rows += found
                _print_rows(heading, found, terminal)
                progress.advance(task)
        except DeviceLost as reason:
            return rows, f"the CUDA device failed, later workloads were not measured: {reason}"
        except KeyboardInterrupt:
            return rows, "interrupted: these are the figures so far"
    return rows, ""


def _print_rows(heading: str, rows: Sequence[Row], terminal: Console) -> None:
    """Show the figures of a workload. A table at the end shows the rows without figures, counted by reason."""
    answered = [row for row in rows if not row.declined]
    if answered:
        terminal.print(shown(heading, "bold"), soft_wrap=True)
    for row in answered:
        _, name, forward, both, memory, *_, verdict, remarks = tables.detail(row)
        line = shown(f"  {name:28} {forward:>13} {both:>13} ms {memory:>8} MiB  ")
        line.append(verdict, style=COLOURS.get(verdict, "")).append(shown(f"  {remarks}", "dim"))
        terminal.print(line, soft_wrap=True)
    terminal.file.flush()


def conclude(
    title: str,
    environment: Mapping[str, str],
    rows: Sequence[Row],
    lost: str,
    arguments: argparse.Namespace,
    saved: tables.Saved | None = None,
    yardsticks: tables.Yardsticks = tables.YARDSTICKS,
    closing: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
    pictures: Sequence[Picture] = (),
    subject: str = OURS,
) -> int:
    """Show and write the results, and return the exit code.

    yardsticks: rivals for the means; empty for no means; closing: lines after the means; data: further JSON fields
    """
    summary = [tables.summary_table(rows, yardsticks, subject)] if yardsticks else []
    lines = tables.mean_lines(rows, yardsticks)
    regressed = False
    if saved:
        table, conclusion, regressed = tables.against(saved, rows, arguments.tolerance)
        summary.append(table)
        lines += [*conclusion, *tables.differing_devices(saved, environment)]
    wrong = sum(row.ours and row.wrong for row in rows)
    whose = "ours" if subject in (OURS, LADDER) else subject
    lines += [*closing, *tables.wrong_lines(rows), *(tables.kernel_lines(rows, subject) if whose == subject else [])]
    lines += [*tables.noise_lines(rows), *tables.state_lines(rows), *([lost] if lost else [])]
    answers = sum(row.ours and row.verdict is not None for row in rows)
    declined = sum(row.ours and row.declined for row in rows) if whose == subject else 0
    served = counted([row for row in rows if row.ours and not row.declined], "workload")
    of_all = f" in {wrong} of {served}" if whose == subject else ""
    bad = [what for what, there in (("wrong" + of_all, wrong), ("slower", regressed), ("unfinished", lost)) if there]
    if whose == subject and not (bad or answers):
        lines.append(f"{TOO_LITTLE}: no workload ran, {declined} declined")
    else:
        told = f", in {answers} of {answers + declined} workloads; it declined the others" if declined else ""
        all_of_them = f", in all {answers} workloads" if answers > 1 else ", in the only workload"
        told = told or (all_of_them if whose == subject else "")
        lines.append(f"FAIL: {', '.join(bad)}" if bad else f"PASS: every answer of {whose} is right{told}")
    ok = lines[-1].startswith("PASS")
    is_folded = bool(yardsticks)
    summary += [tables.detail_table(rows, "Every contestant", is_folded), tables.declined_table(rows, is_folded)]
    summary += [tables.workload_table(data["workloads"])] if data and "workloads" in data else []
    drawn = [*pictures, *bench_pictures.bars(rows, yardsticks)]
    found = Report(title, environment, summary, lines, ok, pictures=drawn, subject=subject)
    deliver(found, {"rows": [row.to_json() for row in rows], **(data or {})}, arguments, console())
    return 0 if ok else 1
