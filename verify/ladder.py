"""`python -m verify ladder`: climbs from naive attention to FlashAttention; checks and times each step.

The steps themselves are steps.py; they are checked, weighed and timed as bench's contestants are.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import flash_attn_func

from . import inputs
from .bench import conclude, gathered, problems
from .bench_pictures import Lines
from .bench_run import Plan, Row
from .call import Call
from .contestants import Contestant, Prepared
from .environment import describe
from .output import announce, console
from .pictures import png
from .steps import PAPER, STEPS
from .tables import Curves
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


def pictures(rows: Sequence[tuple[int, Row]]) -> list[Curves]:
    """Time and peak memory against N, one line for each step."""

    def lines(value: Callable[[Row], float | None]) -> Lines:
        points: dict[str, list[tuple[float, float]]] = {}
        for n, row in rows:
            if y := value(row):
                points.setdefault(PAPER.get(row.contestant, row.contestant), []).append((n, y))
        return [*points.items()]

    x = "N (sequence length)"
    return [
        Curves("Time", x, "ms", lines(lambda row: row.milliseconds("forward"))),
        Curves("Peak memory beyond the inputs", x, "MiB", lines(lambda row: row.memory_mib)),
    ]


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
    rows, lost = gathered(problems(plan), terminal)
    # A step that finds no memory at this length is not wrong.
    rows = [replace(row, failed=False) if "memory" in row.reason else row for row in rows]
    n_of = {each.name: n for n, each in zip(lengths, workloads)}
    drawn = [picture for picture in pictures([(n_of[row.workload], row) for row in rows]) if picture.lines]
    if arguments.plot and drawn:
        png(drawn, f"{problem}\n{environment[f'device {device}']}", arguments.plot)
        terminal.print(f"wrote {arguments.plot}")
    return conclude("verify ladder", environment, rows, lost, arguments, yardsticks={}, pictures=drawn,
                    data={"problem": problem}, subject="verify's ladder")  # fmt: skip
