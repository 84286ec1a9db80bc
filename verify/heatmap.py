"""Error over (row, head): in characters for the terminal, as a PNG for files and pages."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from verify.tables import Table

CELLS = 64
# From within tolerance up, each ten times worse than the one before.
SHADES = "·░▒▓█"
LEGEND = f"{SHADES[0]} within tolerance, {SHADES[1]} up to 10x, {SHADES[2]} 100x, {SHADES[3]} 1000x, {SHADES[4]} beyond"


def shade(error: float, tolerance: float) -> str:
    if error <= tolerance:
        return SHADES[0]
    if tolerance <= 0 or not math.isfinite(error):
        return SHADES[-1]
    return SHADES[min(len(SHADES) - 1, 1 + int(math.log10(error / tolerance)))]


def as_table(values: Sequence[Sequence[float]], tolerance: float, rows_per_cell: int) -> Table:
    """A line for each head."""
    lines = [(str(head), "".join(shade(error, tolerance) for error in line)) for head, line in enumerate(values)]
    each = "a row" if rows_per_cell == 1 else f"{rows_per_cell} rows"
    return Table(f"Error over (head, row): {LEGEND}", ("head", f"query rows, {each} in each character"), lines)


def png(values: Sequence[Sequence[float]], tolerance: float, rows_per_cell: int, title: str, block_rows: int) -> bytes:
    """The heat map: colour is the error as a multiple of the tolerance, lines are the borders of query tiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colors, pyplot

    heads, cells = len(values), len(values[0])
    figure, axes = pyplot.subplots(figsize=(6, 1.2 + 0.26 * min(heads, 16)), layout="constrained")
    shown = [[min(max(error / tolerance if tolerance else 1e9, 1e-3), 1e3) for error in line] for line in values]
    extent = (0, cells * rows_per_cell, heads - 0.5, -0.5)
    scale = colors.LogNorm(1e-3, 1e3)
    image = axes.imshow(shown, aspect="auto", extent=extent, norm=scale, cmap="RdBu_r", interpolation="nearest")
    tiles = cells * rows_per_cell / block_rows
    if tiles <= 32:
        for border in range(1, math.ceil(tiles)):
            axes.axvline(border * block_rows, color="black", linewidth=0.6, alpha=0.5)
    axes.set(xlabel="query row", ylabel="head", yticks=range(0, heads, max(1, heads // 8)))
    if title:
        axes.set_title(title, fontsize=8)
    figure.colorbar(image, ax=axes, label="error / tolerance", ticks=[1e-3, 1, 1e3], pad=0.02)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=170)
    pyplot.close(figure)
    return target.getvalue()


def save(path: Path, picture: bytes) -> None:
    path.write_bytes(picture)
