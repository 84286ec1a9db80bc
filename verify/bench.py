"""`python -m verify bench`: how fast, and how much memory, beside what people write without us and flash-attn itself.

Options and the order of events; what is timed is in workloads.py, by whom in contestants.py, how in timing.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from verify.output import (
    COLOURS,
    Report,
    add_output_arguments,
    check_output_arguments,
    console,
    deliver,
    progress_bar,
    show,
)
from verify.thresholds import judged
from verify.timing import DeviceLost, Failed, attempt, matmul_flops_per_second
from verify.workloads import DECODE, FULL, SMALL, Workload

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
COMPILE = "FLASH_ATTN_COMPAT_COMPILE"
# The formula itself, for trust rather than speed: minutes on the large workloads.
ONLY_WHEN_NAMED = ("reference",)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time and memory of every backend, beside the pad/SDPA/unpad scheme and flash-attn",
        description="Times every backend on workloads taken from well-known models, beside the pad/SDPA/unpad scheme, "
        "flash-attn (or PyTorch's own build of it) and the bare kernel, and checks every answer against fp64. Exit "
        "code 0: all answers right; 1: one is wrong or failed, or --against found a regression.",
    )
    parser.add_argument("--device", default=None, metavar="DEVICE", help="cpu (default), cuda, cuda:1, mps")
    parser.add_argument("--gpu", action="store_true", help="the full workloads on the CUDA device: --device cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="default fp16, on a CPU fp32")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME[,NAME]", help="workloads with this in their name"
    )
    parser.add_argument(
        "--backends", default="", metavar="A,B", help="of ours only these; 'default' is what dispatch chooses"
    )
    parser.add_argument("--rivals", default="", metavar="A,B",
                        help=f"of the others only these ('none': nobody): {', '.join(RIVALS)}")  # fmt: skip
    parser.add_argument("--repeats", type=_positive, default=7, metavar="N", help="readings of each figure (default 7)")
    parser.add_argument("--forward-only", "--no-backward", action="store_true", help="no gradients")
    parser.add_argument("--compile", choices=("on", "off"), help=f"sets {COMPILE} for this run")
    parser.add_argument("--small", action="store_true", help="the small workloads, which are the default on a CPU")
    parser.add_argument("--time-limit", type=_positive, default=240, metavar="SECONDS",
                        help="after this, only the default choice and its rivals are timed (default 240)")  # fmt: skip
    custom = parser.add_argument_group("one workload of your own: packed sequences, --min-seqlen to --max-seqlen long")
    custom.add_argument("--batch", type=_positive, metavar="N", help="number of sequences (default 8)")
    custom.add_argument("--max-seqlen", type=_positive, metavar="N", help="the longest of them (default 1024)")
    custom.add_argument("--min-seqlen", type=_positive, metavar="N", help="the shortest (default: all are the longest)")
    custom.add_argument("--heads", type=_positive, metavar="N", help="query heads (default 8)")
    custom.add_argument("--heads-kv", type=_positive, metavar="N", help="key/value heads (default: as many)")
    custom.add_argument("--head-dim", type=_positive, metavar="N", help="channels of a head (default 64)")
    custom.add_argument("--causal", action="store_true")
    custom.add_argument("--window", type=_window, metavar="LEFT,RIGHT", help="keys seen on either side, -1 for all")
    custom.add_argument("--softcap", type=float, metavar="CAP")
    custom.add_argument("--alibi", action="store_true")
    custom.add_argument("--dropout", type=_probability, metavar="P")
    custom.add_argument("--seed", type=int, default=0, metavar="N", help="of tensors and lengths (default 0)")
    custom.add_argument(
        "--lengths", type=_lengths, metavar="N,N,...", help="one such workload for each length, all sequences that long"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="with --lengths: time and memory over length, as a picture"
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with a run saved by --json")
    parser.add_argument("--tolerance", type=_probability, default=0.1, metavar="SHARE",
                        help="with --against: how much slower is a regression (default 0.1)")  # fmt: skip
    add_output_arguments(parser)
    parser.set_defaults(run=main)


# ---- options ---------------------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return int(text)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text!r}")
    return value


def _window(text: str) -> tuple[int, int]:
    try:
        left, right = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 1024,0, got {text!r}") from None
    return left, right


def _lengths(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]


def plan_from(arguments: argparse.Namespace) -> Plan:
    """The plan the arguments describe, or a UsageError."""
    if arguments.gpu and arguments.device not in (None, "cuda"):
        raise UsageError(f"--gpu means --device cuda, not {arguments.device}")
    device = checked_devices([arguments.device or ("cuda" if arguments.gpu else "cpu")])[0]
    kind = device.partition(":")[0]
    if arguments.plot and not arguments.lengths:
        raise UsageError("--plot draws curves over length: it needs --lengths")
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        raise UsageError(f"cannot write {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")
    workloads = _workloads(arguments, kind)
    backends = _names(arguments.backends)
    rivals = _names(arguments.rivals) or list(USUAL_RIVALS[kind])
    dtype = DTYPES[arguments.dtype or ("fp32" if kind == "cpu" else "fp16")]
    return Plan(
        workloads=workloads,
        contestants=[*_ours(backends), *_rivals(rivals)],
        device=device,
        dtype=dtype,
        repeats=arguments.repeats,
        backward=not arguments.forward_only,
        graphs=kind == "cuda",
        seed=arguments.seed,
        named=frozenset(backends) | frozenset(_names(arguments.rivals)),
        time_limit_s=arguments.time_limit,
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _ours(names: list[str]) -> list[Contestant]:
    known = [backend.name for backend in impl.backends([])]
    for name in names:
        if name not in ("default", *known):
            raise UsageError(f"unknown backend {name!r}; there are default, {', '.join(known)}")
    names = names or ["default", *(name for name in known if name not in ONLY_WHEN_NAMED)]
    return [Ours(None if name == "default" else name) for name in names]


def _rivals(names: list[str]) -> list[Contestant]:
    if names == ["none"]:
        return []
    for name in names:
        if name not in RIVALS:
            raise UsageError(f"unknown rival {name!r}; there are {', '.join(RIVALS)}, none")
    return [RIVALS[name]() for name in names]


_CUSTOM = ("batch", "max_seqlen", "min_seqlen", "heads", "heads_kv", "head_dim", "causal", "window", "softcap", "alibi",
           "dropout", "lengths")  # fmt: skip


def _workloads(arguments: argparse.Namespace, kind: str) -> list[Workload]:
    if any(getattr(arguments, name) for name in _CUSTOM):
        if arguments.only:
            raise UsageError("--only picks among the built-in workloads; leave it out with options of your own")
        return _custom(arguments)
    there = SMALL if arguments.small or kind != "cuda" else (*FULL, *DECODE)
    wanted = [name for text in arguments.only for name in _names(text)]
    for name in wanted:
        if not any(name in workload.name for workload in there):
            raise UsageError(f"no workload {name!r}; there are {', '.join(workload.name for workload in there)}")
    return [workload for workload in there if not wanted or any(name in workload.name for name in wanted)]


def _custom(arguments: argparse.Namespace) -> list[Workload]:
    heads, longest, batch = arguments.heads or 8, arguments.max_seqlen or 1024, arguments.batch or 8
    heads_kv, shortest = arguments.heads_kv or heads, arguments.min_seqlen or longest
    if heads % heads_kv:
        raise UsageError(f"--heads must be a multiple of --heads-kv, got {heads} and {heads_kv}")
    if shortest > longest:
        raise UsageError(f"--min-seqlen {shortest} is more than --max-seqlen {longest}")
    if arguments.lengths and (arguments.max_seqlen or arguments.min_seqlen):
        raise UsageError("--lengths says how long the sequences are: leave out --max-seqlen and --min-seqlen")
    if arguments.softcap is not None and not arguments.softcap > 0:
        raise UsageError(f"--softcap must be positive, got {arguments.softcap}")
    generator = torch.Generator().manual_seed(arguments.seed)
    drawn = torch.randint(shortest, longest + 1, (batch - 1,), generator=generator).tolist()
    workload = Workload(
        name=f"{batch}x{longest}" if shortest == longest else f"{batch}x{shortest}..{longest}",
        seqlens_q=(longest, *drawn),
        seqlens_k=(longest, *drawn),
        nheads=heads,
        nheads_k=heads_kv,
        head_dim=arguments.head_dim or 64,
        packed=True,
        causal=arguments.causal,
        window_size=arguments.window or (-1, -1),
        softcap=arguments.softcap or 0.0,
        alibi=arguments.alibi,
        dropout_p=arguments.dropout or 0.0,
    )
    if not arguments.lengths:
        return [workload]
    return [
        replace(workload, name=f"{batch}x{length}", seqlens_q=(length,) * batch, seqlens_k=(length,) * batch)
        for length in arguments.lengths
    ]


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: argparse.Namespace) -> int:
    check_output_arguments(arguments)
    plan = plan_from(arguments)
    saved = tables.load(arguments.against) if arguments.against else None
    with _compilation(arguments.compile):
        return _bench(plan, saved, arguments, console())


def _bench(plan: Plan, saved: dict[str, Any] | None, arguments: argparse.Namespace, terminal: Console) -> int:
    environment = {**describe([plan.device]), "dtype": str(plan.dtype).removeprefix("torch."),
                   "official flash-attn": Official().version}  # fmt: skip
    terminal.print(Text("; ".join(environment.values()), style="dim"), soft_wrap=True)
    rows: list[Row] = []
    host_us: dict[str, float] = {}
    lost = ""
    matmul = None
    with progress_bar(terminal) as progress:
        task = progress.add_task("matmul rate", total=len(plan.workloads))
        try:
            rate = attempt(plan.device, matmul_flops_per_second, plan.device, plan.dtype)
            matmul = None if isinstance(rate, Failed) else rate
            host_us = tiny_host_times(plan)
            for found in run(plan, lambda what: progress.update(task, description=what)):
                rows += found
                _print_rows(plan.workloads[len(rows) // len(plan.contestants) - 1], found, matmul, terminal)
                progress.advance(task)
            for found in graphs.measured(plan, rows, lambda what: progress.update(task, description=what)):
                rows = [next((new for new in found if _same(new, row)), row) for row in rows]
        except DeviceLost as reason:
            lost = f"the CUDA device gave up, nothing could be measured after: {reason}"
        except KeyboardInterrupt:
            lost = "interrupted: these are the figures up to then"
    return _finish(plan, rows, matmul, host_us, lost, environment, saved, arguments, terminal)


def _same(one: Row, other: Row) -> bool:
    return (one.workload, one.contestant) == (other.workload, other.contestant)


def _finish(
    plan: Plan,
    rows: Sequence[Row],
    matmul: float | None,
    host_us: dict[str, float],
    lost: str,
    environment: dict[str, str],
    saved: dict[str, Any] | None,
    arguments: argparse.Namespace,
    terminal: Console,
) -> int:
    on_cuda = plan.device.startswith("cuda")
    recorded_applies = on_cuda and plan.dtype == torch.float16 and "H200" in torch.cuda.get_device_name(plan.device)
    lines = []
    if matmul:
        lines.append(f"matmul rate, the roofline: {tables.si(matmul)}FLOP/s in {environment['dtype']}")
    if host_us:
        figures = ", ".join(f"{name} {us:.1f} us" for name, us in host_us.items())
        lines.append(f"host time of a tiny varlen call: {figures}")
    lines += tables.mean_lines(plan.workloads, rows, recorded_applies)
    by_workload = tables.rows_by_workload(rows)
    ratios = [
        found
        for workload in plan.workloads
        if (found := tables.ratios(workload, by_workload.get(workload.name, {}), recorded_applies))
    ]
    promises = judged(ratios, host_us) if on_cuda else []
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

    if arguments.plot:
        lengths = {workload.name: workload.max_seqlen_q for workload in plan.workloads}
        tables.plot(rows, lengths, environment[f"device {plan.device}"], arguments.plot)
        lines.append(f"wrote {arguments.plot}")
    # The terminal has seen every row already.
    show(Report("verify bench", environment, summary, lines), terminal)
    data = {
        "rows": [row.to_json() for row in rows],
        "workloads": {workload.name: workload.describe() for workload in plan.workloads},
        "matmul_flops_per_second": matmul,
        "host_microseconds": host_us,
        "promises": promises,
    }
    full = Report("verify bench", environment, [*summary, tables.detail_table(rows, matmul)], lines)
    deliver(full, data, arguments, Console(quiet=True))
    return 1 if wrong or regressed or lost else 0


def _print_rows(workload: Workload, rows: Sequence[Row], matmul: float | None, terminal: Console) -> None:
    terminal.print(Text(f"{workload.name}: {workload.describe()}", style="bold"))
    for row in rows:
        if not row.forward and not row.failed:
            continue
        _, name, forward, both, _, memory, flops, share, verdict, remarks = tables.detail(row, matmul)
        line = Text(f"  {name:28} {forward:>13} {both:>13} ms {memory:>8} MiB {flops:>6}FLOP/s {share:>6}  ")
        line.append(verdict, style=COLOURS.get(verdict, ""))
        line.append(f"  {remarks}", style="dim")
        terminal.print(line, soft_wrap=True)
    absent = [row for row in rows if not row.forward and not row.failed and row.reason != "is the default"]
    if absent:
        reasons = "; ".join(f"{row.contestant}: {row.reason}" for row in absent)
        terminal.print(Text(f"  without {reasons}", style="dim"), soft_wrap=True)
    terminal.file.flush()


@contextmanager
def _compilation(wanted: str | None) -> Iterator[None]:
    """FLASH_ATTN_COMPAT_COMPILE for this run; as it was, if nothing is wanted."""
    if wanted is None:
        yield
        return
    before = os.environ.get(COMPILE)
    os.environ[COMPILE] = "1" if wanted == "on" else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[COMPILE]
        else:
            os.environ[COMPILE] = before
