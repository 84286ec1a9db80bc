"""`python -m verify locate A B`: says where two attention kernels differ, and what mistake that looks like.

Presents what is found; the measuring and the words for it are diagnosis.py's.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import inputs
from .call import SHORT, parameters
from .diagnosis import Diagnosis, Found, Kernel, Setting, gap
from .environment import describe
from .errors import UsageError
from .implementations import backends, imported
from .output import announce, console, deliver, progress_bar
from .tables import Report, Table
from .workloads import workload

REFERENCE = "flash_attn_compat:flash_attn_func"
KERNEL = (
    "module:function or FILE.py:function, called as function(q, k, v, causal=...) on (batch, seqlen, heads, head_dim), "
    "and with block_rows and block_columns if it has these parameters; or a backend of this package"
)
MOST_BYTES = 2 << 30  # of fp64 scores, which the right answer needs several times
CELLS = 64  # of the heat map's lines
# Of a tile (row, channel) that differs at all, this share differs where the whole of it is wrong: by chance some
# elements come out near the right value.
WHOLE = 0.8
# From within tolerance up, each ten times worse than the one before.
SHADES = "·░▒▓█"
LEGEND = f"{SHADES[0]} within tolerance, {SHADES[1]} up to 10x, {SHADES[2]} 100x, {SHADES[3]} 1000x, {SHADES[4]} beyond"


class Place(NamedTuple):
    """An element of the output, and the query tile it lies in."""

    batch: int
    head: int
    row: int
    channel: int
    query_tile: int


@dataclass(frozen=True)
class Located:
    """All that was found of two kernels, "A" and "B". error: |A - B| as (batch, nheads, row, channel).

    wrong: what is known of those that are wrong
    """

    setting: Setting
    kernels: Mapping[str, Found]
    error: Tensor
    tolerance: float
    first: Place | None
    wrong: Mapping[str, Diagnosis] = field(default_factory=dict)

    @property
    def key_tile(self) -> int | None:
        """The first key tile with which one of them is wrong."""
        return min((each.growth.index(True) for each in self.wrong.values() if True in each.growth), default=None)


def locate(functions: Sequence[tuple[str, Callable[..., Any]]], setting: Setting, atol: float | None = None) -> Located:
    """Everything there is to know about the difference of two kernels; probes only where there is one.

    atol: what counts as a difference; if not given, more than twice the bound of verify, within which both should be
    """
    kernels = {label: Kernel(*each).answered(setting) for label, each in zip("AB", functions)}
    error = gap(*(kernel.out for kernel in kernels.values()))
    tolerance = 2 * kernels["A"].check.widest_bound if atol is None else atol
    first = first_place(error > tolerance, setting.block_rows)
    wrong = {} if first is None else {
        label: Diagnosis(each, setting) for label, each in kernels.items() if not each.check.ok
    }  # fmt: skip
    return Located(setting, kernels, error, tolerance, first, wrong)


def first_place(differs: Tensor, block_rows: int) -> Place | None:
    """The first True of (batch, nheads, row, channel)."""
    if not differs.any():
        return None
    batch, head, row, channel = (int(i) for i in torch.unravel_index(differs.flatten().int().argmax(), differs.shape))
    return Place(batch, head, row, channel, row // block_rows)


def texture(differs: Tensor, block_rows: int) -> str:
    """What differs together, the largest first: whole tiles, whole rows, whole channels, or elements here and there."""
    tiles = differs.double().split(block_rows, dim=2)
    shares = {
        "whole tiles": torch.stack([tile.mean((2, 3)) for tile in tiles]),
        "whole rows": differs.double().mean(-1),
        "whole channels of tiles": torch.stack([tile.mean(2) for tile in tiles]),
    }
    return next((what for what, of in shares.items() if of[of > 0].mean() >= WHOLE), "scattered elements")


# ---- what is shown --------------------------------------------------------------------------------------------------


def report(found: Located, environment: dict[str, str]) -> Report:
    rows = [
        (label, each.kernel.name, f"{each.check.error:.1e}", f"{each.check.bound:.1e}",
         "pass" if each.check.ok else "FAIL")
        for label, each in found.kernels.items()
    ]  # fmt: skip
    tables = [Table("Kernels", ("", "function", "error", "allowed", "verdict"), rows)]
    tables += [] if found.first is None else [key_table(found, found.first)]
    tables.append(heat_map(found.error, found.tolerance))
    judged = " and ".join(found.kernels[label].kernel.name for label in found.wrong or "A")
    return Report("verify locate", environment, tables, conclusion(found), found.first is None, judged)


def conclusion(found: Located) -> list[str]:
    if found.first is None:
        kernels = found.kernels.items()
        remarks = [f"{label} ({each.kernel.name}): {remark}" for label, each in kernels for remark in each.remarks]
        return [*remarks, f"SAME: no element differs by more than {found.tolerance:.1e}"]
    differs, first = found.error > found.tolerance, found.first
    count, total = int(differs.sum()), differs.numel()
    outs = {**{label: each.out for label, each in found.kernels.items()}, "fp64": found.setting.right.exact.out}
    values = [f"{label} {out[first.batch, first.row, first.head, first.channel]:.6g}" for label, out in outs.items()]
    tile = "" if found.key_tile is None else f", key tile {found.key_tile}"
    place = f"batch element {first.batch}, head {first.head}, row {first.row}, channel {first.channel}"
    kind = texture(differs, found.setting.block_rows)
    lines = [
        f"DIFFERENT: {count} of {total} elements ({count / total:.1%}), in {kind}",
        f"  first at {place} (query tile {first.query_tile}{tile}): {', '.join(values)}",
    ]
    for label, each in found.wrong.items():
        what = f"right in {SHORT[each.rounded]} only" if each.rounded else "wrong"
        lines += [f"{label} ({each.found.kernel.name}) is {what}:", *(f"  {line}" for line in each.sentences)]
    return lines


def key_table(found: Located, first: Place) -> Table:
    """By key tile: whether a problem that ends there is right, and the weight that the first differing row gives it."""
    at = first.batch, first.head, first.row
    columns, right, rows = ["tile", "keys"], found.setting.shares[at][:, -1], []
    for label in found.wrong:
        columns += [f"{label} up to here", f"weight in {label}"]
    for index, tile in enumerate(found.setting.key_tiles):
        row = [str(index), f"{tile.start} .. {tile.stop - 1}"]
        for each in found.wrong.values():
            up_to_here = ("wrong" if each.growth[index] else "right") if each.growth else "not tried"
            row += [up_to_here, f"{each.weights[at][index].item():.4f}"]
        rows.append([*row, f"{right[index].item():.4f}"])
    title = f"Key tiles, weights of row {first.row} of head {first.head} of batch element {first.batch}"
    return Table(title, (*columns, "right weight"), rows)


def heat_map(error: Tensor, tolerance: float) -> Table:
    """By (head, row), the largest over batch and channel: a line for each head, of at most CELLS characters."""
    by_row = error.amax(dim=(0, 3))
    height = max(1, -(-by_row.shape[1] // CELLS))
    bins = torch.stack([rows.amax(-1) for rows in by_row.split(height, dim=1)], dim=1)

    def shade(error: float) -> str:
        if error <= tolerance:
            return SHADES[0]
        worse = math.log10(error / tolerance) if tolerance > 0 and math.isfinite(error) else math.inf
        return SHADES[-1] if worse >= len(SHADES) - 2 else SHADES[1 + int(worse)]

    lines = [(str(head), "".join(map(shade, line))) for head, line in enumerate(bins.tolist())]
    each = "a row" if height == 1 else f"{height} rows"
    return Table(f"Error over (head, row): {LEGEND}", ("head", f"query rows, {each} in each character"), lines)


# ---- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help=KERNEL)
    parser.add_argument("b", metavar="B", nargs="?", default=REFERENCE, help=f"the same (default {REFERENCE})")
    parser.add_argument("--n", type=inputs.positive, default=256, metavar="N", help="sequence length (default 256)")
    parser.add_argument("--seqlen-k", type=inputs.positive, metavar="N", help="number of keys (default: as of queries)")
    inputs.add_problem_arguments(parser, batch=2, heads=4)
    parser.add_argument("--heads-k", type=inputs.positive, metavar="H", help="key/value heads (default: as many)")
    parser.add_argument("--atol", type=inputs.number, metavar="X", help="differing means by more than this")


def function(path: str, tile: Mapping[str, int]) -> Callable[..., Any]:
    """The kernel at an import path, given the sizes of a tile if it takes them, or flash_attn_func by a backend."""
    if ":" not in path:
        return backends([path])[0].flash_attn_func
    found: Callable[..., Any] = imported(path).target
    if not callable(found):
        raise UsageError(f"{path!r} is not a function")
    taken = {name: size for name, size in tile.items() if name in parameters(found)}
    return functools.partial(found, **taken)


def setting_from(arguments: argparse.Namespace, device: str) -> Setting:
    heads_k, seqlen_k, batch = arguments.heads_k or arguments.heads, arguments.seqlen_k or arguments.n, arguments.batch
    if arguments.heads % heads_k:
        raise UsageError(f"--heads must be a multiple of --heads-k, got {arguments.heads} and {heads_k}")
    needed = batch * arguments.heads * arguments.n * seqlen_k * 8
    if needed > MOST_BYTES:
        raise UsageError(f"the fp64 answer needs {needed / 2**30:.1f} GiB for its scores alone: take a smaller problem")
    heads, keys = (arguments.heads, heads_k), (seqlen_k,) * batch
    problem = workload("", (arguments.n,) * batch, heads, arguments.head_dim, seqlens_k=keys, causal=arguments.causal)
    call = problem.call("cpu", arguments.dtype, arguments.seed)
    return Setting(replace(call, dout=None), arguments.br, arguments.bc, device)


def main(arguments: argparse.Namespace) -> int:
    device = inputs.checked_device(arguments)
    tile = {"block_rows": arguments.br, "block_columns": arguments.bc}
    kernels = [(path, function(path, tile)) for path in (arguments.a, arguments.b)]
    setting = setting_from(arguments, device)
    terminal = console()
    problem = f"seqlen {arguments.n} x {arguments.seqlen_k or arguments.n}, {inputs.described(arguments)}"
    environment = {"problem": problem, "inputs": inputs.recipe(arguments.dtype, arguments.seed), **describe([device])}
    with progress_bar(terminal) as progress:
        progress.add_task("asking both kernels", total=None)
        found = locate(kernels, setting, arguments.atol)
    announce(environment, terminal)
    data = {
        "problem": problem,
        "first": found.first and {**found.first._asdict(), "key_tile": found.key_tile},
        "growth": {label: each.growth for label, each in found.wrong.items()},
    }
    deliver(report(found, environment), data, arguments, terminal)
    return 0 if found.first is None else 1
