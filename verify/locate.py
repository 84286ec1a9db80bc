"""`python -m verify locate A B`: where two attention kernels differ, and what kind of mistake that looks like.

Runs the probes and presents what they find; the measuring is probe.py's, the words are diagnosis.py's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from verify import inputs
from verify.diagnosis import Evidence, findings
from verify.difference import Place, first_place, gap, heat_map, texture
from verify.environment import describe
from verify.errors import UsageError
from verify.implementations import imported
from verify.output import add_output_arguments, check_output_arguments, console, deliver, progress_bar
from verify.probe import Candidate, Judged, Setting, TileStatistics, ask, growth, judged, key_weights, statistics
from verify.tables import SHADES, Report, Table

REFERENCE = "flash_attn_compat:flash_attn_func"
MOST_BYTES = 2 << 30  # of fp64 scores, which the right answer needs several times
MOST_KEY_TILES = 64  # problems that are grown tile by tile
MOST_LINES = 32  # of a table of tiles
CELLS = 64  # of the heat map's lines
LEGEND = f"{SHADES[0]} within tolerance, {SHADES[1]} up to 10x, {SHADES[2]} 100x, {SHADES[3]} 1000x, {SHADES[4]} beyond"


@dataclass(frozen=True)
class Located:
    """All that was found of A and B. error: |A - B| as (batch, nheads, row, channel).

    growth: (keys, whether A and B differ there) for problems of 1, 2, ... key tiles; weights: by candidate, measured
    """

    setting: Setting
    candidates: Mapping[str, Judged]
    error: Tensor
    tolerance: float
    first: Place | None
    truth: TileStatistics
    growth: Sequence[tuple[int, bool]] = ()
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    findings: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def differs(self) -> Tensor:
        return self.error > self.tolerance

    @property
    def texture(self) -> str:
        return texture(self.differs, self.setting.block_rows)

    @property
    def key_tile(self) -> int | None:
        """The first key tile with which the two differ."""
        return next((index for index, (_, differs) in enumerate(self.growth) if differs), None)


def locate(a: Candidate, b: Candidate, setting: Setting, done: Callable[[str], None] = lambda what: None) -> Located:
    """Everything there is to know about the difference of two kernels; probes only where there is one."""
    done("both kernels")
    found = {"A": judged(a, setting), "B": judged(b, setting)}
    error, allowed = gap(found["A"].out, found["B"].out), setting.tolerance(found["A"].out)
    first = first_place(error > allowed, setting.block_rows)
    located = Located(setting, found, error, allowed, first, statistics(setting))
    if first is None:
        return located
    grown, why_not = _grown((a, b), setting, done)
    done("weights of key tiles")
    weights = {"A": key_weights(a, setting), "B": key_weights(b, setting)}
    only_causal = None
    if setting.causal:
        done("without causal mask")
        full = replace(setting, causal=False)
        only_causal = not bool(full.differs(ask(a, full)[0], ask(b, full)[0]).any())
    said = {}
    for label, each in found.items():
        if not each.check.ok:
            wrong = gap(each.out, setting.right.exact.out) > each.check.widest_bound
            known = [differs for _, differs in grown]
            evidence = Evidence(each, wrong, setting.block_rows, known, weights[label], located.truth, only_causal)
            said[label] = ([why_not] if why_not else []) + findings(evidence)
    return replace(located, growth=grown, weights=weights, findings=said)


def _grown(
    pair: tuple[Candidate, Candidate], setting: Setting, done: Callable[[str], None]
) -> tuple[list[tuple[int, bool]], str]:
    """(keys, whether they differ there), or nothing and why: a kernel need not take smaller problems."""
    if len(setting.key_tiles) > MOST_KEY_TILES:
        return [], f"more than {MOST_KEY_TILES} key tiles: smaller problems were not tried"
    grown: list[tuple[int, bool]] = []
    try:
        for keys, differs in growth(pair, setting):
            done(f"problem of {keys} keys")
            grown.append((keys, differs))
    except UsageError as error:
        return [], f"smaller problems could not be tried: {error}"
    return grown, ""


# ---- what is shown --------------------------------------------------------------------------------------------------


def report(found: Located, environment: dict[str, str]) -> Report:
    rows = [
        (label, each.name, f"{each.check.error:.1e}", f"{each.check.bound:.1e}", "pass" if each.check.ok else "FAIL")
        for label, each in found.candidates.items()
    ]
    tables = [Table("Kernels", ("", "function", "off fp64", "may be", "verdict"), rows)]
    if found.first is not None:
        tables += [_first_table(found, found.first), _query_table(found), _key_table(found, found.first)]
    values, height = heat_map(found.error, CELLS)
    tables.append(heat_table(values.tolist(), found.tolerance, height))
    return Report("verify locate", environment, tables, conclusion(found), found.first is None)


def conclusion(found: Located) -> list[str]:
    if found.first is None:
        remarks = [f"{label} ({each.name}): {remark}" for label, each in found.candidates.items()
                   for remark in each.remarks]  # fmt: skip
        return [*remarks, f"SAME: no element differs by more than {found.tolerance:.1e}"]
    count, total = int(found.differs.sum()), found.differs.numel()
    lines = [f"DIFFERENT: {count} of {total} elements ({count / total:.1%}), in {found.texture}"]
    for label, sentences in found.findings.items():
        lines += [f"{label} ({found.candidates[label].name}) is wrong:", *(f"  {line}" for line in sentences)]
    return lines


def _first_table(found: Located, first: Place) -> Table:
    index = first.batch, first.row, first.head, first.channel
    outs = [each.out for each in found.candidates.values()]
    values = [f"{out[index].item():.6g}" for out in (*outs, found.setting.right.exact.out)]
    place = [str(part) for part in (first.batch, first.head, first.row, first.channel, first.query_tile)]
    columns = ("batch", "head", "row", "channel", "query tile", "key tile", "A", "B", "fp64")
    tile = "not known" if found.key_tile is None else str(found.key_tile)
    return Table("First difference", columns, [(*place, tile, *values)])


def _query_table(found: Located) -> Table:
    size, rows = found.setting.block_rows, []
    for index, (differs, error) in enumerate(zip(found.differs.split(size, 2), found.error.split(size, 2))):
        share = differs.double().mean().item()
        wrong = differs.any(dim=3).any(dim=2).any(dim=0)
        few = [str(head) for head in wrong.nonzero().flatten().tolist()]
        heads = "all" if wrong.all() else ", ".join(few[:6]) + " ..." * (len(few) > 6)
        bounds = f"{index * size} .. {index * size + differs.shape[2] - 1}"
        kind = texture(differs, size) if share else ""
        rows.append((str(index), bounds, f"{share:.1%}", f"{error.max().item():.1e}", heads, kind))
    return _cut("Query tiles", ("tile", "rows", "differs", "by up to", "heads", "what differs"), rows)


def _key_table(found: Located, first: Place) -> Table:
    """By key tile: the smaller problem, and the weight the first differing row gives it."""
    at = first.batch, first.head, first.row
    rows = []
    for index, tile in enumerate(found.setting.key_tiles):
        same = ("differs" if found.growth[index][1] else "same") if found.growth else "not tried"
        shares = [f"{weight[at][index].item():.4f}" for weight in (*found.weights.values(), found.truth.weight)]
        rows.append((str(index), f"{tile.start} .. {tile.stop - 1}", same, *shares))
    title = f"Key tiles, weights of row {first.row} of head {first.head} of batch element {first.batch}"
    return _cut(title, ("tile", "keys", "problem up to here", "weight in A", "in B", "right"), rows)


def _cut(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(title + f" (the first {MOST_LINES})" * (len(rows) > MOST_LINES), columns, rows[:MOST_LINES])


def to_json(found: Located) -> dict[str, Any]:
    """What the tables say in words."""
    return {
        "first": None if found.first is None else {**asdict(found.first), "key_tile": found.key_tile},
        "growth": [{"keys": keys, "differs": differs} for keys, differs in found.growth],
    }


def heat_table(values: Sequence[Sequence[float]], tolerance: float, rows_per_cell: int) -> Table:
    """The error in characters, a line for each head."""

    def shade(error: float) -> str:
        if error <= tolerance:
            return SHADES[0]
        worse = math.log10(error / tolerance) if tolerance > 0 and math.isfinite(error) else math.inf
        return SHADES[-1] if worse >= len(SHADES) - 2 else SHADES[1 + int(worse)]

    lines = [(str(head), "".join(map(shade, line))) for head, line in enumerate(values)]
    each = "a row" if rows_per_cell == 1 else f"{rows_per_cell} rows"
    return Table(f"Error over (head, row): {LEGEND}", ("head", f"query rows, {each} in each character"), lines)


# ---- the command ----------------------------------------------------------------------------------------------------


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "locate",
        help="where two attention kernels differ: element, tile, pattern, and what mistake that looks like",
        description="Runs two functions (q, k, v, causal=...) -> out, in flash-attn's layout (batch, seqlen, heads, "
        "head_dim), on the same seeded inputs. Exit code 0: the same; 1: they differ; 2: arguments that make no "
        "sense. A function with parameters block_rows and block_columns is given --br and --bc.",
    )
    parser.add_argument("a", metavar="A", help="module:function")
    parser.add_argument("b", metavar="B", nargs="?", default=REFERENCE, help=f"module:function (default {REFERENCE})")
    parser.add_argument("--n", type=inputs.positive, default=256, metavar="N", help="sequence length (default 256)")
    parser.add_argument("--seqlen-k", type=inputs.positive, metavar="N", help="number of keys (default: as of queries)")
    inputs.add_problem_arguments(parser, batch=2, heads=4)
    parser.add_argument("--heads-k", type=inputs.positive, metavar="H", help="key/value heads (default: as many)")
    parser.add_argument("--atol", type=inputs.number, metavar="X", help="differing means by more than this")
    add_output_arguments(parser)
    parser.set_defaults(run=main)


def candidate(path: str) -> Candidate:
    """The kernel at an import path, or a UsageError."""
    if ":" not in path:
        raise UsageError(f"{path!r} is no import path: module:function is needed")
    target = imported(path).target
    if not callable(target):
        raise UsageError(f"{path!r} is not a function")
    return Candidate(path, target)


def setting_from(arguments: argparse.Namespace, device: str) -> Setting:
    heads_k, seqlen_k = arguments.heads_k or arguments.heads, arguments.seqlen_k or arguments.n
    if arguments.heads % heads_k:
        raise UsageError(f"--heads must be a multiple of --heads-k, got {arguments.heads} and {heads_k}")
    needed = arguments.batch * arguments.heads * arguments.n * seqlen_k * 8
    if needed > MOST_BYTES:
        raise UsageError(f"the fp64 answer needs {needed / 2**30:.1f} GiB for its scores alone: take a smaller problem")
    keys = (arguments.batch, seqlen_k, heads_k, arguments.head_dim)
    shapes = {"q": (arguments.batch, arguments.n, arguments.heads, arguments.head_dim), "k": keys, "v": keys}
    q, k, v = inputs.draw(shapes, arguments.dtype, arguments.seed).values()
    return Setting(q, k, v, arguments.causal, arguments.br, arguments.bc, device, arguments.atol)


def main(arguments: argparse.Namespace) -> int:
    check_output_arguments(arguments)
    device = inputs.checked_device(arguments)
    a, b = candidate(arguments.a), candidate(arguments.b)
    setting = setting_from(arguments, device)
    terminal = console()
    with progress_bar(terminal) as progress:
        task = progress.add_task("", total=len(setting.key_tiles) + 3)
        found = locate(a, b, setting, lambda what: progress.update(task, advance=1, description=what))
    problem = f"seqlen {arguments.n} x {setting.k.shape[1]}, {inputs.described(arguments)}"
    environment = {"problem": problem, "inputs": inputs.recipe(arguments.dtype, arguments.seed), **describe([device])}
    deliver(report(found, environment), {"problem": problem, **to_json(found)}, arguments, terminal)
    return 0 if found.first is None else 1
