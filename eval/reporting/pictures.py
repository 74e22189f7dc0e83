"""Small inline SVG pictures, whose colours follow the page: light or dark.

Ink, grid and the two data colours (Okabe and Ito's blue and vermilion, safe for colour-blind readers) are CSS variables
of the page. The lines of the two starts differ in style, too.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

# Colours that nothing else has, replaced by the page's variables once matplotlib has written them.
_VARIABLES = {"#010203": "var(--ink)", "#010204": "var(--line)", "#010205": "var(--first)", "#010206": "var(--second)"}
_INK, _GRID, _FIRST, _SECOND = _VARIABLES
_STYLES = {"pretrained": (_FIRST, "-"), "random weights": (_SECOND, "--")}
_MOST_POINTS = 150
_FEW = 12
# Several pictures of one page would have the same; the ids that are referred to are hashes.
_NUMBERED_ID = re.compile(r' id="[A-Za-z0-9.]+_\d+"')
_PROLOGUE = re.compile(r"^.*?(?=<svg )", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)


def learning_curves(name: str, title: str, starts: Mapping[str, Sequence[Points]]) -> str:
    """One value by step of each trial.

    Args:
        name: of the picture, unique on its page.
        title: of the vertical axis.
        starts: "pretrained" and "random weights" -> the (step, value) points of each of its trials.
    """
    figure, axes = _figure(title, "step of fine-tuning")
    for start, trials in starts.items():
        colour, line = _STYLES[start]
        for number, points in enumerate(trials):
            steps, values = zip(*_thinned(points), strict=True)
            # A short curve may be one point, which a line does not show.
            marker = "o" if len(steps) <= _FEW else ""
            label = "_" * (number > 0) + start
            axes.plot(
                steps, values, color=colour, linestyle=line, linewidth=1.3, marker=marker, markersize=3, label=label
            )
    axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
    return _svg(figure, name, title)


def by_pretraining_step(name: str, title: str, points: Mapping[int, Sequence[float]]) -> str:
    """Scores by the pretraining step of the checkpoint: the median as a line, the seeds from minimum to maximum."""
    from statistics import median

    figure, axes = _figure(title, "step of pretraining")
    steps = list(points)
    axes.fill_between(
        steps, [min(v) for v in points.values()], [max(v) for v in points.values()], color=_FIRST, alpha=0.2, lw=0
    )
    axes.plot(steps, [median(v) for v in points.values()], color=_FIRST, marker="o", markersize=4, linewidth=1.5)
    return _svg(figure, name, title)


def side_by_side(name: str, title: str, panels: Mapping[str, Points]) -> str:
    """A panel for each value, by the step of pretraining; `panels`: the (step, value) points by the value's name."""
    figure = _empty_figure((2.2 * len(panels), 1.9))
    for axes, (label, points) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _style(axes, "", "step of pretraining")
        axes.set_title(label, color=_INK, fontsize=9)
        steps, values = zip(*_thinned(points), strict=True)
        axes.plot(steps, values, color=_SECOND, marker="o" * (len(steps) <= _FEW), markersize=3, linewidth=1.4)
        axes.margins(x=0.04, y=0.1)
        axes.locator_params(axis="x", nbins=3)
    return _svg(figure, name, title)


def _figure(title: str, below: str) -> tuple["Figure", "Axes"]:
    figure = _empty_figure((4.4, 2.5))
    axes = figure.subplots()
    _style(axes, title, below)
    return figure, axes


def _empty_figure(size: tuple[float, float]) -> "Figure":
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    return figure


def _style(axes: "Axes", title: str, below: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.patch.set_alpha(0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(title, color=_INK, fontsize=9)
    axes.set_xlabel(below, color=_INK, fontsize=9)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _svg(figure: "Figure", name: str, title: str) -> str:
    import matplotlib

    out = io.StringIO()
    # Text as text, in the reader's font; without the date, the same numbers give the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = _METADATA.sub("", _PROLOGUE.sub("", out.getvalue()))
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    svg = _NUMBERED_ID.sub("", svg)
    return re.sub(r' width="[^"]*"', f' role="img" aria-label="{title}"', svg, count=1)


def _thinned(points: Points) -> Points:
    """At most `_MOST_POINTS` means of neighbours: a page with every step of every trial would have megabytes."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
