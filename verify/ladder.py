"""`python -m verify ladder`: climbs from naive attention to FlashAttention; checks and times each step.

The steps themselves are steps.py; they are checked, weighed and timed as bench's contestants are.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import flash_attn_func

from . import inputs
from .bench import measured
from .bench_report import detail_table
from .bench_run import Plan, Row
from .call import Call
from .contestants import Contestant, Prepared
from .environment import describe
from .output import announce, console, deliver
from .steps import STEPS
from .tables import Report
from .workloads import Workload, workload

DEFAULT_LENGTHS = (128, 256, 512, 1024)
ENOUGH_S = 0.6  # of readings, for one step at one length


def torch_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """PyTorch's own fused attention, in flash-attn's layout."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def rung(name: str, function: Callable[..., Tensor]) -> Contestant:
    def prepare(workload: Workload, given: Call) -> Prepared:
        return Prepared(functools.partial(function, causal=workload.causal))

    return Contestant(name, prepare, ours=True)


def rungs(block_rows: int, block_columns: int) -> list[Contestant]:
    """The steps, and above them what one would use."""
    sizes = {"block_rows": block_rows, "block_columns": block_columns}
    steps = [rung(name, functools.partial(step, **sizes)) for name, step in STEPS.items()]
    return [*steps, rung("PyTorch SDPA", torch_attention), rung("flash_attn_compat", flash_attn_func)]


def plot(by_length: dict[int, list[Row]], title: str, path: Path) -> None:
    """Time and peak memory against N, one line for each step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for index, name in enumerate(dict.fromkeys(row.contestant for rows in by_length.values() for row in rows)):
        timed = [(n, row) for n, rows in by_length.items() for row in rows if row.contestant == name and row.forward]
        style = {"marker": "osD^v*P"[index % 7], "markersize": 4, "linestyle": "-" if index < len(STEPS) else "--"}
        lengths = [n for n, _ in timed]
        times.plot(lengths, [row.forward.median_ms for _, row in timed if row.forward], label=name, **style)
        memory.plot(lengths, [row.memory_mib or None for _, row in timed], label=name, **style)
    for axes, label in ((times, "time, ms"), (memory, "peak memory beyond the inputs, MiB")):
        axes.set(xlabel="N (sequence length)", ylabel=label, xscale="log", yscale="log")
        axes.set_xticks([*by_length], [str(n) for n in by_length])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ---- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = " ".join(map(str, DEFAULT_LENGTHS))
    what = f"sequence lengths (default {default}); --plot of one N adds N/2 and N/4"
    parser.add_argument("--n", type=inputs.positive, nargs="+", metavar="N", help=what)
    inputs.add_problem_arguments(parser, batch=1, heads=2)
    parser.add_argument("--repeats", type=inputs.positive, default=5, metavar="R", help="readings of each time")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time and memory against N")


def main(arguments: argparse.Namespace) -> int:
    inputs.check_picture(arguments.plot)
    device = inputs.checked_device(arguments)
    lengths = sorted(set(arguments.n or DEFAULT_LENGTHS))
    if arguments.plot and len(lengths) == 1:
        lengths = sorted({max(1, lengths[0] // part) for part in (4, 2, 1)})
    heads, options = (arguments.heads, arguments.heads), {"causal": arguments.causal}
    workloads = [workload(f"N = {n}", (n,) * arguments.batch, heads, arguments.head_dim, **options) for n in lengths]
    plan = Plan(workloads, rungs(arguments.br, arguments.bc), device, arguments.dtype, arguments.repeats, ENOUGH_S,
                backward=False, seed=arguments.seed)  # fmt: skip
    terminal, problem = console(), inputs.described(arguments)
    environment = {"problem": problem, **describe([device])}
    announce(environment, terminal)
    rows, lost = measured(plan, terminal)
    # A step that finds no memory at this length is not wrong.
    rows = [replace(row, failed=False) if "memory" in row.reason else row for row in rows]
    by_length = {n: [row for row in rows if row.workload == each.name] for n, each in zip(lengths, workloads)}
    tables = [detail_table(found, f"N = {n}") for n, found in by_length.items()]
    wrong = sorted({row.contestant for row in rows if row.wrong}) + [lost] * bool(lost)
    closing = [f"FAIL: {', '.join(wrong)}"] if wrong else ["PASS: every step is as near to fp64 as plain PyTorch"]
    if arguments.plot:
        plot(by_length, f"{problem}\n{environment[f'device {device}']}", arguments.plot)
        terminal.print(f"wrote {arguments.plot}")
    data = {"problem": problem, "rows": [{"n": n, **row.to_json()} for n, found in by_length.items() for row in found]}
    deliver(Report("verify ladder", environment, tables, closing, not wrong), data, arguments, terminal)
    return 1 if wrong else 0
