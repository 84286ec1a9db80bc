"""`python -m verify locate A B`: shows where two attention kernels differ, and names the likely mistake.

This file shows the results; diagnosis.py measures and names mistakes.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.isolation import Ended, run_in_children

from . import inputs
from .call import SHORT, parameters
from .diagnosis import Diagnosis, Found, Kernel, Setting, gap
from .environment import describe
from .errors import UsageError
from .gradients import Graded, GradientDiagnosis, graded
from .implementations import backends, imported
from .judge import GRADIENTS, Check
from .native import loads_native_code
from .output import announce, console, deliver, progress_bar
from .tables import Report, Table
from .workloads import workload

REFERENCE = "flash_attn_compat:flash_attn_func"
KERNEL = (
    "module:function or FILE.py:function, called as function(q, k, v, causal=...) on (batch, seqlen, heads, head_dim), "
    "with the options that differ from their defaults, "
    "and with block_rows and block_columns if it has these parameters; or a backend of this package"
)
MOST_BYTES = 2 << 30  # bytes of fp64 scores; the right answer needs several times as much
CELLS = 64  # characters in a line of the heat map
# A tile, row or channel counts as wholly wrong from this share of differing elements on: some are right by chance.
WHOLE = 0.8
# The first is within tolerance; each later shade stands for errors ten times as large as the shade before.
SHADES = "·░▒▓█"
LEGEND = f"{SHADES[0]} within tolerance, {SHADES[1]} up to 10x, {SHADES[2]} 100x, {SHADES[3]} 1000x, {SHADES[4]} beyond"


class Place(NamedTuple):
    """An element of the output, and its query tile."""

    batch: int
    head: int
    row: int
    channel: int
    query_tile: int


@dataclass(frozen=True)
class Located:
    """The comparison of two kernels, "A" and "B".

    error: |A - B| as (batch, nheads, row, channel); differs: where they count as different; first: the first such place
    wrong: the diagnosis of each kernel with a wrong output
    graded: each kernel's gradients, if compared; misgraded: the diagnosis of each kernel with wrong gradients
    backward: whether the user requested gradients
    """

    setting: Setting
    kernels: Mapping[str, Found]
    error: Tensor
    differs: Tensor
    tolerance: float
    first: Place | None
    wrong: Mapping[str, Diagnosis] = field(default_factory=dict)
    graded: Mapping[str, Graded] = field(default_factory=dict)
    misgraded: Mapping[str, GradientDiagnosis] = field(default_factory=dict)
    backward: bool = False

    @property
    def is_same(self) -> bool:
        return self.first is None and not self.differing

    @property
    def differing(self) -> dict[str, Tensor]:
        """Where the kernels' gradients differ: (batch, heads, row, channel) bool for each gradient that differs."""
        if not self.graded:
            return {}
        right, found = self.setting.right, {}
        for name in GRADIENTS:
            pair = [(each.grads[name], each.checks[name]) for each in self.graded.values()]
            apart = gap(*(grad for grad, _ in pair)) > 2 * pair[0][1].widest_bound
            found[name] = apart | one_is_wrong(pair, right.exact.parts[name], right.bounds[name])
        return {name: differs for name, differs in found.items() if differs.any()}

    @property
    def key_tile(self) -> int | None:
        """The first key tile at which a kernel becomes wrong, if the problem grows tile by tile; None if unknown."""
        return min((each.growth.index(True) for each in self.wrong.values() if True in each.growth), default=None)


def locate(functions: Sequence[tuple[str, Callable[..., Any]]], setting: Setting, atol: float | None = None) -> Located:
    """Compare two kernels, and diagnose wrong ones. Compares gradients if the call has a dout and the outputs agree.

    atol: largest difference that counts as equal; by default twice verify's bound, which two right answers may reach
    """
    call = setting.call
    backward, setting = call.dout is not None, setting.of(replace(call, dout=None))
    kernels = {label: Kernel(*each).answered(setting) for label, each in zip("AB", functions)}
    error = gap(*(kernel.out for kernel in kernels.values()))
    tolerance = 2 * kernels["A"].check.widest_bound if atol is None else atol
    differs = error > tolerance
    if atol is None:
        pair = [(each.out, each.check) for each in kernels.values()]
        differs |= one_is_wrong(pair, setting.right.exact.out, setting.right.bounds["out"])
    first = first_place(differs, setting.block_rows)
    wrong = {} if first is None else {
        label: Diagnosis(each, setting) for label, each in kernels.items() if not each.check.ok
    }  # fmt: skip
    if first is not None or not backward:
        return Located(setting, kernels, error, differs, tolerance, first, wrong, backward=backward)
    trained = setting.of(call)
    grades = {label: graded(each.kernel, trained) for label, each in kernels.items()}
    misgraded = {label: GradientDiagnosis(each, trained) for label, each in grades.items() if each.wrong}
    return Located(trained, kernels, error, differs, tolerance, first, wrong, grades, misgraded, backward)


def one_is_wrong(pair: Sequence[tuple[Tensor, Check]], exact: Tensor, bounds: Tensor) -> Tensor:
    """Return where the wrong one of two tensors is off by more than its bound, (batch, heads, row, channel) bool;
    nowhere unless exactly one is wrong. So even mistakes below locate's tolerance, twice the bound, are found.
    """
    wrong = [tensor for tensor, check in pair if not check.ok]
    if len(wrong) != 1:
        return torch.zeros_like(exact, dtype=torch.bool).transpose(1, 2)
    return gap(wrong[0], exact) > bounds[:, :, None, None]


def first_place(differs: Tensor, block_rows: int) -> Place | None:
    """Return the place of the first True of (batch, nheads, row, channel), or None. block_rows: query rows of a tile"""
    if not differs.any():
        return None
    at, place = int(differs.flatten().int().argmax()), []  # torch.unravel_index imports sympy, two seconds
    for size in reversed(differs.shape):
        at, index = divmod(at, size)
        place.append(index)
    channel, row, head, batch = place
    return Place(batch, head, row, channel, row // block_rows)


def texture(differs: Tensor, block_rows: int) -> str:
    """Say what differs as a whole: whole tiles, rows or channels, else scattered elements."""
    tiles = differs.double().split(block_rows, dim=2)
    shares = {
        "whole tiles": torch.stack([tile.mean((2, 3)) for tile in tiles]),
        "whole rows": differs.double().mean(-1),
        "whole channels of tiles": torch.stack([tile.mean(2) for tile in tiles]),
    }
    return next((what for what, of in shares.items() if of[of > 0].mean() >= WHOLE), "scattered elements")


# ---- the report ---------------------------------------------------------------------------------------------------


def report(found: Located, environment: dict[str, str]) -> Report:
    judged = {(label, "out"): (each.kernel, each.check) for label, each in found.kernels.items()}
    judged |= {
        (label, name): (each.kernel, each.checks[name]) for label, each in found.graded.items() for name in GRADIENTS
    }
    rows = [
        (label, kernel.name, what, f"{check.error:.1e}", f"{check.bound:.1e}", "pass" if check.ok else "FAIL")
        for (label, what), (kernel, check) in judged.items()
    ]
    tables = [Table("Kernels", ("", "function", "of", "error", "allowed", "verdict"), rows)]
    tables += [] if found.first is None else [key_table(found, found.first)]
    tables.append(heat_map(found.error, found.tolerance, found.differs))
    for name, differs in found.differing.items():
        one, other = (each.grads[name] for each in found.graded.values())
        limit, rows_of = 2 * found.graded["A"].checks[name].widest_bound, "query" if name == "dq" else "key"
        tables.append(heat_map(gap(one, other), limit, differs, f"Error of {name}", rows_of))
    subjects = " and ".join(found.kernels[label].kernel.name for label in found.wrong or found.misgraded or "A")
    return Report("verify locate", environment, tables, conclusion(found), found.is_same, subjects)


def looked_at(found: Located) -> str:
    """Return which results were compared, as the end of the verdict."""
    if found.graded:
        return "compared: out, dq, dk and dv"
    return "compared: out alone; --backward compares dq, dk and dv too"


def conclusion(found: Located) -> list[str]:
    kernels = found.kernels.items()
    remarks = [f"{label} ({each.kernel.name}): {remark}" for label, each in kernels for remark in each.remarks]
    if found.is_same:
        return [*remarks, f"SAME: no element of out differs by more than {found.tolerance:.1e} ({looked_at(found)})"]
    return _of_gradients(found) if found.first is None else _of_output(found, found.first)


def _of_gradients(found: Located) -> list[str]:
    told = [f"{name}: {int(differs.sum())} of {differs.numel()} elements" for name, differs in found.differing.items()]
    lines = [f"DIFFERENT in gradients, the output is the same ({looked_at(found)})", *(f"  {line}" for line in told)]
    for label, each in found.misgraded.items():
        lines += [f"{label} ({each.found.kernel.name}) is wrong:", *(f"  {line}" for line in each.sentences)]
    return lines


def _of_output(found: Located, first: Place) -> list[str]:
    differs = found.differs
    count, total = int(differs.sum()), differs.numel()
    outs = {**{label: each.out for label, each in found.kernels.items()}, "fp64": found.setting.right.exact.out}
    values = [f"{label} {out[first.batch, first.row, first.head, first.channel]:.6g}" for label, out in outs.items()]
    tile = "" if found.key_tile is None else f", key tile {found.key_tile}"
    place = f"batch element {first.batch}, head {first.head}, row {first.row}, channel {first.channel}"
    kind = texture(differs, found.setting.block_rows)
    lines = [
        f"DIFFERENT: {count} of {total} elements of out ({count / total:.1%}), in {kind}",
        f"  first at {place} (query tile {first.query_tile}{tile}): {', '.join(values)}",
        *(["  dq, dk and dv were not compared: they follow from out"] if found.backward else []),
    ]
    for label, each in found.wrong.items():
        what = f"right in {SHORT[each.rounded]} only" if each.rounded else "wrong"
        lines += [f"{label} ({each.found.kernel.name}) is {what}:", *(f"  {line}" for line in each.sentences)]
    return lines


def key_table(found: Located, first: Place) -> Table:
    """Return a table by key tile: whether the kernel is right on the keys up to this tile, and the tile's softmax
    weight in the first row that differs.
    """
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


def heat_map(error: Tensor, tolerance: float, differs: Tensor, what: str = "Error", noun: str = "query") -> Table:
    """Return the largest error by (head, row): a line of at most CELLS characters for each head."""
    by_row = error.amax(dim=(0, 3))
    height = max(1, -(-by_row.shape[1] // CELLS))
    bins, marks = (
        torch.stack([rows.amax(-1) for rows in each.split(height, dim=1)], dim=1)
        for each in (by_row, differs.int().amax(dim=(0, 3)))
    )

    def shade(error: float, differs: int) -> str:
        if error <= tolerance:
            return SHADES[differs]
        worse = math.log10(error / tolerance) if tolerance > 0 and math.isfinite(error) else math.inf
        return SHADES[-1] if worse >= len(SHADES) - 2 else SHADES[1 + int(worse)]

    lines = [(str(head), "".join(map(shade, *lines))) for head, lines in enumerate(zip(bins.tolist(), marks.tolist()))]
    each = "a row" if height == 1 else f"{height} rows"
    return Table(f"{what} over (head, row): {LEGEND}", ("head", f"{noun} rows, {each} in each character"), lines)


# ---- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help=KERNEL)
    parser.add_argument("b", metavar="B", nargs="?", default=REFERENCE, help=f"the same (default {REFERENCE})")
    parser.add_argument("--n", type=inputs.positive, default=256, metavar="N", help="sequence length (default 256)")
    parser.add_argument("--seqlen-k", type=inputs.positive, metavar="N", help="number of keys (default: as of queries)")
    inputs.add_problem_arguments(parser, batch=2, heads=4)
    parser.add_argument("--heads-k", type=inputs.positive, metavar="H", help="key/value heads (default: as many)")
    inputs.add_option_arguments(parser)
    what = "in a child process, so that a crash is named (default for files with native code)"
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, default=None, help=what)
    parser.add_argument("--backward", action="store_true", help="compare dq, dk and dv too")
    parser.add_argument("--atol", type=inputs.number, metavar="X", help="largest difference that counts as equal")


def function(path: str, tile: Mapping[str, int]) -> Callable[..., Any]:
    """Return the kernel at an import path, or flash_attn_func by the backend ``path``. tile: sizes, if it takes any"""
    if not {*".:"} & {*path}:
        return backends([path])[0].flash_attn_func
    target = imported(path).target
    found: Callable[..., Any] = getattr(target, "flash_attn_func", target)
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
    options = {"causal": arguments.causal, **inputs.options(arguments)}
    problem = workload("", (arguments.n,) * batch, heads, arguments.head_dim, seqlens_k=keys, **options)
    call = problem.call("cpu", arguments.dtype, arguments.seed)
    call = call if arguments.backward else replace(call, dout=None)
    return Setting(call, arguments.br, arguments.bc, device)


def is_seen(arguments: argparse.Namespace) -> bool:
    """Whether A is wrong on this problem, in its output or, with --backward, its gradients."""
    setting = setting_from(arguments, inputs.checked_device(arguments))
    kernel = Kernel(arguments.a, function(arguments.a, tile_of(arguments)))
    forward = setting.of(replace(setting.call, dout=None))
    return not kernel.is_right(forward) or (arguments.backward and bool(graded(kernel, setting).wrong))


def tile_of(arguments: argparse.Namespace) -> dict[str, int]:
    return {"block_rows": arguments.br, "block_columns": arguments.bc}


def measured(arguments: argparse.Namespace) -> tuple[Report, dict[str, Any]]:
    """Return the report, and further fields of the JSON."""
    device = inputs.checked_device(arguments)
    kernels = [(path, function(path, tile_of(arguments))) for path in (arguments.a, arguments.b)]
    found = locate(kernels, setting_from(arguments, device), arguments.atol)
    environment = environment_of(arguments, device)
    data = {
        "problem": environment["problem"],
        "first": found.first and {**found.first._asdict(), "key_tile": found.key_tile},
        "growth": {label: each.growth for label, each in found.wrong.items()},
        "gradients": {label: each.sentences for label, each in found.misgraded.items()},
    }
    return report(found, environment), data


def environment_of(arguments: argparse.Namespace, device: str) -> dict[str, str]:
    problem = f"seqlen {arguments.n} x {arguments.seqlen_k or arguments.n}, {inputs.described(arguments)}"
    recipe = inputs.recipe(arguments.dtype, arguments.seed, arguments.backward, arguments.magnitude)
    return {"problem": problem, "inputs": recipe, **describe([device])}


def steps(first: int, arguments: argparse.Namespace) -> Iterator[tuple[Report, dict[str, Any]]]:
    """Compare both kernels and yield the report. A step for `run_in_children`."""
    yield measured(arguments)


def main(arguments: argparse.Namespace) -> int:
    device, terminal = inputs.checked_device(arguments), console()
    isolated = arguments.isolate
    if isolated is None:
        isolated = any(loads_native_code(path) for path in (arguments.a, arguments.b) if {*".:"} & {*path})
    with progress_bar(terminal) as progress:
        progress.add_task("asking both kernels", total=None)
        asked = argparse.Namespace(**{name: value for name, value in vars(arguments).items() if name != "run"})
        (found,) = run_in_children(1, steps, asked) if isolated else [measured(arguments)]
    environment = environment_of(arguments, device)
    if isinstance(found, Ended):
        said = f"FAIL: {found.how} as {arguments.a} and {arguments.b} ran this problem"
        found = Report("verify locate", environment, [], [said], False, arguments.a), {}
    announce(environment, terminal)
    deliver(*found, arguments, terminal)
    return 0 if found[0].ok else 1
