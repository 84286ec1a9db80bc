"""Pictures of a Report as SVG in the page's text colour, readable in light and dark."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from .reading import printable
from .tables import Bars, Curves, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#0a0b0c"  # replaced by the page's text colour
# Distinct for readers who see no red or green, on white and on black.
COLOURS = ("#3d85c6", "#e08a2e", "#2f9e6e", "#c75a9b", "#8a74d6", "#9a9a2e", "#8c8c8c")
WRONG = "#c9252d"
WIDTH = 4.4  # inches: about a phone's width, where letters keep their size
LONGEST = 4.0  # bars end here; the text behind a bar has the value
LETTERS = 70  # so many letters are as wide as the axis


def svg(picture: Picture) -> str:
    """Return an <svg> element for a page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_style()):
        figure = Figure(figsize=(WIDTH, _height(picture)), layout="constrained")
        _draw(figure.subplots(), picture)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # A page needs no namespaces, which look like addresses that it would fetch.
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href").replace(INK, "currentColor")
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1))


def _style() -> Any:
    """Return matplotlib's settings. The type is Any, since matplotlib's own lists every setting's name."""
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inked, INK),
        **{f"axes.spines.{side}": False for side in ("top", "right")},
        "svg.fonttype": "none",
        "text.parse_math": False,  # a name with two dollar signs is no formula
        "svg.hashsalt": "verify",  # the same picture gives the same page
        "font.family": "sans-serif",
        "font.size": 9,
        "legend.frameon": False,
    }


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _height(picture: Picture) -> float:
    if isinstance(picture, Bars):
        return 0.8 + len(picture.groups) * (0.22 + 0.17 * len(picture.series))
    return 2.6 + 0.16 * len(picture.lines)


def _draw(axes: Axes, picture: Picture) -> None:
    if isinstance(picture, Bars):
        _bars(axes, picture)
    else:
        _curves(axes, picture)


def _bars(axes: Axes, picture: Bars) -> None:
    step, height = len(picture.series) + 1.3, 0.9
    ink, width = axes.xaxis.label.get_color(), 1.7
    for group, (label, bars) in enumerate(picture.groups):
        axes.text(0, group * step, printable(label), va="center")
        axes.vlines(1, group * step + 0.6, (group + 1) * step - 0.6, color=ink, linewidth=1.5)
        for index, bar in enumerate(bars):
            if bar is not None:
                y, length = group * step + 1.1 + index * height, min(bar.value, LONGEST)
                style: dict[str, Any] = {"color": _colour(index)}
                if bar.wrong:
                    style = {"color": WRONG, "hatch": "///", "edgecolor": "white"}
                axes.barh(y, length, height * 0.9, **style)
                text = f"\N{RIGHTWARDS ARROW} {bar.text}" if bar.value > LONGEST else bar.text
                text += f", wrong {picture.series[index]}" * bar.wrong
                place: dict[str, Any] = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(printable(text), (max(1, length), y), fontsize=8, **place)
                width = max(width, _axis_length(max(1, length), text))
    there = [bar for _, bars in picture.groups for bar in enumerate(bars) if bar[1] is not None]
    for index in sorted({index for index, bar in there if bar and not bar.wrong}):
        axes.barh(0, 0, color=_colour(index), label=printable(picture.series[index]))
    if any(bar.wrong for _, bar in there if bar):
        axes.barh(0, 0, color=WRONG, hatch="///", edgecolor="white", label="wrong")
    mark: dict[str, Any] = {"marker": "|", "markersize": 8, "markeredgewidth": 1.5, "linestyle": ""}
    axes.plot([], [], color=ink, label=printable(picture.mark), **mark)
    axes.set_ylim(len(picture.groups) * step - 0.3, -0.8)
    axes.set_xlim(0, width)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.legend(ncols=2, fontsize=8, handlelength=1.4, loc="upper left", bbox_to_anchor=(0, -0.35 / _height(picture)))


def _axis_length(start: float, text: str) -> float:
    """Return the length of an axis that has room for the text from ``start`` on."""
    return start / (1 - min(len(text) / LETTERS, 0.7))


def _curves(axes: Axes, picture: Curves) -> None:
    for index, (name, points) in enumerate(picture.lines):
        style: dict[str, Any] = {
            "color": _colour(index),
            "marker": "osD^v*P"[index % 7],
            "markersize": 4,
        }
        axes.plot(*zip(*points), label=printable(name), linestyle="-" if index < 4 else "--", **style)
    ticks = sorted({x for _, points in picture.lines for x, _ in points})
    axes.set(xlabel=printable(picture.x), ylabel=printable(picture.y), xscale="log", yscale="log")
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks], rotation=45 if len(ticks) > 5 else 0)
    axes.yaxis.set_major_formatter(lambda y, position: f"{y:g}")  # matplotlib's own writes powers as formulas
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.figure.legend(fontsize=8, handlelength=1.8, loc="outside lower left")
