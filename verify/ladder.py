"""`python -m verify ladder`: climbs from naive attention to FlashAttention; checks and times each step.

steps.py holds the steps; bench_run.py checks and times them, as contestants.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import flash_attn_func
from flash_attn_compat.card import cap_memory

from . import inputs
from .bench import ISOLATE, LADDER, conclude, gathered, isolated_problems, problems
from .bench_pictures import curves
from .bench_run import Plan
from .call import Call
from .contestants import Contestant, Prepared
from .environment import describe
from .implementations import check_loads, imported
from .native import is_isolated
from .output import announce, console
from .own import own
from .steps import PAPER, STEPS
from .workloads import Workload, workload

DEFAULT_LENGTHS = (128, 256, 512, 1024)
ENOUGH_S = 0.6  # seconds of readings for one step at one length


def torch_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """PyTorch's own fused attention, in flash-attn's layout."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def rung(name: str, function: Callable[..., Tensor]) -> Contestant:
    return Contestant(name, functools.partial(_prepared, function), ours=True)


def _prepared(function: Callable[..., Tensor], workload: Workload, given: Call) -> Prepared:
    return Prepared(functools.partial(function, causal=workload.causal))


def rungs(block_rows: int, block_columns: int) -> list[Contestant]:
    """Return the steps as contestants, followed by PyTorch's attention and ours."""
    sizes = {"block_rows": block_rows, "block_columns": block_columns}
    steps = [rung(name, functools.partial(step, **sizes)) for name, step in STEPS.items()]
    return [*steps, rung("PyTorch SDPA", torch_attention), rung("flash_attn_compat", flash_attn_func)]


# ---- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = f"sequence lengths (default {' '.join(map(str, DEFAULT_LENGTHS))})"
    parser.add_argument("--n", type=inputs.positive, nargs="+", metavar="N", default=DEFAULT_LENGTHS, help=what)
    inputs.add_problem_arguments(parser, batch=1, heads=2)
    what = "a kernel of your own as another step"
    parser.add_argument("--implementation", metavar="MODULE_OR_FILE.py[:ATTRIBUTE]", help=what)
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, default=None, help=ISOLATE)
    parser.add_argument("--repeats", type=inputs.positive, default=5, metavar="R", help="readings of each time")


def main(arguments: argparse.Namespace) -> int:
    device, problem, batch = inputs.checked_device(arguments), inputs.described(arguments), arguments.batch
    cap_memory(torch.device(device))
    heads, options = (arguments.heads, arguments.heads), {"causal": arguments.causal}
    workloads = [workload(f"N = {n}", (n,) * batch, heads, arguments.head_dim, **options)
                 for n in sorted(set(arguments.n))]  # fmt: skip
    contestants = rungs(arguments.br, arguments.bc)
    kernel: str | None = arguments.implementation
    isolated = is_isolated(arguments.isolate, kernel, device)
    if kernel:
        (check_loads if isolated else imported)(kernel)  # raises for a wrong path before the work
        sizes = {"block_rows": arguments.br, "block_columns": arguments.bc}
        contestants = [own(kernel, sizes), *(replace(each, ours=False) for each in contestants)]
    plan = Plan(workloads, contestants, device, arguments.dtype, arguments.repeats, ENOUGH_S,
                backward=False, seed=arguments.seed)  # fmt: skip
    terminal, environment = console(), {"problem": problem, **describe([device])}
    announce(environment, terminal)
    rows, lost = gathered(isolated_problems(plan, kernel) if isolated else problems(plan), terminal)
    # A step that runs out of memory does not count as a failure.
    rows = [replace(row, failed=False) if "memory" in row.reason else row for row in rows]
    drawn = curves([replace(row, contestant=PAPER.get(row.contestant, row.contestant)) for row in rows], workloads)
    return conclude("verify ladder", environment, rows, lost, arguments, yardsticks={}, pictures=drawn,
                    data={"problem": problem}, subject=kernel or LADDER)  # fmt: skip
